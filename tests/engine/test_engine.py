"""The engine on real decoders: what concurrent requests get is what each would get alone."""

import errno
import random

import numpy as np
import pytest
import torch

from tests.small_models import open_engine
from trirun_cli.backends.cpu.sampler import HostSampler
from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.constraint import Constraint
from trirun_cli.engine.generation import stop_ids
from trirun_cli.engine.request import FinishReason, Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.engine.scoring import ScoringModel
from trirun_cli.errors import InputError, OutOfMemoryError, UsageError
from trirun_cli.text.detokenizer import quick_tokenizer, read_text
from trirun_cli.workflows.pack import pack


def random_requests(count, vocab, longest, seed=0):
    rng = random.Random(seed)
    return [
        Request(
            str(i),
            tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest))),
            SamplingParams(
                max_tokens=rng.randrange(0, 20),
                temperature=rng.choice((0, 0.8)),
                top_p=rng.choice((1, 0.9)),
                seed=i,
                logprobs=rng.choice((None, 2)),
                prompt_logprobs=rng.choice((None, None, 1)),
            ),
        )
        for i in range(count)
    ]


def run(engine, requests):
    """Per request: its tokens, its prompt's log-probabilities, why it ended."""
    found = {request.id: ([], [], []) for request in requests}
    for event in engine.generate(requests):
        tokens, scores, ends = found[event.request_id]
        tokens.extend(event.tokens)
        scores.extend(event.prompt_logprobs or ())
        if event.finish is not None:
            ends.append(event.finish)
    return found


def test_many_at_once_equal_each_alone(packed):
    requests = random_requests(24, 8192, 100)
    together = open_engine(packed, device="cpu", slots=8)
    found = run(together, requests)
    assert "native" in together.name and together.stats.running == together.stats.waiting == 0
    alone = open_engine(packed, device="cpu", slots=1)
    assert found == run(alone, requests)
    for request in requests:
        tokens, scores, ends = found[request.id]
        assert ends == [FinishReason.LENGTH] and len(tokens) == min(
            request.params.max_tokens, 128 - len(request.prompt)
        )
        assert len(scores) == (0 if request.params.prompt_logprobs is None else len(request.prompt))
    together.start()
    assert run(together, requests) == found
    together.close()


def test_bad_prompts_are_refused(packed):
    engine = open_engine(packed, device="cpu", slots=1)
    for prompt, reason in (((), "empty"), ((1,) * 129, "129 tokens"), ((8192,), "token id 8192"), ((-1,), "id -1")):
        with pytest.raises(InputError, match=reason):
            engine.submit(Request("a", prompt, SamplingParams()), print)
    with pytest.raises(InputError, match="logit_bias: token id 9000"):
        engine.submit(Request("a", (1,), SamplingParams(logit_bias={9000: 1.0})), print)


def test_bad_sizes_are_refused(packed, trirun):
    with pytest.raises(UsageError, match=r"--ctx 200: the context of .* is 128 tokens"):
        open_engine(packed, device="cpu", context=200)
    for sizes in ({"slots": 0}, {"context": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            open_engine(packed, device="cpu", **sizes)
    code, _, err = trirun("generate", "-c", packed / "nowhere", "-p", "a")
    assert code == 3 and "no such directory" in err.replace("\n", " ")


def test_a_cache_beyond_all_memory_is_refused(packed, monkeypatch):
    from trirun_kernels import arrays

    def refuse(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arrays.mmap, "mmap", refuse)
    with pytest.raises(OutOfMemoryError, match="2 sequences of 128 tokens do not fit"):
        open_engine(packed, device="cpu", slots=2)


def tokens_one_by_one(model, request):
    """What the engine is to write, by a forward pass and a draw in numpy for every token."""
    sampler, tokens, new = HostSampler(1, model.vocab_size), [], list(request.prompt)
    sampler.bind(0, request)
    model.reset()
    for _ in range(request.params.max_tokens):
        (token,) = sampler.sample(model.forward(torch.tensor(new)).numpy(), (0,))
        if token.id in request.stop_ids:
            break
        tokens.append(token.id)
        new = [token.id]
    return tokens


def test_sixty_four_readers_get_what_each_would_alone(shared, tmp_path):
    """A trained model, so that the text means something; prompts of many lengths, half of them with one beginning."""
    source = shared / "models" / "bookshelf-28m-ternary"
    pack(source, tmp_path / "packed")
    tokenizer = quick_tokenizer(source)
    text = tokenizer(read_text(None)[0])["input_ids"]
    requests = [
        Request(
            str(i),
            tuple(text[:70] + text[i * 9 : i * 10 + 1] if i % 2 else text[i * 11 : i * 15 + 1]),
            SamplingParams(max_tokens=12, temperature=0.7 if i % 4 == 3 else 0, seed=i),
            frozenset(stop_ids(source)),
        )
        for i in range(64)
    ]
    together = open_engine(tmp_path / "packed", device="cpu", slots=64)
    together.start()
    found = run(together, requests)
    together.close()
    assert together.stats.reused_tokens > 0
    # One at a time, without the engine, nothing reused.
    model = ScoringModel(open_runner(tmp_path / "packed", device="cpu", scoring=True))
    for request in requests:
        assert [token.id for token in found[request.id][0]] == tokens_one_by_one(model, request)
    assert len({tuple(token.id for token in tokens) for tokens, _, _ in found.values()}) > 50


def test_sampled_text_does_not_depend_on_bursts(packed, monkeypatch):
    """How many tokens a native call makes, and whether others run beside it, changes nothing."""
    from trirun_cli.backends.cpu import runner as cpu_runner
    from trirun_cli.engine import scheduler

    requests = [
        Request(str(i), (5, 6, 7 + i), SamplingParams(max_tokens=40, temperature=0.9, seed=i, **options))
        for i, options in enumerate(({}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 0.5}))
    ]
    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 1)
    singly = run(open_engine(packed, device="cpu", slots=1), requests)
    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 7)
    monkeypatch.setattr(scheduler, "ALONE_BURST_S", 1e9)
    engine = open_engine(packed, device="cpu", slots=1)
    assert run(engine, requests) == singly
    # The one with a penalty is sampled step by step.
    assert engine.stats.steps < 4 * (2 + -(-38 // 7)) + 41
    assert run(open_engine(packed, device="cpu", slots=4), requests[:4]) == {k: singly[k] for k in "0123"}


class Leaves(Constraint):
    """A grammar that leaves one token now and then, by what came before, and the stop id 2 alone in the end."""

    def __init__(self):
        self.tokens = []

    def fill(self, words):
        words[:] = 0
        state = (31 * sum(self.tokens) + 17 * len(self.tokens)) // 7
        for id in (2,) if len(self.tokens) == 33 else (3 + state % 90,) if state % 3 else range(3, 90, 2):
            words[id // 32] |= np.uint32(1 << id % 32)

    def advance(self, token):
        self.tokens.append(token)


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_tokens_that_a_grammar_forces_are_those_it_would_get_one_by_one(packed, monkeypatch, slots):
    from trirun_cli.backends.cpu import runner as cpu_runner
    from trirun_cli.engine import scheduler

    ways = [{}, {"temperature": 0.9}, {"max_tokens": 9}, {"temperature": 0.8, "presence_penalty": 0.5}]
    ways += [{"logprobs": 1}, {"ignore_stop_ids": True}, {"min_tokens": 20, "temperature": 1.5}]
    requests = [
        Request(str(i), (5, 6, 7 + i), SamplingParams(**{"max_tokens": 40, "seed": i} | way), frozenset({2}), Leaves)
        for i, way in enumerate(ways)
    ]
    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 1)
    engine = open_engine(packed, device="cpu", slots=1)
    singly, each = run(engine, requests), engine.stats.generated_tokens
    assert [reasons for _, _, reasons in singly.values()].count([FinishReason.STOP]) == 5
    monkeypatch.setattr(cpu_runner, "BURST_STEPS", 11)
    monkeypatch.setattr(scheduler, "ALONE_BURST_S", 1e9)
    engine, rows = open_engine(packed, device="cpu", slots=slots), []
    native = engine._runner._decoder.native
    step = native.run
    monkeypatch.setattr(native, "run", lambda *a, **k: (rows.append(max(s.count for s in a[0])), step(*a, **k)))
    assert run(engine, requests) == singly
    assert max(rows) > 3 and len(rows) < each
    # What is in the cache afterwards is what a prompt of these tokens would have left there.
    again = [
        Request(
            request.id,
            (*request.prompt, *(token.id for token in singly[request.id][0]), 9),
            SamplingParams(max_tokens=1, logprobs=3),
        )
        for request in requests[: -slots - 1 : -1]
    ]
    assert run(engine, again) == run(open_engine(packed, device="cpu", slots=1), again)
    assert engine.stats.reused_tokens > 30


def test_an_int8_cache_is_for_gpus(packed, trirun):
    for engine in ("auto", "native"):
        with pytest.raises(UsageError, match="native decoder of a GPU"):
            open_engine(packed, device="cpu", engine=engine, kv_cache_dtype="int8")
    code, out, err = trirun("generate", "-c", packed, "-p", "a", "--device", "cpu", "--kv-cache-dtype", "fp8")
    assert code == 2 and "--kv-cache-dtype fp8: auto or int8" in err and not out
