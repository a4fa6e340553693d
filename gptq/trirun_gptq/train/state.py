"""A training run on disk, so that a stopped one continues exactly where it was, and only if it is the same run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_kernels.weights.durable import publish_file

from ..errors import QuantizationError
from ..run.resume import RunState

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss at one point of a run.

    Attributes:
        step: optimizer steps done. kl: mean KL(original ‖ trained) per token, nats. nll: mean negative log-likelihood
            per predicted token, nats.
    """

    step: int
    kl: float
    nll: float


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        step: batches done. updates: those that changed the weights; fp16 skips some. evaluations: so far; ``best`` is
            the step of the one that is kept.
        weights: trained parameters and scale bases at ``step``. best_weights: at ``best``.
        moments: Adam's, by parameter name: ``(exp_avg, exp_avg_sq)``. scaler: the loss scaler's state (fp16).
        seconds: of training so far; ``others``: of everything before it, compilation included. Over all sittings.
    """

    step: int = 0
    updates: int = 0
    best: int = 0
    seconds: float = 0.0
    others: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)


class TrainState:
    """A directory with ``state.json``, which says what run it belongs to, and one file with all of its tensors.

    The file is written beside its name and renamed, so a file that exists is complete.

    Args:
        replace: remove what another run has left there instead of refusing it.

    Raises:
        StateError: the directory holds the state of another run; what differs is named, nothing is changed.
    """

    def __init__(self, directory: str | Path, fingerprint: dict[str, str], *, replace: bool = False) -> None:
        run = RunState(directory, fingerprint, replace=replace)
        run.begin()
        self.directory = run.directory

    def save(self, progress: Progress) -> None:
        """Record a run."""
        from safetensors.torch import save_file

        tensors = {f"weights/{name}": value for name, value in progress.weights.items()}
        tensors |= {f"best/{name}": value for name, value in progress.best_weights.items()}
        for name, moments in progress.moments.items():
            tensors |= {f"{key}/{name}": value for key, value in zip(MOMENTS, moments, strict=True)}
        facts = {
            "step": progress.step,
            "updates": progress.updates,
            "best": progress.best,
            "seconds": progress.seconds,
            "others": progress.others,
            "evaluations": [dataclasses.asdict(evaluation) for evaluation in progress.evaluations],
            "scaler": progress.scaler,
        }
        partial = self._file("training.partial")
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(stored, partial, {"facts": json.dumps(facts)})
        self._publish(partial, "training")

    def load(self) -> Progress | None:
        """What was saved last, on the CPU; None when nothing was.

        Raises:
            QuantizationError: the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self._file("training")
        if not path.exists():
            return None
        parts: dict[str, dict[str, Tensor]] = {key: {} for key in ("weights", "best", *MOMENTS)}
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["facts"])
                for key in sorted(file.keys()):
                    kind, name = key.split("/", 1)
                    parts[kind][name] = file.get_tensor(key)
            evaluations = [Evaluation(**entry) for entry in facts.pop("evaluations")]
            moments = {name: (value, parts[MOMENTS[1]][name]) for name, value in parts[MOMENTS[0]].items()}
            weights, best = parts["weights"], parts["best"]
            return Progress(**facts, evaluations=evaluations, weights=weights, best_weights=best, moments=moments)
        except (
            SafetensorError,
            ArithmeticError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise QuantizationError(f"{path} is damaged ({error}); remove {self.directory} to start over") from None

    def save_generated(self, tokens: Tensor, rank: int) -> None:
        """Record the generated sequences of one process: sampling again might not give the same ones."""
        from safetensors.torch import save_file

        partial = self._file(f"generated-{rank}.partial")
        save_file({"tokens": tokens.int()}, partial)
        self._publish(partial, f"generated-{rank}")

    def load_generated(self, rank: int) -> Tensor | None:
        """The generated sequences, int64 [sequences, seqlen]; None when there are none yet."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._file(f"generated-{rank}")
        try:
            return load_file(path)["tokens"].long() if path.exists() else None
        except (SafetensorError, KeyError) as error:
            raise QuantizationError(f"{path} is damaged ({error}); remove {self.directory} to start over") from None

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.safetensors"

    def _publish(self, partial: Path, name: str) -> None:
        publish_file(partial, self._file(name))


def moments_of(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Adam's moments by parameter name; empty before the first step."""
    return {name: tuple(optimizer.state[p][key] for key in MOMENTS) for name, p in named.items() if optimizer.state[p]}


def set_moments(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, Tensor],
    moments: dict[str, tuple[Tensor, Tensor]],
    updates: int,
) -> None:
    """Put back what :func:`moments_of` returned after so many updates."""
    for name, (first, second) in moments.items():
        parameter = named[name]
        # Fused Adam counts its steps on the parameter's device, the other forms on the CPU.
        where = parameter.device if optimizer.defaults["fused"] else "cpu"
        optimizer.state[parameter] = {
            "step": torch.tensor(float(updates), device=where),
            **{key: value.to(parameter) for key, value in zip(MOMENTS, (first, second), strict=True)},
        }
