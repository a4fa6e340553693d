"""Which backend runs which model: one rule for generate, serve, eval and Python."""

from __future__ import annotations

import pytest

from trirun_cli.backends.registry import choose_backend, open_runner
from trirun_cli.engine.engine import Engine
from trirun_cli.errors import InputError, UsageError

PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
PACKED = PLAIN | {"quantization_config": {"quant_method": "trirun"}}
OTHER = PACKED | {"quantization_config": {"quant_method": "gptq"}}
IDLE = PACKED | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 0}
WINDOW = PACKED | {"model_type": "mistral", "sliding_window": 64}


@pytest.mark.parametrize(
    ("config", "asked", "backend", "reason"),
    [
        (PACKED, {}, "cpu", None),
        (PACKED, {"gpu": True}, "cuda", None),
        (PLAIN, {}, "transformers", "on a CPU the native decoder runs packed checkpoints"),
        (PLAIN, {"gpu": True}, "cuda", None),
        (
            PLAIN | {"model_type": "gpt_neox"},
            {"gpu": True},
            "transformers",
            "does not run models of the family gpt_neox",
        ),
        (OTHER, {"gpu": True}, "transformers", "quantized by 'gptq'"),
        (PACKED, {"engine": "transformers"}, "transformers", None),
        (PACKED, {"dtype": "float16"}, "transformers", "float32 on a CPU, not float16"),
        (PACKED, {"dtype": "float32", "gpu": True}, "transformers", "not float32"),
        (PACKED | {"intermediate_size": 200}, {"gpu": True}, "transformers", "feed-forward size 200"),
        (PACKED, {"gpu": True, "obstacle": "too old"}, "transformers", "too old"),
        (WINDOW, {}, "cpu", None),
        (WINDOW, {"gpu": True, "context": 65}, "cuda", None),
        (IDLE, {}, "cpu", None),
        (PACKED, {"gpu": True, "context": 4097}, "transformers", "4097 positions; the model has 4096"),
        (PACKED | {"model_type": "gemma3_text", "head_dim": 520}, {"gpu": True}, "transformers", "head size 520"),
        ({"model_type": "gemma3", "text_config": WINDOW}, {"gpu": True}, "cuda", None),
    ],
)
def test_the_rule(config, asked, backend, reason):
    choice = choose_backend(config, **({"gpu": False} | asked))
    assert choice.backend == backend and (choice.reason is None) == (reason is None)
    assert reason is None or reason in choice.reason


def test_a_reason_is_given_for_every_slower_backend(packed, plain_model):
    native, plain = (open_runner(path, device="cpu", slots=1) for path in (packed, plain_model))
    assert native.name.startswith("native decoder on cpu") and native.why_slower == ""
    assert Engine(plain).description == "transformers on cpu (on a CPU the native decoder runs packed checkpoints)"
    assert open_runner(packed, device="cpu", engine="transformers").why_slower == ""
    with pytest.raises(InputError, match="on a CPU the native decoder runs packed checkpoints"):
        open_runner(plain_model, device="cpu", engine="native")
    with pytest.raises(UsageError, match="--tf32 is for transformers"):
        open_runner(packed, device="cpu", engine="native", tf32=True)


def test_a_model_that_gives_back_no_cache_is_named(plain_model, monkeypatch):
    runner = open_runner(plain_model, device="cpu", slots=1)
    answer = runner._forward

    def without_cache(**inputs):
        output = answer(**inputs)
        return type(output)(logits=output.logits)

    monkeypatch.setattr(runner, "_forward", without_cache)
    with pytest.raises(InputError, match="LlamaForCausalLM gives back no cache of its past"):
        runner.logits(0, 0, [1, 2, 3], 1)


def test_one_runner_scores_and_generates_by_turns(packed):
    import torch

    from trirun_cli.engine.request import Request
    from trirun_cli.engine.sampling import SamplingParams
    from trirun_cli.engine.scoring import ScoringModel

    def written():
        request = Request("a", (5, 6, 7), SamplingParams(max_tokens=10))
        return [token.id for event in engine.generate([request]) for token in event.tokens]

    runner = open_runner(packed, device="cpu", scoring=True)
    engine, model, text = Engine(runner), ScoringModel(runner), torch.arange(5, 65)
    first = written()
    logits = model.forward(text, last_only=False)
    assert written() == first
    assert torch.equal(model.forward_batch([text], [60])[0], logits) and written() == first
    model.rewind(30)
    assert torch.equal(model.forward(text[30:], last_only=False), logits[30:])
    model.reset()
    assert written() == first and runner.cache.usage == 0


def test_the_head_that_is_asked_for(packed, plain_model, trirun):
    for head, name in (("auto", "8-bit head"), ("int8", "8-bit head"), ("16bit", "head unquantized")):
        runner = open_runner(packed, device="cpu", head=head, slots=1)
        assert name in runner.name
        runner.close()
    with pytest.raises(UsageError, match="--head int8: the native decoder has it alone"):
        open_runner(packed, device="cpu", head="int8", engine="transformers")
    with pytest.raises(InputError, match="on a CPU the native decoder runs packed checkpoints"):
        open_runner(plain_model, device="cpu", head="int8")
    code, out, err = trirun("generate", "-c", packed, "-p", "a", "--device", "cpu", "--head", "fp8")
    assert code == 2 and "--head fp8: auto, 16bit or int8" in err and not out
