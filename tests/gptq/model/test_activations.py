"""Calibration text in batches, and what flows from block to block."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trirun_gptq.model.activations import Placement, capture, halve, make_batches, run_block

from tests.small_models import FAMILIES, SIZES


def test_batches_are_of_nearly_one_size_and_one_length():
    sequences = [torch.full((1024,), i) for i in range(9)] + [torch.full((9000,), 9), torch.full((1024,), 10)]
    batches = make_batches(sequences, first=5)
    assert [(first, tuple(tokens.shape)) for first, tokens in batches] == [
        (5, (3, 1024)),
        (8, (3, 1024)),
        (11, (3, 1024)),
        (14, (1, 9000)),
        (15, (1, 1024)),
    ]
    assert [int(row[0]) for _, tokens in batches for row in tokens] == list(range(11))


@pytest.fixture(scope="module")
def sharing():
    """A Gemma 4 whose last layers attend to the keys and values of earlier ones, and the same with other keys."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **SIZES | FAMILIES["gemma4_text, E"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for layer in changed.model.layers[:2]:
            layer.self_attn.k_proj.weight.mul_(-3)
    return model, changed


def last_states(model, tokens):
    """Hidden states after the last layer."""
    found = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, out: found.append(out))
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    handle.remove()
    return found[0][0] if isinstance(found[0], tuple) else found[0]


@pytest.mark.parametrize("halved", [False, True])
def test_each_stream_has_the_keys_and_values_that_its_layers_share(sharing, halved):
    cpu = torch.device("cpu")
    model, changed = sharing
    skeletons = [SimpleNamespace(model=each, blocks=each.model.layers) for each in sharing]
    generator = torch.Generator().manual_seed(1)
    texts = [(first, torch.randint(3, SIZES["vocab_size"], (2, 40), generator=generator)) for first in (0, 2)]
    batches = capture(skeletons[0], texts, Placement(cpu, cpu), lambda: None)
    for index in range(len(model.model.layers)):
        if halved and index == len(model.model.layers) - 1:
            batches = halve(skeletons[0], batches)
        with torch.no_grad():
            # As a block is quantized: all of the original outputs, then the others, more than once.
            wanted = [run_block(skeletons[0].blocks[index], index, batch, original=True) for batch in batches]
            found = [[run_block(skeletons[1].blocks[index], index, batch) for batch in batches] for _ in range(2)][1]
        for batch, original, quantized in zip(batches, wanted, found, strict=True):
            batch.original, batch.quantized = original, quantized
    assert all(batch.shared for batch in batches)
    for each, stream in ((model, "original"), (changed, "quantized")):
        expected = last_states(each, torch.cat([tokens for _, tokens in texts]))
        torch.testing.assert_close(torch.cat([getattr(batch, stream) for batch in batches]), expected)
