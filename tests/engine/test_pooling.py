"""Hidden states of prompts, pooled: between texts that are generated, in pieces, after preemptions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.engine.mock_runner import MockRunner, continuation, run_all, submit
from tests.small_models import save_ternary
from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import FinishReason, Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.errors import InputError


def ask(engine, name, prompt, pooling):
    events = []
    engine.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=0), pooling=pooling), events.append)
    return events


def pooled(states, pooling):
    return states.mean(0) if pooling == "mean" else states[-1]


@pytest.mark.parametrize("options", [{}, {"pages": 40}, {"pages": 10}, {"lookahead": 1}, {"pages": 10, "lookahead": 1}])
def test_texts_and_embeddings_at_once(options):
    rng, engine, expected = random.Random(1), Engine(MockRunner(**options)), []
    for i in range(60):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
        if i % 2:
            pooling = rng.choice(["mean", "last"])
            states = np.array([[sum(prompt[: at + 1]), prompt[at]] for at in range(len(prompt))], np.float32)
            expected.append((ask(engine, str(i), prompt, pooling), pooled(states, pooling)))
        else:
            inbox = submit(engine, i, prompt, 8)
            expected.append((inbox, continuation(prompt, min(8, 32 - len(prompt)))))
        for _ in range(rng.randrange(3)):
            engine.step()
    run_all(engine)
    for found, right in expected:
        if isinstance(found, list):
            (event,) = found
            assert event.finish == FinishReason.STOP and not event.tokens
            assert np.allclose(event.embedding, right) and event.embedding.dtype == np.float32
        else:
            assert found.tokens == right
    assert engine.stats.running == engine.stats.waiting == 0


def test_one_can_be_cancelled_and_a_runner_without_states_refuses():
    engine = Engine(MockRunner(max_rows=4))
    events = ask(engine, "a", range(20), "mean")
    engine.step()
    engine.abort("a")
    run_all(engine)
    assert [event.finish for event in events] == [FinishReason.ABORT]
    runner = MockRunner()
    runner.has_states = False
    with pytest.raises(InputError, match="mock gives no hidden states"):
        ask(Engine(runner), "a", [1], "last")


ON_GPU = {"engine": "native", "device": "cuda", "dtype": "float16"}
GRANITE = {"logits_scaling": 4.0}  # a factor of the logits that is no part of the states


@pytest.mark.parametrize(
    ("family", "change", "options"),
    [
        ("qwen3", {}, {"engine": "native", "device": "cpu", "dtype": "float32"}),
        ("granite", GRANITE, {"engine": "native", "device": "cpu", "dtype": "float32"}),
        ("qwen3", {}, {"engine": "transformers", "device": "cpu", "dtype": "float32"}),
        pytest.param("qwen3", {}, ON_GPU, marks=pytest.mark.gpu),
        pytest.param("granite", GRANITE, ON_GPU, marks=pytest.mark.gpu),
    ],
)
def test_of_a_model_they_are_those_of_transformers(family, change, options, tmp_path):
    """Of prompts longer than a step, beside a text that is being generated."""
    model, _, packed = save_ternary(family, change, tmp_path)
    runner = open_runner(packed, slots=3, threads=2, **options)
    runner.max_rows = 48
    engine = Engine(runner)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 96, (length,), generator=generator) for length in (1, 60, 7)]
    text = []
    engine.submit(Request("text", (5, 6, 7), SamplingParams(max_tokens=12)), text.append)
    found = [
        (prompt, pooling, ask(engine, f"{i}{pooling}", prompt.tolist(), pooling))
        for i, prompt in enumerate(prompts)
        for pooling in ("mean", "last")
    ]
    while engine.step():
        pass
    for prompt, pooling, events in found:
        with torch.inference_mode():
            states = model(prompt.unsqueeze(0), output_hidden_states=True).hidden_states[-1][0].float().numpy()
        right = pooled(states, pooling)
        assert np.linalg.norm(events[-1].embedding - right) < 1e-2 * np.linalg.norm(right)
    alone = []
    engine.submit(Request("alone", (5, 6, 7), SamplingParams(max_tokens=12)), alone.append)
    while engine.step():
        pass
    tokens = [[token.id for event in events for token in event.tokens] for events in (text, alone)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12
    engine.close()
