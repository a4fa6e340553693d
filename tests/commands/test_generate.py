"""``trirun generate``."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from trirun_cli.text.detokenizer import load_tokenizer, quick_tokenizer
from trirun_cli.text.tokenizer import LightTokenizer, light_tokenizer


def test_greedy_text_of_packed_and_original_is_the_same(trirun, packed, ternary_model):
    options = ("--prompt", "Once upon a time", "--max-tokens", "12", "--json")
    code, out, _ = trirun("generate", "--checkpoint", packed, *options)
    document = json.loads(out)
    assert code == 0 and document["generated_tokens"] == 12 and document["finish_reason"] == "length"
    _, original, _ = trirun("generate", "--model", ternary_model, *options)
    assert json.loads(original)["text"] == document["text"]


def test_prompt_from_standard_input_and_file(trirun, packed, tmp_path):
    (tmp_path / "prompt.txt").write_text("Once upon a time\n")
    options = ("-c", packed, "-n", "5")
    _, piped, _ = trirun("generate", *options, stdin=io.StringIO("Once upon a time\n"))
    _, filed, _ = trirun("generate", *options, "-f", tmp_path / "prompt.txt")
    _, given, _ = trirun("generate", *options, "-p", "Once upon a time")
    assert piped == filed == given and given.startswith("Once upon a time")


def test_a_seed_repeats_and_stats_are_printed(trirun, packed):
    options = ("generate", "-c", packed, "-p", "The", "-n", "8", "--temperature", "1", "--top-p", "0.95", "--stats")
    texts = {trirun(*options, "--seed", "7")[1] for _ in range(2)}
    assert len(texts) == 1
    _, other, err = trirun(*options, "--seed", "8")
    assert other not in texts and "tokens/s" in err and "first token after" in err


def test_prompt_longer_than_the_context(trirun, packed):
    code, _, err = trirun("generate", "-c", packed, "-p", "word " * 300)
    assert code == 3 and "the context is 128 (--ctx)" in err


def test_no_tokens_and_one_token(trirun, packed):
    for count in (0, 1):
        code, out, _ = trirun("generate", "-c", packed, "-p", "The", "-n", count, "--json")
        document = json.loads(out)
        assert code == 0 and document["generated_tokens"] == count and document["finish_reason"] == "length"
        assert bool(document["text"]) == bool(count)


def test_a_stop_string_ends_the_text(trirun, packed):
    whole = json.loads(trirun("generate", "-c", packed, "-p", "The", "-n", 12, "--json")[1])["text"]
    stop = whole[len(whole) // 2 :][:5]
    document = json.loads(trirun("generate", "-c", packed, "-p", "The", "-n", 12, "--stop", stop, "--json")[1])
    assert document["finish_reason"] == "stop" and document["text"] == whole[: whole.index(stop)]
    # The last token that counts is the one that completes it, however many came at once.
    texts = [json.loads(trirun("generate", "-c", packed, "-p", "The", "-n", n, "--json")[1])["text"] for n in range(12)]
    assert document["generated_tokens"] == next(n for n, text in enumerate(texts) if stop in text)


@pytest.mark.usefixtures("foreground")
def test_ctrl_c_ends_with_the_text_so_far(trirun, packed, monkeypatch):
    from trirun_cli.backends.cpu import runner as cpu_runner
    from trirun_cli.engine.engine import Engine

    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 8)
    step, steps, handler = Engine.step, [], signal.getsignal(signal.SIGINT)

    def step_and_interrupt(self):
        steps.append(None)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    options = ("generate", "-c", packed, "-p", "The", "-n", 100)
    whole = trirun(*options)[1].rstrip("\n")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step_and_interrupt)
        code, out, err = trirun(*options, "--stats")
    assert code == 130 and out.startswith("The") and whole.startswith(out.rstrip("\n")) and len(out) < len(whole)
    # The third one only ends the request.
    assert len(steps) == 3 and " generated" in err
    assert signal.getsignal(signal.SIGINT) is handler


def test_sampling_defaults_come_from_the_model(trirun, copy_of, packed):
    model = copy_of(packed)
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 1, "eos_token_id": 0}')
    options = ("-p", "The", "-n", "6")
    assert trirun("generate", "-c", model, *options)[1] == trirun("generate", "-c", packed, *options)[1]
    code, _, err = trirun("generate", "-c", model, *options, "--min-p", "3")
    assert code == 2 and "--min-p must be from 0 to 1" in err
    (model / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    code, _, err = trirun("generate", "-c", model, *options)
    assert code == 3 and "generation_config.json: top_p must be above 0" in err


LIGHT = """
import sys
from trirun_cli.commands.app import main
sys.argv = ["trirun", "generate", "--checkpoint", sys.argv[1], "--prompt", "The", "-n", "3", "--device", "cpu"]
try:
    main()
finally:
    assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


def test_a_packed_model_needs_neither_torch_nor_transformers(packed):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LIGHT, packed], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith("The"), done.stderr


def test_light_tokenizer_is_transformers_own(plain_model):
    light, full = light_tokenizer(plain_model), load_tokenizer(plain_model)
    texts = ["The sea, and  the ship.", "naïve 日本語 🙂", " <|endoftext|> a<|endoftext|>b\n", "", "\t x"]
    for text in texts:
        ids = full(text)["input_ids"]
        assert light(text)["input_ids"] == ids
        for skip in (False, True):
            assert light.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert (light.bos_token_id, light.eos_token_id) == (full.bos_token_id, full.eos_token_id)


@pytest.mark.parametrize(
    "change", [{"tokenizer_class": "LlamaTokenizer"}, {"add_bos_token": True}, {"bos_token": "<new>"}, {"auto_map": {}}]
)
def test_other_tokenizers_are_left_to_transformers(copy_of, plain_model, change):
    model = copy_of(plain_model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    assert isinstance(quick_tokenizer(model), LightTokenizer)
    (model / "tokenizer_config.json").write_text(json.dumps(config | change))
    assert light_tokenizer(model) is None


def test_a_prompt_that_does_not_fit_is_not_shown_as_a_result(trirun, packed):
    code, out, err = trirun("generate", "-c", packed, "-p", "word " * 300, "-n", 3)
    assert code == 3 and out == "" and "context is 128" in err
