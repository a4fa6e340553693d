"""Scoring continuations: every plan against one pass per request, and results that outlive a run."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trirun_cli.engine.likelihoods import Scorer
from trirun_cli.errors import InputError
from trirun_cli.eval.request_cache import RequestCache

VOCAB = 23


class HistoryLM:
    """Next-token logits that depend on every token before and its position; counts what it is asked."""

    vocab_size, engine = VOCAB, "test"

    def __init__(self, max_positions=64, can_rewind=True):
        self.max_positions, self.can_rewind = max_positions, can_rewind
        self.tokens, self.held = 0, []

    def reset(self):
        self.held = []

    def rewind(self, length):
        assert (self.can_rewind or length == 0) and 0 <= length <= len(self.held)
        del self.held[length:]

    def forward(self, tokens, *, last_only=True):
        assert tokens.numel() > 0 and len(self.held) + tokens.numel() <= self.max_positions
        rows = []
        for token in tokens.tolist():
            self.held.append(token)
            rows.append(logits_after(self.held))
        self.tokens += tokens.numel()
        return torch.stack(rows[-1:] if last_only else rows)

    def forward_batch(self, sequences, keep):
        found = []
        for sequence, count in zip(sequences, keep, strict=True):
            self.reset()
            found.append(self.forward(sequence, last_only=False)[-count:])
        return found


class BatchHistoryLM(HistoryLM):
    """The same, many sequences at once; out of memory beyond ``most`` tokens."""

    def __init__(self, most=10**9, **options):
        super().__init__(**options)
        self.most, self.batches = most, []

    def forward_batch(self, sequences, keep):
        if sum(map(len, sequences)) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.batches.append(len(sequences))
        rows = [[logits_after(s[: i + 1]) for i in range(len(s))] for s in (s.tolist() for s in sequences)]
        return [torch.stack(found[-count:]) for found, count in zip(rows, keep, strict=True)]


def logits_after(history):
    state = sum((index + 1) * (token + 1) for index, token in enumerate(history)) % 97
    return torch.sin(torch.arange(VOCAB) * (1.3 + state)) * 3


def one_by_one(requests, max_positions):
    found = []
    for context, continuation in requests:
        context = context[max(0, len(context) + len(continuation) - 1 - max_positions) :]
        total, greedy, history = 0.0, True, list(context)
        for token in continuation:
            row = logits_after(history).log_softmax(-1)
            total, greedy = total + row[token].item(), greedy and int(row.argmax()) == token
            history.append(token)
        found.append((total, greedy))
    return found


def same(found, wanted):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-4)


words = st.lists(st.integers(0, 2), min_size=1, max_size=12)
questions = st.lists(st.tuples(words, st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(questions, st.sampled_from([8, 64]), st.sampled_from([None, 1, 3]))
def test_every_plan_gives_what_one_pass_per_request_gives(requests, context, batch_size):
    wanted = one_by_one(requests, context)
    for model in (
        HistoryLM(context),
        HistoryLM(context, can_rewind=False),
        BatchHistoryLM(max_positions=context),
        BatchHistoryLM(max_positions=context, can_rewind=False),
    ):
        shares = []
        same(Scorer(model, "cpu", batch_size=batch_size).score(requests, shares.append), wanted)
        assert sum(shares) == pytest.approx(1)


def test_a_question_with_letters_for_answers_is_run_once_and_its_examples_are_shared():
    model, examples = HistoryLM(200), list(range(20)) * 5
    requests = [([*examples, question], [letter]) for question in range(10) for letter in range(4)]
    scorer = Scorer(model, "cpu")
    same(scorer.score(requests, lambda share: None), one_by_one(requests, 200))
    assert model.tokens == scorer.tokens == 100 + 10
    assert "shared prefixes" in scorer.plan and scorer.truncated == 0 and scorer.model_s > 0


def test_batches_shrink_until_they_fit_in_memory():
    model = BatchHistoryLM(most=40, can_rewind=False)
    requests = [([1 + index % 7] * 10, [2, index % VOCAB]) for index in range(30)]
    same(Scorer(model, "cuda:0").score(requests, lambda share: None), one_by_one(requests, 64))
    assert max(model.batches) == 3
    with pytest.raises(torch.OutOfMemoryError):
        Scorer(BatchHistoryLM(most=5, can_rewind=False), "cuda").score(requests, lambda share: None)


def test_a_context_that_does_not_fit_loses_its_beginning_and_an_answer_that_does_not_is_refused():
    requests = [(list(range(20)), [3, 4]), ([5], [6])]
    scorer = Scorer(HistoryLM(8), "cpu")
    same(scorer.score(requests, lambda share: None), one_by_one(requests, 8))
    assert scorer.truncated == 1
    with pytest.raises(InputError, match=r"an answer of 9 tokens does not fit the context of 8 \(--ctx\)"):
        scorer.score([([1], list(range(9)))], lambda share: None)


def test_finished_requests_are_not_run_again(tmp_path):
    requests = [([1, 2, index], [3, 4]) for index in range(6)]
    wanted = one_by_one(requests, 64)
    # Each is three tokens of context and one of the answer; the last is never read.
    for number, tokens in ((4, 4 * 4), (6, 2 * 4), (6, 0)):
        cache, model = RequestCache(tmp_path / "model.jsonl", {"sha256": "a"}), HistoryLM()
        same(Scorer(model, "cpu", cache=cache).score(requests[:number], lambda share: None), wanted[:number])
        cache.close()
        assert model.tokens == tokens
    assert len((tmp_path / "model.jsonl").read_text().splitlines()) == 1 + 6


def test_a_line_cut_short_by_a_crash_is_computed_again(tmp_path):
    path = tmp_path / "model.jsonl"
    cache = RequestCache(path, {"sha256": "a"})
    cache.put("loglikelihood", [1], [2], value=[-1.5, True])
    cache.put("loglikelihood", [1], [3], value=[-2.5, False])
    cache.close()
    path.write_text(path.read_text()[:-9])
    cache = RequestCache(path, {"sha256": "a"})
    assert cache.found == 1 and cache.get("loglikelihood", [1], [2]) == [-1.5, True]
    assert cache.get("loglikelihood", [1], [3]) is None and cache.get("window", [1], [2]) is None
    assert cache.get("loglikelihood", [1, 2], []) is None
    cache.put("loglikelihood", [1], [3], value=[-2.5, False])
    cache.close()
    assert RequestCache(path, {"sha256": "a"}).found == 2


def test_results_of_another_model_or_a_damaged_file_are_refused(tmp_path):
    path = tmp_path / "model.jsonl"
    cache = RequestCache(path, {"sha256": "a", "act_bits": 16})
    cache.put("window", [1], value=0.5)
    with pytest.raises(InputError, match="in use by another run"):
        RequestCache(path, {"sha256": "a", "act_bits": 16})
    cache.close()
    before = path.read_text()
    for other in ({"sha256": "a", "act_bits": 8}, {"sha256": "a"}, {"sha256": "a", "act_bits": 16, "more": 1}):
        with pytest.raises(InputError, match=r"was written for another (act_bits|more)"):
            RequestCache(path, other)
    assert path.read_text() == before
    for damage in ("[1\n", "null\n", '["key"]\n', "7\n"):
        path.write_text(before + damage)
        with pytest.raises(InputError, match=r"model\.jsonl:3: damaged"):
            RequestCache(path, {"sha256": "a", "act_bits": 16})
    path.write_text(json.dumps(["no", "header"]) + "\n")
    with pytest.raises(InputError, match=r"model\.jsonl:1: damaged"):
        RequestCache(path, {"sha256": "a"})
