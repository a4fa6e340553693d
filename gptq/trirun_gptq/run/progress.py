"""What a run reports while it works, and what it returns. Rendering belongs to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from trirun_kernels import QuantSpec

from .memory import MemoryPlan
from .profile import StageCost


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One quantized linear layer.

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
class BlockReport:
    """One decoder block.

    Attributes:
        index: its position. name: its path in the model.
        error: relative squared error of the block's output against the original model, on held-out sequences.
        error_before_refine: the same before block refinement; equal to ``error`` where it was off or rolled back.
        resumed: the block was taken from a previous run's state.
        seconds: of wall time.
        engine: whose refinement was kept; "" for none.
    """

    index: int
    name: str
    error: float
    error_before_refine: float
    resumed: bool
    seconds: float
    engine: str = ""


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
class Rehearsal:
    """What one block took: wall seconds, and the most GPU memory that was allocated (0 on a CPU). The waiting
    activations of all batches are counted in."""

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
        memory: what was planned. rehearsal: what one block took beforehand; None on a CPU, but for a dry run.
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
    rehearsal: Rehearsal | None = None
    predictions: Predictions | None = None
    before_e2e: Predictions | None = None
    peak_bytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight over all quantized modules."""
        weights = sum(module.n * module.k for module in self.modules)
        return sum(module.n * module.k * module.bits_per_weight for module in self.modules) / max(weights, 1)


class Observer:
    """Callbacks of a run, all no-ops; subclass and override what you render. Called from the calling thread only."""

    def memory(self, plan: MemoryPlan) -> None:
        """Once, first of all: the memory the run expects to need."""

    def rehearsed(self, rehearsal: Rehearsal) -> None:
        """One block was quantized on one batch, to see that it goes through."""

    def plan(self, blocks: int, modules: int, tokens: int) -> None:
        """Once, before the first block: how many blocks and modules there are, on how many calibration tokens."""

    def block_started(self, index: int, total: int, name: str) -> None:
        """Block ``index`` (from 0) of ``total`` begins."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Progress within a block, or of ``"embed"`` before and ``"e2e"`` after all of them; a block's stages are
        ``"hessian"``, ``"solve"``, ``"refine"`` and ``"replay"``. ``done`` of ``total`` steps are complete."""

    def module_finished(self, report: ModuleReport) -> None:
        """A linear layer has its codes."""

    def block_finished(self, report: BlockReport) -> None:
        """A block is final and written."""

    def warning(self, message: str) -> None:
        """Something the user should know that is not an error (an escalated damping, a block rolled back)."""
