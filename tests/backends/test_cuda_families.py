"""Every family that the native decoder runs, packed and dense, on a GPU against transformers on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.small_models import FAMILIES, clips_as_configured, save_ternary
from trirun_cli.checkpoint.model_dir import read_config
from trirun_cli.errors import InputError
from trirun_cli.models.description import decoder_shape

pytestmark = pytest.mark.gpu
# Softened scores (gemma 2) are those of eager attention in every version of transformers.
EAGER = {"dtype": torch.float32, "attn_implementation": "eager"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MODELS = FAMILIES | {
    "gemma4_text, heads of 256 and 512": FAMILIES["gemma4_text"] | {"head_dim": 256, "global_head_dim": 512},
    "llama, yarn": {"rope_parameters": YARN},
    "llama, tied": {"tie_word_embeddings": True},
}


def load_reference(path, **options):
    return clips_as_configured(AutoModelForCausalLM.from_pretrained(path, **EAGER | options).eval())


def error_of_rounding(path, tokens, expected):
    """Half as much again as the median error of transformers itself in float16, of a mixture: which experts are chosen
    depends on roundings, and those of one program are no bound of another's."""
    model = load_reference(path, dtype=torch.float16)
    with torch.inference_mode():
        found = model(tokens.unsqueeze(0)).logits[0].float()
    return 1.5 * ((found - expected).norm(dim=1) / expected.norm(dim=1)).median().item()


def has_experts(path):
    return any(layer.mixture is not None for layer in decoder_shape(read_config(path)).layers)


@pytest.fixture(params=MODELS)
def models(request, tmp_path):
    """Directories of a random ternary model: as it is, and packed."""
    change = {"vocab_size": 65, "hidden_size": 128, "intermediate_size": 192} | MODELS[request.param]
    if request.param == "helium":
        change["head_dim"] = 32  # its output projection is square
    return save_ternary(request.param.split(",")[0], change, tmp_path)[1:]


def test_logits_are_those_of_transformers(models):
    from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment

    from trirun_cli.backends.cuda.weights import load_model

    tokens = torch.randint(3, 65, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        reference = load_reference(models[0])
        expected = reference(tokens.unsqueeze(0)).logits[0]
    experts = has_experts(models[0])
    allowed = max(3e-3, error_of_rounding(models[0], tokens, expected) if experts else 0)
    # Only packed experts run there.
    for path in models[1:] if experts else models:
        model = load_model(path, device=torch.device("cuda", 0), dtype="float16", act_bits=16)
        assert model.packed == (path is models[1])
        decoder = CudaDecoder(model, slots=1, context=192)
        decoder.block_tables.copy_(torch.arange(3))
        found = []
        # A whole prompt, a second piece of it, single tokens.
        for first, last in ((0, 90), (90, 140), *((i, i + 1) for i in range(140, 150))):
            rows = tokens[first:last], torch.zeros(last - first), torch.arange(first, last)
            inputs = Inputs(*(row.to("cuda", torch.int32) for row in rows))
            segments = [Segment(0, last - first, 0, first)] if last - first > 1 else []
            found.append(decoder.forward(inputs, segments).float().cpu())
        found = torch.cat(found)
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert torch.isfinite(found).all() and errors.median() < allowed, path.name


def test_engine_opens_the_native_decoder(models):
    from tests.small_models import open_engine
    from trirun_cli.engine.request import Request
    from trirun_cli.engine.sampling import SamplingParams

    engine = open_engine(models[1], device="cuda", slots=4)
    assert engine.name.startswith("native decoder on")
    params = SamplingParams(max_tokens=5, ignore_stop_ids=True)
    requests = [Request(str(i), tuple(range(3, 20 + i)), params) for i in range(6)]
    tokens = [token for event in engine.generate(requests) for token in event.tokens]
    assert len(tokens) == 30 and all(0 <= token.id < 65 for token in tokens)
    engine.close()


@pytest.mark.parametrize("rows", [4096, 64])
def test_scoring_is_that_of_transformers(models, monkeypatch, rows):
    """Whole sequences side by side, in steps of few or many tokens, and one by one."""
    from trirun_cli.backends.cuda import opening
    from trirun_cli.backends.registry import open_runner
    from trirun_cli.engine.scoring import ScoringModel

    monkeypatch.setattr(opening, "SCORED_ROWS", rows)
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(3, 65, (length,), generator=generator) for length in (1, 40, 150, 2, 1, 64, 63)]
    keep = [1, 3, 150, 2, 1, 10, 63]
    reference = load_reference(models[0])
    with torch.inference_mode():
        expected = [reference(tokens.unsqueeze(0)).logits[0] for tokens in sequences]
    # Each layer rounds: of four, transformers itself differs by 4e-3 in float16.
    layers = reference.config.num_hidden_layers
    experts = has_experts(models[0])
    rounding = error_of_rounding(models[0], sequences[2], expected[2]) if experts else 0
    caches = {"auto": 1.5e-3 * layers, "int8": 1e-2 * layers}
    if max((mixer.head_dim for mixer in decoder_shape(read_config(models[0])).attentions), default=0) > 256:
        with pytest.raises(InputError, match="an int8 cache of heads of 512; at most 256"):
            open_runner(models[1], device="cuda", kv_cache_dtype="int8", scoring=True)
        del caches["int8"]
    for kv_cache_dtype, allowed in caches.items():
        lm = ScoringModel(open_runner(models[1], device="cuda", kv_cache_dtype=kv_cache_dtype, scoring=True))
        assert lm.name.startswith("native decoder on")
        allowed = max(allowed, rounding)
        together = lm.forward_batch(sequences, keep)
        errors = []
        for found, logits, count in zip(together, expected, keep, strict=True):
            assert found.shape == (count, lm.vocab_size)
            errors.append((found.cpu() - logits[-count:]).norm(dim=1) / logits[-count:].norm(dim=1))
        # A few rows may have another expert: noise of float16's size in each layer of transformers' GLM-4.5 puts the
        # second text beyond the bound in half of the draws.
        assert all(part.median() < allowed or experts for part in errors)
        assert torch.cat(errors).median() < allowed
        # The sequence of forward is apart from those of a batch.
        first = lm.forward(sequences[2][:100], last_only=False)
        lm.forward_batch(sequences, keep)
        rest = lm.forward(sequences[2][100:], last_only=False)
        if lm.can_rewind:
            lm.rewind(100)
            assert torch.equal(lm.forward(sequences[2][100:], last_only=False), rest)
        errors = (torch.cat((first, rest)).cpu() - expected[2]).norm(dim=1) / expected[2].norm(dim=1)
        assert errors.median() < allowed
        lm.reset()
        again = lm.forward(sequences[2], last_only=False)
        assert ((again.cpu() - expected[2]).norm(dim=1) / expected[2].norm(dim=1)).median() < allowed
        lm.reset()
        last = lm.forward(sequences[2])
        assert last.shape == (1, lm.vocab_size) and (last - again[-1:]).norm() < 2e-3 * again[-1:].norm()
