"""A whole training run: the original as teacher, its copy on the grid, text, start, loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..layer.quantized import Quantized
from ..model.activations import has_bfloat16
from ..run.progress import ProgressCallback, Stage, silent
from .data import Batches, Text
from .generate import sample
from .loop import Training
from .recipe import TrainRecipe
from .start import Grids
from .state import Progress, TrainState
from .student import Distiller, Student, held_out_loss, load_model, require_plain_head
from .workers import Workers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(slots=True)
class Trained:
    """The outcome.

    Attributes:
        student: at its best state on held-out text. progress: evaluations and time.
        original_nll: of the original model on the held-out text, nats per predicted token.
    """

    student: Student
    progress: Progress
    original_nll: float


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What ``precision`` means on a device: see :class:`~.recipe.TrainRecipe`."""
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return DTYPES[precision]


def train_model(
    model_dir: str | Path,
    recipe: TrainRecipe,
    grids: Grids,
    start: Callable[[Student], None],
    stream: Tensor,
    held_out: Tensor,
    progress: ProgressCallback = silent,
    *,
    workers: Workers,
    compiled: bool = False,
    state: TrainState | None = None,
    started: float | None = None,
    finishing: Callable[[Student], float] = lambda student: 0.0,
) -> Trained:
    """Train the linear layers of a Hugging Face decoder model on their grids, against the model itself.

    Args:
        model_dir: the original: config.json and safetensors. grids: the layers to train, see :mod:`.start`.
        start: sets the student's start; called only when no stopped run continues.
        stream: int64 [tokens], the training text. held_out: int64 [w, seqlen], decides which state is kept.
        progress: see :mod:`trirun_gptq.run.progress`; its events are ``Stage``, ``Resumed``, ``StepsDone``,
            ``Evaluated`` and ``Saved``.
        workers: the processes of the run, each of which calls this with the same arguments.
        compiled: fuse with ``torch.compile``. state: where the run is recorded and continued from.
        started, finishing: see :class:`~.loop.Training`; without ``started`` the clock starts here.

    Raises:
        QuantizationError: the model or the text does not fit, a state is of another run, or the loss is not finite.
        KeyboardInterrupt: the run was stopped; ``state`` has it.
    """
    started = time.perf_counter() if started is None else started
    device = workers.device
    # Half precision is slow or missing on a CPU.
    teacher = load_model(model_dir, torch.float32 if device.type == "cpu" else "auto", device)
    require_plain_head(teacher)
    student = Student(load_model(model_dir, torch.float32, device), recipe, grids)
    if recipe.gradient_checkpointing:
        # The name changes with transformers 6.
        model = student.model
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        # Checkpointing looks at the mode; there is no dropout for it to turn on.
        student.model.train()
    stopped = state.load() if state is not None else None
    if stopped is None:
        start(student)
    generated = _generated(teacher, recipe, stream, workers, progress, state)
    batches = Batches(
        Text(stream, recipe.seqlen, recipe.seed),
        generated,
        recipe.text_share,
        recipe.batch,
        recipe.seed,
        workers.rank,
        workers.count,
    )
    distiller = Distiller(student.model, teacher, recipe, compute_dtype(recipe.precision, device), compiled)
    held_out = held_out.to(device)
    own = Distiller(teacher, teacher, recipe, torch.float32, False)
    _, original = held_out_loss(own, held_out, recipe.micro_batch or recipe.batch // workers.count, compiled=compiled)
    training = Training(
        student, distiller, recipe, batches, held_out, workers, progress, state, stopped, started, finishing
    )
    return Trained(student, training.run(), original)


def _generated(
    teacher: torch.nn.Module,
    recipe: TrainRecipe,
    stream: Tensor,
    workers: Workers,
    progress: ProgressCallback,
    state: TrainState | None,
) -> Tensor:
    """This process's share of the generated sequences, int64 [sequences, seqlen]."""
    count = -(-recipe.generated // workers.count)
    if not count:
        return torch.empty(0, recipe.seqlen, dtype=torch.int64)
    stored = state.load_generated(workers.rank) if state is not None else None
    if stored is not None:
        return stored
    seed = recipe.seed * 1009 + workers.rank
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(stream) - recipe.prompt, (count, 1), generator=generator)
    prompts = stream[places + torch.arange(recipe.prompt)]
    tokens = sample(teacher, prompts, recipe.seqlen, seed, lambda done, total: progress(Stage("generate", done, total)))
    if state is not None:
        state.save_generated(tokens, workers.rank)
    return tokens


def hardened(student: Student) -> dict[str, Quantized]:
    """Every trained layer as it will be stored."""
    return {name: layer.harden() for name, layer in student.layers.items()}
