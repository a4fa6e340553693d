"""Which block is tried before a run."""

import torch
from trirun_gptq.model.activations import Placement, capture
from trirun_gptq.model.loader import Skeleton, TensorSource
from trirun_gptq.run.preflight import _largest_alone, block_sizes

from tests.small_models import FAMILIES, save_ternary


def test_it_is_the_largest_that_needs_no_other(tmp_path):
    cpu = torch.device("cpu")
    for family, change in (("gemma4_text", FAMILIES["gemma4_text, E"]), ("llama", {})):
        _, path, _ = save_ternary(family, change, tmp_path / family)
        skeleton = Skeleton(TensorSource(path))
        skeleton.load_rest(cpu)
        (batch,) = capture(skeleton, [(0, torch.arange(3, 43).unsqueeze(0))], Placement(cpu, cpu), lambda: None)
        sizes = block_sizes(skeleton)
        index, largest = _largest_alone(skeleton, batch), max(range(len(sizes)), key=lambda i: (sizes[i], i))
        # The last three of the first model are twice as wide, and have no keys of their own.
        assert index == (largest if family == "llama" else 1) and not batch.shared
        assert sizes[index] == max(sizes if family == "llama" else sizes[:3])
