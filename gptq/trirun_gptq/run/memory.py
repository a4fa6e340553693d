"""How much memory a run will take, and where its activations wait: decided before the long part."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..model.activations import BATCH_TOKENS, Placement
from ..model.experts import is_expert
from ..model.loader import Skeleton, linear_layers
from ..recipe import AUTO, Recipe
from .profile import peak_host_bytes
from .progress import Event

STREAMS = 4  # held at the peak: inputs and outputs of a block, in the original and in the quantized model
# Per weight of a block that is refined, by method: parameter, gradient, two moments; and the dense weight with its
# gradient, or noise and probabilities of four codes.
REFINE_BYTES = {"ste": 24, "gumbel": 112}
COMPARED = 5  # log-probabilities of both models, and what their divergence is computed from
CODE_BYTES = 28  # per weight, where codes train end to end
USABLE = 0.9  # of the free memory; the rest is fragmentation and what libraries take


@dataclass(frozen=True, slots=True)
class MemoryPlan(Event):
    """What a run is expected to need, in bytes; the first event of a run.

    Attributes:
        device: of the computation. free: on it, before the run.
        block: one block's weights twice in float32, and its share of a micro-batch's activations.
        solve: Hessians, factor and temporaries of the layer that needs most.
        refine: latents or logits, their gradients and Adam's moments; 0 where blocks are not refined.
        e2e: the whole model as codes, and logits; 0 without end-to-end training.
        e2e_codes: what training the codes takes more; 0 where the recipe leaves them.
        e2e_kept: what end-to-end training takes more when it keeps all blocks' activations for the backward pass.
        compare: both models' predictions of a micro-batch, and what lies between them and their distance. Without
            room for it the micro-batch gets smaller.
        streams: hidden states of all calibration tokens, at the precision of ``place``.
        place: where they wait.
        held: of the host's memory, by this process before the run; 0 on another device.
    """

    device: torch.device
    free: int
    block: int
    solve: int
    refine: int
    e2e: int
    e2e_codes: int
    e2e_kept: int
    compare: int
    streams: int
    place: Placement
    held: int

    @property
    def working(self) -> int:
        """On the device at the worst moment, waiting activations not counted."""
        return max(self.block + max(self.solve, self.refine), self.e2e)

    @property
    def total(self) -> int:
        """On the device at the worst moment, end-to-end training of codes not counted: it is left out without room."""
        return self.working + self.waiting

    @property
    def peak(self) -> int:
        """What the process holds on the device at the worst moment, the last comparison among them."""
        return self.held + max(self.total, self.compare + self.waiting)

    @property
    def waiting(self) -> int:
        """Activations that wait on the device."""
        return self.streams if self.place.store == self.device else 0

    @property
    def trains_codes(self) -> bool:
        """Whether end-to-end training has room for the codes."""
        return 0 < self.e2e_codes <= USABLE * self.free - self.e2e - self.waiting

    @property
    def recomputes(self) -> bool:
        """Whether end-to-end training computes every block's activations a second time instead of keeping them."""
        codes = self.e2e_codes if self.trains_codes else 0
        return self.e2e + codes + self.e2e_kept + self.waiting > USABLE * self.free

    @property
    def fits(self) -> bool:
        """Whether the estimate fits what is free; it errs on the high side."""
        return self.total <= self.free


def plan_memory(skeleton: Skeleton, recipe: Recipe, tokens: int, device: torch.device) -> MemoryPlan:
    """Estimate a run's memory and choose where activations wait: on the device in float32, else there in bfloat16, else
    (for a GPU) in the host's memory in bfloat16.

    Args:
        tokens: of all calibration sequences, held-out ones included.
    """
    config = skeleton.model.config.get_text_config()
    hidden, vocabulary = config.hidden_size, config.vocab_size
    weights = [sum(p.numel() for p in block.parameters()) for block in skeleton.blocks]
    features = [_feature_sum(block, _chosen_fraction(config, block)) for block in skeleton.blocks]
    # Inputs and outputs of every linear layer, and as much again of what lies between them; kept for a backward pass.
    activations = round(BATCH_TOKENS * max(features) * 4 * (2 if recipe.refine_steps else 1))
    solve = max(_solve_bytes(block) for block in skeleton.blocks)
    refine = 0
    if recipe.refine_steps:
        refine = max(weights) * max(REFINE_BYTES[method] for method in recipe.engines)
    e2e = e2e_codes = e2e_kept = 0
    embeddings = 4 * (sum(p.numel() for p in skeleton.model.parameters()) - sum(weights))
    if recipe.end_to_end:
        e2e = sum(weights) + embeddings + BATCH_TOKENS * vocabulary * 4 * 6 + 2 * activations
        # Latents, gradients and two moments; and what a weight becomes on its way through a step.
        e2e_codes = sum(weights) * CODE_BYTES if recipe.e2e_code_steps else 0
        # Between two linear layers about twice as much lies as goes through them.
        e2e_kept = round(3 * BATCH_TOKENS * 4 * sum(features))
    free, host = free_bytes(device), torch.device("cpu")
    places = [Placement(device, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if device.type == "cuda":
        places.append(Placement(device, host, torch.bfloat16))
    plans = [
        MemoryPlan(
            device,
            free=free,
            block=2 * 4 * max(weights) + activations,
            solve=solve,
            refine=refine,
            e2e=e2e,
            e2e_codes=e2e_codes,
            e2e_kept=e2e_kept,
            compare=embeddings + BATCH_TOKENS * vocabulary * 4 * COMPARED,
            streams=STREAMS * tokens * hidden * place.dtype.itemsize,
            place=place,
            held=held_bytes() if device.type == "cpu" else 0,
        )
        for place in places
    ]
    return next((plan for plan in plans if plan.total <= USABLE * free), plans[-1])


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_bytes() -> int:
    """What this process holds of the host's memory; the most that it has held where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_host_bytes()


def _feature_sum(block: nn.Module, chosen: float) -> float:
    """Features that go into and out of the linear layers for one token, twice; of experts the chosen fraction."""
    return sum(
        2 * (layer.in_features + layer.out_features) * (chosen if is_expert(f"block.{name}.weight") else 1)
        for name, layer in linear_layers(block).items()
    )


def _chosen_fraction(config: object, block: nn.Module) -> float:
    """How many of its experts a block runs for one token, as a fraction."""
    count = sum(is_expert(f"block.{name}.weight") and name.endswith(".down") for name in linear_layers(block))
    chosen = getattr(config, "num_experts_per_tok", None) or count
    return chosen / count if count else 1.0


def _solve_bytes(block: nn.Module) -> int:
    """Ten matrices of a weight's size and ten of H's at the peak. Layers of one k are stacked at most together; experts
    are solved one by one, with the Hessians of all of them waiting, and their codes on both grids of ``auto``."""
    rows: dict[int, int] = defaultdict(int)
    largest = waiting = 0
    for name, layer in linear_layers(block).items():
        n, k = layer.out_features, layer.in_features
        if is_expert(f"block.{name}.weight"):
            largest = max(largest, 4 * 10 * (2 * n * k + k * k))
            waiting += 4 * k * k + len(AUTO) * n * k
        else:
            rows[k] += n
    return max([4 * 10 * (n * k + k * k) for k, n in rows.items()] + [largest + waiting])
