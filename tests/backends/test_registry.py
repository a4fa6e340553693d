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
        (PLAIN | {"model_type": "gemma"}, {"gpu": True}, "transformers", "not gemma"),
        (OTHER, {"gpu": True}, "transformers", "quantized by 'gptq'"),
        (PACKED, {"engine": "transformers"}, "transformers", None),
        (PACKED, {"dtype": "float16"}, "transformers", "float32 on a CPU, not float16"),
        (PACKED, {"dtype": "float32", "gpu": True}, "transformers", "not float32"),
        (PACKED | {"intermediate_size": 200}, {"gpu": True}, "transformers", "feed-forward size 200"),
        (PACKED, {"gpu": True, "obstacle": "too old"}, "transformers", "too old"),
        (WINDOW, {}, "transformers", "a sliding window of 64 positions; --ctx 64 stays within it"),
        (WINDOW, {"gpu": True}, "transformers", "a sliding window of 64 positions; --ctx 64 stays within it"),
        (WINDOW, {"context": 64}, "cpu", None),
        (WINDOW, {"engine": "native"}, "cpu", None),
        (WINDOW | {"sliding_window": 4096}, {}, "cpu", None),
        (IDLE, {}, "cpu", None),
        (WINDOW, {"gpu": True, "context": 65}, "transformers", "65 positions; the model attends to 64"),
        (WINDOW, {"gpu": True, "scoring": True}, "transformers", "a sliding window of 64 positions"),
        (WINDOW | {"max_position_embeddings": None}, {"gpu": True, "scoring": True}, "cuda", None),
    ],
)
def test_the_rule(config, asked, backend, reason):
    choice = choose_backend(config, **({"gpu": False} | asked))
    assert choice.backend == backend and (choice.reason is None) == (reason is None)
    assert reason is None or reason in choice.reason


@pytest.mark.parametrize("config", [PACKED, PLAIN, OTHER])
@pytest.mark.parametrize("gpu", [False, True])
def test_scoring_takes_the_backend_that_generates(config, gpu):
    assert choose_backend(config, gpu=gpu, scoring=True) == choose_backend(config, gpu=gpu)


def test_a_reason_is_given_for_every_slower_backend(packed, plain_model):
    native, plain = (open_runner(path, device="cpu", slots=1) for path in (packed, plain_model))
    assert native.name.startswith("native decoder on cpu") and native.why_slower == ""
    assert Engine(plain).description == "transformers on cpu (on a CPU the native decoder runs packed checkpoints)"
    assert open_runner(packed, device="cpu", engine="transformers").why_slower == ""
    with pytest.raises(InputError, match="on a CPU the native decoder runs packed checkpoints"):
        open_runner(plain_model, device="cpu", engine="native")
    with pytest.raises(UsageError, match="--tf32 is for transformers"):
        open_runner(packed, device="cpu", engine="native", tf32=True)


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
