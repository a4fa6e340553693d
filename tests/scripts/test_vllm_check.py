"""What the script that compares vLLM with trirun expects."""

import pytest

pytest.importorskip("openai", reason="the script asks by OpenAI's client")

from vllm_check import expected


@pytest.mark.slow
def test_expected_answers_are_those_of_the_command_in_the_order_of_the_prompts(packed, trirun) -> None:
    prompts = ["Once upon a time", "The sea", "She said"]
    for engine in ("transformers", "auto"):
        texts = expected(packed, prompts, 6, engine, "float32")
        options = ("--max-tokens", 6, "--temperature", 0, "--engine", engine, "--dtype", "float32", "--act-bits", 16)
        for prompt, text in zip(prompts, texts, strict=True):
            code, out, _ = trirun("generate", packed, "--prompt", prompt, *options, "--quiet")
            assert code == 0 and out.rstrip("\n") == prompt + text
