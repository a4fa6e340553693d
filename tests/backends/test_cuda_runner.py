"""The engine on the CUDA decoder: what it generates is what the reference would, alone or in a crowd."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import reference as decoder_reference
from trirun_kernels.decoder.cuda_reference import int8_round_trip

from tests.kernels.decoder.models import VOCAB, random_model
from trirun_cli.engine.constraint import Constraint
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import FinishReason, Request
from trirun_cli.engine.sampling import SamplingParams, Token
from trirun_cli.errors import TrirunError
from trirun_cli.models.description import UnsupportedModel, gpu_dtype

gpu = pytest.mark.gpu


def test_what_a_model_is_computed_in():
    assert gpu_dtype({"dtype": "bfloat16"}, "auto") == "bfloat16"
    assert gpu_dtype({"torch_dtype": "float32"}, "auto") == "float16"
    assert gpu_dtype({"dtype": "bfloat16"}, "float16") == "float16"
    with pytest.raises(UnsupportedModel, match="not float32"):
        gpu_dtype({}, "float32")


@pytest.fixture(scope="module")
def weights():
    return random_model(hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=64)


def engine_of(weights, slots=8, pages=None, max_rows=96, kv_dtype=None):
    from trirun_kernels.decoder.cuda import CudaDecoder
    from trirun_kernels.decoder.cuda_weights import CudaModel

    from trirun_cli.backends.cuda.runner import CudaRunner

    model = CudaModel.of(weights, "cuda", torch.float16)
    decoder = CudaDecoder(model, slots=slots, context=192, pages=pages or slots * 3 + 1, kv_dtype=kv_dtype)
    return Engine(CudaRunner(decoder, max_rows=max_rows))


def prompts(count, longest=150, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def generate(engine, texts, params):
    requests = [Request(str(i), tuple(text), params) for i, text in enumerate(texts)]
    out = {str(i): [] for i in range(len(texts))}
    for event in engine.generate(requests):
        assert event.finish is not FinishReason.ERROR, event.error
        out[event.request_id] += event.tokens
    return [out[str(i)] for i in range(len(texts))]


def assert_greedy(weights, prompt, tokens, tie=0.05, stored=None):
    """Every token is the likeliest after what came before it, up to a near tie (in deviations of the logits)."""
    text = torch.tensor(prompt + tokens)
    logits = decoder_reference.forward(weights, text[:-1], stored=stored)[len(prompt) - 1 :]
    chosen = logits.gather(1, text[len(prompt) :].unsqueeze(1)).squeeze(1)
    missed = logits.max(1).values - chosen
    # Random models attend sharply: of a code next to a tie it may depend what follows (1 token in 1100 with keys and
    # values that differ by fp16's rounding, in the reference itself).
    assert (missed.max() if stored is None else missed.quantile(0.9)) < tie * logits.std()


@gpu
def test_many_requests_at_once(weights):
    texts = prompts(30)
    results = generate(engine_of(weights), texts, SamplingParams(max_tokens=20, ignore_stop_ids=True))
    for text, result in zip(texts, results, strict=True):
        assert len(result) == 20
        assert_greedy(weights, text, [token.id for token in result])


@gpu
def test_a_step_that_gave_up_ends_with_the_reason():
    rows = QuantSpec(-1, 1.0)
    weights = random_model(hidden=256, ffn=384, heads=4, kv_heads=4, head_dim=64, spec=rows)
    engine = engine_of(weights, slots=1)
    decoder = engine._runner._decoder
    if decoder.step_refusal is not None:
        pytest.skip(decoder.step_refusal)
    params = SamplingParams(max_tokens=5, ignore_stop_ids=True)
    assert len(generate(engine, [[1, 2, 3]], params)[0]) == 5
    with torch.inference_mode():
        decoder._steps[1, False]._messages[4:8] = 1
    with pytest.raises(TrirunError, match="another program held"):
        generate(engine, [[1, 2, 3]], params)


@pytest.mark.parametrize("gave_up", [True, False])
def test_a_row_without_a_token_is_an_error_of_the_step_only_where_it_gave_up(gave_up):
    from trirun_cli.backends.cuda.pending import CudaPending

    reading = SimpleNamespace(wait=lambda: ([Token(4), Token(-1)], []))
    step = CudaPending(SimpleNamespace(gave_up=gave_up), None, [1, 0, None], [(0, 0)] * 3, reading)
    if gave_up:
        with pytest.raises(TrirunError, match="another program held"):
            step.collect()
    else:
        assert [outcome.token and outcome.token.id for outcome in step.collect()] == [-1, 4, None]


@gpu
def test_int8_cache(weights):
    texts = prompts(30)
    engine = engine_of(weights, pages=14, kv_dtype=torch.int8)
    assert engine.name.endswith("int8 cache")
    results = generate(engine, texts, SamplingParams(max_tokens=20, ignore_stop_ids=True))
    for text, result in zip(texts, results, strict=True):
        assert_greedy(weights, text, [token.id for token in result], tie=0.15, stored=int8_round_trip)


@gpu
def test_graphs_are_captured_while_another_thread_allocates(weights):
    done = threading.Event()

    def allocate():
        # Each larger than all before it: PyTorch has none of that size and asks the driver.
        for size in range(12, 112):
            torch.empty(size << 20, dtype=torch.uint8, device="cuda")
            if done.wait(0.005):
                break

    other = threading.Thread(target=allocate)
    other.start()
    try:
        engine = engine_of(weights)
    finally:
        done.set()
        other.join()
    params = SamplingParams(max_tokens=10, ignore_stop_ids=True)
    assert generate(engine, prompts(4), params) == generate(engine_of(weights), prompts(4), params)


@gpu
def test_little_memory_only_makes_them_wait(weights):
    texts = prompts(12, longest=100)
    results = generate(engine_of(weights, pages=9), texts, SamplingParams(max_tokens=40, ignore_stop_ids=True))
    for text, result in zip(texts, results, strict=True):
        assert_greedy(weights, text, [token.id for token in result])


@gpu
def test_a_shared_beginning_is_computed_once(weights):
    engine, head = engine_of(weights), prompts(1, seed=5)[0]
    head = (head * 10)[:130]
    texts = [head + tail[:10] for tail in prompts(6, seed=6)]
    params = SamplingParams(max_tokens=10, ignore_stop_ids=True)
    first = generate(engine, texts, params)
    assert generate(engine, texts, params) == first
    assert engine.stats.reused_tokens >= 6 * 128
    for text, result in zip(texts, first, strict=True):
        assert_greedy(weights, text, [token.id for token in result])


@gpu
def test_draws_do_not_depend_on_the_batch(weights):
    texts = prompts(10, seed=2)
    params = SamplingParams(max_tokens=15, temperature=1.0, top_p=0.9, top_k=50, seed=7, ignore_stop_ids=True,
                            presence_penalty=0.5, logit_bias={3: 1.5}, logprobs=3)  # fmt: skip
    together = generate(engine_of(weights), texts, params)
    alone = [generate(engine_of(weights, slots=1), [text], params)[0] for text in texts[:3]]
    same = sum(a.id == b.id for one, many in zip(alone, together, strict=False) for a, b in zip(one, many, strict=True))
    # Last bits differ between batch sizes; a draw that falls between them changes what follows.
    assert same >= 30
    for token in together[0]:
        assert len(token.top) == 3 and token.top[0][1] >= token.logprob - 1e-3 and token.logprob <= 0


@gpu
def test_probabilities_of_prompts(weights):
    text = prompts(1, seed=9)[0]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    events = list(engine_of(weights, max_rows=32).generate([Request("a", tuple(text), params)]))
    scores = next(event.prompt_logprobs for event in events if event.prompt_logprobs)
    expected = decoder_reference.forward(weights, torch.tensor(text)).log_softmax(-1)
    assert [token.id for token in scores] == text
    for position, token in enumerate(scores[1:]):
        assert abs(token.logprob - expected[position, token.id].item()) < 0.05


class Pattern(Constraint):
    """A constraint: token i of the text is i modulo ``period``, or ``period``."""

    def __init__(self, period):
        self.period, self.tokens = period, []

    def fill(self, words):
        words[:] = 0
        for token in (len(self.tokens) % self.period, self.period):
            words[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token):
        assert token in (len(self.tokens) % self.period, self.period)
        self.tokens.append(token)


@gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("threaded", [True, False])
def test_constraints_among_others(weights, temperature, threaded, monkeypatch):
    """Texts with a constraint keep to it, and change no other, in a crowd that is preempted now and then; whether a
    thread makes their masks or not."""
    monkeypatch.setattr("trirun_cli.backends.cuda.sampler.FEWEST_THREADED", 1 if threaded else 1000)
    texts = prompts(24)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_stop_ids=True)
    constraints = [partial(Pattern, 5 + i) if i % 2 else None for i in range(len(texts))]

    def run(engine, chosen):
        requests = [
            Request(str(i), tuple(texts[i]), params, constraint=constraints[i] if i in chosen else None)
            for i in range(len(texts))
        ]
        out = {request.id: [] for request in requests}
        for event in engine.generate(requests):
            assert event.finish is not FinishReason.ERROR, event.error
            out[event.request_id] += [token.id for token in event.tokens]
        return [out[str(i)] for i in range(len(texts))]

    free = run(engine_of(weights, pages=16), ())
    mixed = run(engine_of(weights, pages=16), range(len(texts)))
    for i, (alone, found) in enumerate(zip(free, mixed, strict=True)):
        if constraints[i] is None:
            assert found == alone
        else:
            assert all(token in (place % (5 + i), 5 + i) for place, token in enumerate(found)) and len(found) == 40


@gpu
@pytest.mark.parametrize("threaded", [True, False])
def test_a_constraint_without_a_way_on_ends_its_text_alone(weights, threaded, monkeypatch):
    monkeypatch.setattr("trirun_cli.backends.cuda.sampler.FEWEST_THREADED", 1 if threaded else 1000)

    class Stuck(Pattern):
        def fill(self, words):
            super().fill(words)
            if len(self.tokens) == 3:
                words[:] = 0

    engine = engine_of(weights)
    params = SamplingParams(max_tokens=10, ignore_stop_ids=True)
    requests = [
        Request("stuck", (1, 2, 3), params, constraint=lambda: Stuck(4)),
        Request("free", (1, 2, 3), params),
    ]
    ends = {event.request_id: event for event in engine.generate(requests) if event.finish is not None}
    assert ends["stuck"].finish is FinishReason.ERROR and "grammar" in ends["stuck"].error
    assert ends["stuck"].usage.generated_tokens == 3 and ends["free"].finish is FinishReason.LENGTH


def test_a_step_beside_hidden_states_is_the_captured_one(monkeypatch):
    from trirun_cli.backends.cuda.runner import CudaRunner
    from trirun_cli.engine.runner import Work

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    runner, called = CudaRunner.__new__(CudaRunner), []
    runner._turn, runner._device = 0, None
    for name in ("_copy_tables", "_sample_last", "_states", "_decode", "_mixed"):
        monkeypatch.setattr(runner, name, lambda *arguments, name=name: called.append(name), raising=False)
    pooled, decoded, prompt = Work(0, 0, [1, 2], False, states=True), Work(1, 5, None, True), Work(2, 0, [3, 4], True)
    for works, expected in (
        ([decoded], ["_decode"]),
        ([decoded, prompt], ["_mixed"]),
        ([pooled, decoded], ["_states", "_decode"]),
        ([pooled, decoded, prompt], ["_states", "_mixed"]),
        ([pooled], ["_states"]),
    ):
        called.clear()
        runner.launch(works)
        assert [name for name in called if name in ("_states", "_decode", "_mixed")] == expected
        # The sampler of the step before comes before anything else runs; the captured step sees to it by itself.
        assert called[0] == "_copy_tables" and (called[1] == "_sample_last" or expected == ["_decode"])


def test_hidden_states_come_in_the_order_of_the_works():
    from trirun_cli.backends.cuda.pending import CudaPending, CudaPooled
    from trirun_cli.engine.runner import Work

    reading = SimpleNamespace(wait=lambda: ([Token(4)], []))
    rest = CudaPending(SimpleNamespace(gave_up=False), None, [0], [(0, 0)], reading)
    pooled, sampled = Work(0, 0, [1, 2], False, states=True), Work(1, 5, None, True)
    states = [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]
    first, token, second = CudaPooled([pooled, sampled, pooled], states, rest).collect()
    assert token.token == Token(4) and token.states is None
    assert (first.states == 1).all() and (second.states == 2).all() and first.token is None
    (alone,) = CudaPooled([pooled], states[:1], None).collect()
    assert (alone.states == 1).all()
