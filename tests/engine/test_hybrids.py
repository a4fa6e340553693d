"""Hybrids of attention and Gated DeltaNet in the native decoder of the CPU, against transformers in float32;
states beside the paged cache of a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_families import check, greedy, prompts
from tests.small_models import open_engine, save_ternary
from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams

SMALL = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
FAMILIES = {"qwen3_5_text": SMALL, "qwen3_next": SMALL | {"num_experts": 0}}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """A random ternary model in float32, and its packed directory."""
    family = request.param
    model, _, packed = save_ternary(family, FAMILIES[family], tmp_path_factory.mktemp(family))
    return model, packed


def test_logits_are_those_of_transformers_however_a_text_is_cut(models):
    model, packed = models
    tokens = torch.randint(3, 96, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float()
    runner = open_runner(packed, device="cpu", slots=2, exact=True)
    assert runner.name.startswith("native decoder on cpu") and not runner.can_rewind
    whole = runner.batch_logits([tokens], [250])[0]
    errors = (whole - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 1e-3
    slot, at, found = runner.cache.admit(tokens, reuse=False).slot, 0, []
    for count in (1, 2, 60, 64, 1, 1, 1, 100, 20):
        found.append(runner.logits(slot, at, tokens[at : at + count], count))
        at += count
    assert torch.equal(torch.cat(found), whole)


def test_requests_side_by_side_get_the_tokens_of_each_alone(models):
    model, packed = models
    engine = open_engine(packed, device="cpu", slots=3)
    found, scores = greedy(engine)
    check(model, found, scores)
    # From slots that other sequences have left.
    assert greedy(engine)[0] == found


def test_a_conversation_goes_on_in_its_slot_and_a_part_of_it_does_not(models):
    _, packed = models
    engine, prompt = open_engine(packed, device="cpu", slots=2), prompts()[1]

    def run(name, tokens):
        events = list(engine.generate([Request(name, tuple(tokens), SamplingParams(max_tokens=6))]))
        return [token.id for event in events for token in event.tokens], events[-1].usage.reused_tokens

    first, reused = run("first", prompt)
    assert reused == 0
    # Everything but the last token that was sampled has been computed, and the state is of exactly that.
    whole = [*prompt, *first, 7, 8]
    second, reused = run("second", whole)
    assert reused == len(prompt) + len(first) - 1
    assert run("anew", whole[:-1])[1] == 0
    fresh = open_engine(packed, device="cpu", slots=1)
    alone = fresh.generate([Request("alone", tuple(whole), SamplingParams(max_tokens=6))])
    assert second == [token.id for event in alone for token in event.tokens]


@pytest.mark.gpu
def test_a_preempted_sequence_is_computed_anew_on_a_gpu(models):
    from trirun_kernels.decoder.cuda import CudaDecoder

    from trirun_cli.backends.cuda.runner import CudaRunner
    from trirun_cli.backends.cuda.weights import load_model
    from trirun_cli.engine.engine import Engine

    model, packed = models
    weights = load_model(packed, device=torch.device("cuda", 0), dtype="float16", act_bits=16)
    # Three sequences grow to three pages each; there are six.
    runner = CudaRunner(CudaDecoder(weights, slots=3, context=192, pages=7), max_rows=32)
    engine, texts = Engine(runner), [prompt[:40] for prompt in prompts()[1:4]]
    requests = [Request(str(i), tuple(text), SamplingParams(max_tokens=100)) for i, text in enumerate(texts)]
    found = [[] for _ in texts]
    for event in engine.generate(requests):
        found[int(event.request_id)] += [token.id for token in event.tokens]
    assert engine.stats.preemptions > 0 and engine.stats.reused_tokens == 0
    for text, tokens in zip(texts, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*text, *tokens[:-1]]])).logits[0, len(text) - 1 :].float()
        chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        assert (logits.amax(-1) - chosen).max() < 3e-2 * logits.std()
