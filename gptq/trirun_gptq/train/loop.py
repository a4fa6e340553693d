"""The training loop: batches in, the best state on held-out text out; stoppable at any step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError
from .data import Batches
from .observer import TrainObserver
from .recipe import TrainRecipe
from .state import Evaluation, Progress, TrainState, moments_of, set_moments
from .student import Distiller, Student, held_out_loss
from .workers import Workers

BETAS = (0.9, 0.95)
REPORT = 10  # steps between two looks at the loss, each of which waits for the device
SAVE_SECONDS = 300.0


class Training:
    """One run.

    Args:
        student: already at its start, or about to be set by ``progress``. distiller: around it and the original.
        recipe: every choice. batches: this process's. held_out: int64 [w, seqlen], on the device.
        workers: the processes of the run. observer: see :class:`~.observer.TrainObserver`.
        state: where to record it; None records nothing. progress: a stopped run to continue.
    """

    def __init__(
        self,
        student: Student,
        distiller: Distiller,
        recipe: TrainRecipe,
        batches: Batches,
        held_out: Tensor,
        workers: Workers,
        observer: TrainObserver,
        state: TrainState | None,
        progress: Progress | None,
    ) -> None:
        self.student, self.distiller, self.recipe = student, distiller, recipe
        self._batches, self._held_out, self._workers = batches, held_out, workers
        self._observer, self._state = observer, state
        self._device = held_out.device
        self._each = recipe.batch // workers.count
        self._micro = min(recipe.micro_batch or self._each, self._each)
        fused = self._device.type == "cuda"
        self._optimizer = torch.optim.Adam(student.groups(recipe), lr=0.0, betas=BETAS, fused=fused)
        # fp16 gradients underflow without it; for the other types it does nothing.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=distiller.dtype == torch.float16)
        self.progress = progress or Progress()
        if progress is not None:
            student.restore(progress.weights)
            set_moments(self._optimizer, student.trained(), progress.moments, progress.updates)
            self._scaler.load_state_dict(progress.scaler)

    def run(self) -> Progress:
        """Train to the last step and leave the student at its best state.

        Raises:
            QuantizationError: the loss is not finite. KeyboardInterrupt: the run was stopped; its state is saved.
        """
        progress = self.progress
        module = self._workers.wrap(self.distiller)
        if progress.step:
            self._observer.resumed(progress.step)
        else:
            self._evaluate()
        started, before = time.perf_counter(), progress.seconds
        saved = looked = started
        sums, count = torch.zeros(2, device=self._device), 0
        done = self._done()
        with _deferred_interrupt() as stopped:
            while done < 1:
                sums += self._step(module, done)
                count += 1
                progress.step += 1
                progress.seconds = before + time.perf_counter() - started
                earlier, done = done, self._done()
                if progress.step % REPORT == 0 or done >= 1:
                    looked = self._report(sums, count, looked, done)
                    sums, count = torch.zeros_like(sums), 0
                if int(done * self.recipe.evaluations) > int(earlier * self.recipe.evaluations):
                    self._evaluate()
                    looked = time.perf_counter()
                stop = self._workers.any(stopped.is_set())
                if stop or (time.perf_counter() - saved > SAVE_SECONDS and done < 1):
                    self._save()
                    saved = looked = time.perf_counter()
                if stop:
                    raise KeyboardInterrupt
        self.student.restore(progress.best_weights)
        return progress

    def _done(self) -> float:
        """How much of the run is over, the same in every process."""
        if not self.recipe.minutes:
            return self.progress.step / self.recipe.steps
        seconds = self._workers.mean(torch.tensor(self.progress.seconds, device=self._device))
        return min(1.0, float(seconds) / (60 * self.recipe.minutes))

    def _step(self, module: Any, done: float) -> Tensor:
        """One optimizer step; returns [Σ KL, Σ CE] per token of this process's batch, float32 [2]."""
        progress = self.progress
        # The rate of the middle of the step: the first one is not 0.
        rate = self.recipe.rate(min(1.0, done + 0.5 / self.recipe.steps))
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        tokens = self._batches.read(progress.step)
        if self._device.type == "cuda":
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        parts = tokens.split(self._micro)
        sums = torch.zeros(2, device=self._device)
        for number, part in enumerate(parts):
            # Gradients travel between processes once per step.
            local = number + 1 < len(parts) and self._workers.count > 1
            with module.no_sync() if local else nullcontext():
                loss, lost = module(part)
                self._scaler.scale(loss / tokens.numel()).backward()
            sums += lost
        self._scaler.unscale_(self._optimizer)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        # A scale that fell means that the gradients overflowed and the update was left out.
        progress.updates += self._scaler.get_scale() >= scale
        return sums / tokens.numel()

    def _report(self, sums: Tensor, count: int, looked: float, done: float) -> float:
        kl, ce = (self._workers.mean(sums) / count).tolist()
        if not (math.isfinite(kl) and math.isfinite(ce)):
            raise QuantizationError(
                f"the loss is not finite after step {self.progress.step} (KL {kl}, cross-entropy {ce}); "
                "a lower lr, or precision bf16 or fp32, may help"
            )
        now = time.perf_counter()
        speed = count * self.recipe.batch * self.recipe.seqlen / (now - looked)
        self._observer.step(self.progress.step, done, kl, ce, speed)
        return now

    def _evaluate(self) -> None:
        """Measure the held-out loss; keep the weights if it is the lowest."""
        progress = self.progress
        kl, nll = held_out_loss(self.distiller, self._held_out, self._micro)
        evaluation = Evaluation(progress.step, kl, nll)
        best = min(progress.evaluations, key=self._score, default=None)
        better = best is None or self._score(evaluation) < self._score(best)
        progress.evaluations.append(evaluation)
        if better:
            progress.best = progress.step
            progress.best_weights = {name: value.cpu().clone() for name, value in self.student.state().items()}
        self._observer.evaluated(evaluation, better)

    def _score(self, evaluation: Evaluation) -> float:
        """What decides: the loss that is trained."""
        score = self.recipe.kl * evaluation.kl + self.recipe.ce * evaluation.nll
        return score if math.isfinite(score) else math.inf

    def _save(self) -> None:
        if self._state is None or not self._workers.first:
            return
        progress = self.progress
        progress.weights = self.student.state()
        progress.moments = moments_of(self._optimizer, self.student.trained())
        progress.scaler = self._scaler.state_dict()
        self._state.save(progress)
        self._observer.saved(progress.step)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set a flag that is looked at between two steps, when everything is consistent; a second one
    interrupts at once, as ever."""
    stopped = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; elsewhere nobody presses Ctrl-C.
        yield stopped
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
