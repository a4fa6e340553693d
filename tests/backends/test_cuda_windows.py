"""Layers that see a window have pages of their own on a GPU: what they compute is what it was, from fewer pages."""

from __future__ import annotations

import pytest
import torch

from tests.small_models import FAMILIES, save_ternary
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams

pytestmark = pytest.mark.gpu
WINDOWED = [name for name in FAMILIES if FAMILIES[name].get("sliding_window")]
SLOTS, CONTEXT, NEW = 3, 448, 100


@pytest.fixture(scope="module", params=WINDOWED)
def model(request, tmp_path_factory):
    from trirun_cli.backends.cuda.weights import load_model

    change = {"vocab_size": 65, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": CONTEXT}
    path = tmp_path_factory.mktemp("model")
    reference, _, packed = save_ternary(request.param.split(",")[0], change | FAMILIES[request.param], path)
    return reference, load_model(packed, device=torch.device("cuda", 0), dtype="float16", act_bits=16)


def engine_of(weights, windowed_pages):
    from trirun_kernels.decoder.cuda import CudaDecoder

    from trirun_cli.backends.cuda.runner import CudaRunner

    sizes = {"slots": SLOTS, "context": CONTEXT, "pages": SLOTS * CONTEXT // 64 + 1}
    decoder = CudaDecoder(weights, **sizes, windowed_pages=windowed_pages)
    return Engine(CudaRunner(decoder, max_rows=64)), decoder


def texts(lengths=(150, 20, 230), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 65, (length,), generator=generator).tolist() for length in lengths]


def generate(engine, prompts):
    params = SamplingParams(max_tokens=NEW, ignore_stop_ids=True)
    found = [[] for _ in prompts]
    for event in engine.generate([Request(str(i), tuple(text), params) for i, text in enumerate(prompts)]):
        found[int(event.request_id)] += [token.id for token in event.tokens]
    return found


def assert_chosen_well(reference, prompts, found):
    """Every token is the reference's best, or as good but for rounding. Which experts are chosen is rounding too."""
    misses = []
    for text, tokens in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*text, *tokens[:-1]]])).logits[0, len(text) - 1 :].float()
        chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        misses.append((logits.amax(-1) - chosen) / logits.std())
    missed = torch.cat(misses)
    assert len(missed) == NEW * len(prompts)
    assert (missed < 3e-2).float().mean() > (0.8 if hasattr(reference.config, "num_local_experts") else 0.99)


def test_answers_are_those_of_whole_pages(model):
    _, weights = model
    whole, large = engine_of(weights, None)
    # A window of 24 is a page; two more are begun and left, and one is behind it. A step is a page.
    apart, small = engine_of(weights, SLOTS * 6 + 1)
    assert small.cache_bytes < large.cache_bytes
    assert generate(apart, texts()) == generate(whole, texts())
    assert apart.stats.preemptions == whole.stats.preemptions == 0


def test_with_few_pages_sequences_wait_and_are_preempted(model):
    reference, weights = model
    engine, _ = engine_of(weights, 7)
    found = generate(engine, [*texts(), *texts(seed=4)])
    assert engine.stats.preemptions > 0
    assert_chosen_well(reference, [*texts(), *texts(seed=4)], found)


def test_a_text_is_continued_where_its_last_window_is_there(model):
    reference, weights = model
    engine, _ = engine_of(weights, SLOTS * 6 + 1)
    answered = generate(engine, texts())
    longer = [[*text, *tokens, 5, 7, 9] for text, tokens in zip(texts(), answered, strict=True)]
    before = engine.stats.reused_tokens
    found = generate(engine, longer)
    # All whole pages of the texts so far: 249, 119 and 329 tokens have been computed.
    assert engine.stats.reused_tokens - before == 192 + 64 + 320
    assert_chosen_well(reference, longer, found)
