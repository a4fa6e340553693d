"""What a run returns: losses, errors, times and memory, as plain records. Rendering belongs to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from trirun_kernels import QuantSpec

from .memory import MemoryPlan
from .profile import StageCost
from .progress import Event
from .timing import TimePlan


@dataclass(frozen=True, slots=True)
class ModuleReport(Event):
    """One quantized linear layer; an event when it has its codes.

    Attributes:
        name: its path in the model. n, k: out and in features. spec: its grid.
        loss: ``tr((W−Ŵ)H(W−Ŵ)ᵀ) / tr(WHWᵀ)``, the relative squared error of the layer's output on the calibration
            inputs (before any block refinement).
        damp: the fraction of mean(diag H) that the factorization needed; above the recipe's value it was escalated.
        dead: input columns that were zero on every calibration token.
        seconds: of wall time for scale search and solver.
        tokens: of the calibration text that reached the layer; for an expert, those that chose it.
    """

    name: str
    n: int
    k: int
    spec: QuantSpec
    loss: float
    damp: float
    dead: int
    seconds: float
    tokens: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included, before padding."""
        return self.spec.bits_per_weight(self.k)


@dataclass(frozen=True, slots=True)
class BlockReport(Event):
    """One decoder block; an event when it is final and written.

    Attributes:
        index: its position. name: its path in the model.
        error: relative squared error of the block's output against the original model, on held-out sequences.
        error_before_refine: the same before block refinement; equal to ``error`` where it was off or rolled back.
        resumed: the block was taken from a previous run's state.
        seconds: of wall time.
        method: whose refinement was kept; "" for none.
    """

    index: int
    name: str
    error: float
    error_before_refine: float
    resumed: bool
    seconds: float
    method: str = ""


@dataclass(frozen=True, slots=True)
class Predictions:
    """How the quantized model predicts held-out text, beside the original.

    Attributes:
        perplexity, original_perplexity: on the held-out sequences.
        divergence: KL(original ‖ quantized), nats per token.
        tokens: predicted.
    """

    perplexity: float
    original_perplexity: float
    divergence: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Preflight(Event):
    """What one block took on one batch before the run: wall seconds, and the most GPU memory that was allocated (0 on a
    CPU), the waiting activations of all batches included."""

    seconds: float
    device_bytes: int


@dataclass(slots=True)
class Report:
    """The outcome of one :func:`~trirun_gptq.pipeline.quantize_model` run.

    Attributes:
        modules, blocks: in model order.
        kept: linear layers inside the decoder blocks left as they were (``ignore``, or an override that says so).
        tokens: calibration tokens used, held-out ones excluded.
        stages: cost by stage name.
        memory: what was planned. preflight: what one block took beforehand, and time: what all of them were
            expected to take; None on a CPU where nothing is trained, but for a dry run.
        predictions: of the result on the held-out sequences, beside the original; None without held-out sequences.
        before_e2e: the same before end-to-end training; None where there was none.
        peak_bytes: peak resident memory of the process (host) over the run.
    """

    modules: list[ModuleReport] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    tokens: int = 0
    stages: dict[str, StageCost] = field(default_factory=dict)
    memory: MemoryPlan | None = None
    preflight: Preflight | None = None
    time: TimePlan | None = None
    predictions: Predictions | None = None
    before_e2e: Predictions | None = None
    peak_bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight over all quantized modules."""
        weights = sum(module.n * module.k for module in self.modules)
        return sum(module.n * module.k * module.bits_per_weight for module in self.modules) / max(weights, 1)
