"""The end of ``trirun finetune``: how long it will take, packing and writing, and the check of what was written."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from trirun_gptq.model.loader import TensorSource
from trirun_gptq.model.writer import unquantized
from trirun_gptq.train.model import hardened
from trirun_gptq.train.student import Student
from trirun_kernels import QuantSpec
from trirun_kernels.weights.names import WEIGHT

from ..backends.registry import open_runner
from ..backends.transformers.runner import TransformersRunner
from ..checkpoint.writer import CheckpointWriter
from ..engine.scoring import ScoringModel
from ..errors import CheckFailed
from ..eval.perplexity import perplexity
from .finetune_plan import FinetunePlan, from_checkpoint
from .output import state_dir

OPENING = 3.0  # seconds to open a packed checkpoint and its kernels
WRITTEN = 300e6  # bytes per second, hashed and on disk
AGREEMENT = 2e-3  # nats per token by which the kernels' arithmetic may move the packed model from the trained one
CHECK_WINDOWS = 16  # held-out windows on which the two are compared


@torch.no_grad()
def finishing(plan: FinetunePlan, student: Student, held_out: Tensor) -> float:
    """About how many seconds pass between the last step and the end: the last evaluation, packing, writing, the check.

    Packing is tried on one layer, and the forward pass on one window, each twice for the sake of the first time.
    """
    layer = max(student.layers.values(), key=lambda layer: layer.latent.numel())
    model, window = student.model, held_out[:1].to(student.model.device)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            begun = time.perf_counter()
            layer.harden().pack().to("cpu")
            packed = time.perf_counter()
            float(model(input_ids=window, use_cache=False).logits.sum())
            ran = time.perf_counter()
    packing = (packed - begun) * plan.weights / layer.latent.numel()
    rest = sum(parameter.numel() for parameter in model.parameters()) - plan.weights
    writing = (plan.weights * plan.bits_per_weight / 8 + 2 * rest) / WRITTEN
    # Either of the two models runs over the windows of the evaluation, and over those of the check.
    running = 2 * (len(held_out) + min(len(held_out), CHECK_WINDOWS)) * (ran - packed)
    return OPENING + 1.25 * (packing + writing + running)


def publish(plan: FinetunePlan, student: Student, writer: CheckpointWriter) -> None:
    """Pack every trained layer and write the checkpoint, whole or not at all.

    Raises:
        CheckFailed: what else was trained does not fit the dtype it is stored in.
    """
    weights, stored = hardened(student), TensorSource(plan.model).stored
    replaced = {name + WEIGHT: name for name in weights}
    # What is not the original's: trained, or of the checkpoint that training began at. A tied embedding may be stored
    # by the name of the head.
    named, other = student.model.named_parameters(remove_duplicate=False), from_checkpoint(plan.recipe)
    rest = {name: p for name, p in named if p.requires_grad or other}
    modules = []
    for group in stored.groups:
        for name in (replaced[target] for target in group.targets if target in replaced):
            # pack() proves that the packed form unpacks to these very codes and scales.
            writer.add_packed(name, weights[name].pack().to("cpu"))
            modules.append(_Module(name, *plan.linears[name], weights[name].spec))
        if not any(target in rest for target in group.targets):
            for name, tensor in unquantized(stored, group, replaced):
                writer.add(name, tensor)
            continue
        # By the name of the file where there is one, else by the model's, which loaders know too.
        names = group.sources if len(group.sources) == len(group.targets) == 1 else group.targets
        for name, target in zip(names, group.targets, strict=True):
            if target not in replaced:
                writer.add(name, _as_stored(target, stored.read(target), rest.get(target)))
    writer.finish(modules, plan.linears, plan.to_recipe(), plan.recipe.activation_bits)


def _as_stored(name: str, original: Tensor, trained: nn.Parameter | None) -> Tensor:
    """A tensor after training in the dtype that it had before; the original where it was not trained."""
    if trained is None:
        return original.contiguous()
    stored = trained.detach().to("cpu", original.dtype)
    if not bool(torch.isfinite(stored).all()):
        raise CheckFailed(f"{name} does not fit {stored.dtype} after training", "lower rest_lr")
    # From here on the trained model is the one that is stored.
    trained.data.copy_(stored)
    return stored


def check(plan: FinetunePlan, student: Student, held_out: Tensor) -> tuple[float, float]:
    """Perplexity of the trained weights and of the packed checkpoint, both in float32, on the same held-out windows.

    Raises:
        CheckFailed: they differ by more than the kernels' arithmetic explains; the checkpoint is now ``OUT.failed``.
    """
    windows = held_out[:CHECK_WINDOWS]
    packed = open_runner(plan.out, device=plan.device, dtype="float32", scoring=True, exact=True)
    # With a cache and other shapes, compiled blocks would be compiled again, once per layer.
    with torch.compiler.set_stance("force_eager"):
        trained = TransformersRunner(student.model.eval(), slots=1)
        first, second = (perplexity(ScoringModel(runner), windows) for runner in (trained, packed))
    if not abs(first.nll - second.nll) <= AGREEMENT:
        failed = plan.out.with_name(plan.out.name + ".failed")
        shutil.rmtree(failed, ignore_errors=True)
        plan.out.rename(failed)
        raise CheckFailed(
            f"{failed} has perplexity {second.value:.4f} on {len(windows)} held-out windows, the trained weights "
            f"{first.value:.4f}",
            f"the state of the run is kept in {state_dir(plan.out)}",
        )
    return first.value, second.value


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    n: int
    k: int
    spec: QuantSpec
