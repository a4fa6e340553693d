"""The training loop: batches in, the best state on held-out text out; stoppable at any step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError
from ..run.progress import ProgressCallback
from .data import Batches
from .progress import Evaluated, Resumed, Saved, StepsDone
from .recipe import TrainRecipe
from .state import Evaluation, Progress, TrainState, moments_of, set_moments
from .student import Distiller, Student, held_out_loss
from .workers import Workers

BETAS = (0.9, 0.95)
REPORT = 10  # steps between two looks at the loss, each of which waits for the device
SHORT = 0.2  # seconds of a step below which several processes agree on where they are only as often
SAVE_SECONDS = 60.0  # between two savings, or more where saving takes more than a fiftieth of it


class Training:
    """One run.

    Args:
        student: already at its start, or about to be set by ``progress``. distiller: around it and the original.
        recipe: every choice. batches: this process's. held_out: int64 [w, seqlen], on the device.
        workers: the processes of the run. report: is told of :mod:`.progress`'s events.
        state: where to record it; None records nothing. progress: a stopped run to continue.
        started: ``time.perf_counter()`` when this sitting began. finishing: the seconds that everything after training
            will take, asked for before it; a run of so many minutes leaves them.
    """

    def __init__(
        self,
        student: Student,
        distiller: Distiller,
        recipe: TrainRecipe,
        batches: Batches,
        held_out: Tensor,
        workers: Workers,
        report: ProgressCallback,
        state: TrainState | None,
        progress: Progress | None,
        started: float,
        finishing: Callable[[Student], float],
    ) -> None:
        self.student, self.distiller, self.recipe = student, distiller, recipe
        self._batches, self._held_out, self._workers = batches, held_out, workers
        self._report, self._state = report, state
        self._started, self._finishing, self._reserve = started, finishing, 0.0
        self._agreed, self._every = 0.0, 1
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
            QuantizationError: the loss is not finite, or the minutes are over before the first step.
            KeyboardInterrupt: the run was stopped; its state is saved.
        """
        progress = self.progress
        module = self._workers.wrap(self.distiller)
        if progress.step:
            self._report(Resumed(progress.step))
        else:
            self._evaluate()
        if self.recipe.minutes:
            self._reserve = self._finishing(self.student)
        before = progress.seconds
        started = saved = looked = time.perf_counter()
        progress.others += started - self._started
        done, _ = self._look(False)
        if done >= 1 and not progress.step:
            raise QuantizationError(
                f"minutes={self.recipe.minutes:g} leave nothing for training: {progress.others:.0f} s are over, and "
                f"packing and checking need about {self._reserve:.0f} s"
            )
        sums, count, pause = torch.zeros(2, device=self._device), 0, SAVE_SECONDS
        first = self.distiller.compiled
        with _deferred_interrupt() as stopped:
            while done < 1:
                sums += self._step(module, done)
                count += 1
                progress.step += 1
                now = time.perf_counter()
                if first:
                    # Most of it was compilation, which the schedule of the rates should not count.
                    progress.others += now - started
                    started, first = now, False
                progress.seconds = before + now - started
                earlier = done
                done, stop = self._look(stopped.is_set())
                if progress.step % REPORT == 0 or done >= 1:
                    looked = self._report_steps(sums, count, looked, done)
                    sums, count = torch.zeros_like(sums), 0
                if int(done * self.recipe.evaluations) > int(earlier * self.recipe.evaluations):
                    self._evaluate()
                    looked = time.perf_counter()
                if stop or (time.perf_counter() - saved > pause and done < 1):
                    begun = time.perf_counter()
                    self._save(stop)
                    saved = looked = time.perf_counter()
                    pause = max(SAVE_SECONDS, 50 * (saved - begun))
                if stop:
                    raise KeyboardInterrupt
        self.student.restore(progress.best_weights)
        return progress

    def _look(self, stop: bool) -> tuple[float, bool]:
        """How much of the run is over, and whether any process was told to stop: the same in every process."""
        progress, recipe = self.progress, self.recipe
        each = progress.seconds / max(progress.step, 1)
        done = progress.step / recipe.steps
        if recipe.minutes:
            # The step to come has to fit too.
            total = 60 * recipe.minutes - progress.others - self._reserve
            done = min(1.0, (progress.seconds + each) / total) if total > 0 else 1.0
        if self._workers.count == 1:
            # Nothing to agree on, and no reason to wait for the device.
            return done, stop
        if progress.step % self._every == 0:
            shared = self._workers.mean(torch.tensor([done, float(stop), each], device=self._device)).tolist()
            self._agreed, stop = shared[0], shared[1] > 0
            self._every = REPORT if 0 < shared[2] < SHORT else 1
        else:
            stop = False
        return (self._agreed if recipe.minutes else done), stop

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
        for parameter in parameters:
            # Of an expert that no token chose: as if it had a part in the loss, so that a run that goes on after a stop
            # finds moments of one age.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        # A scale that fell means that the gradients overflowed and the update was left out.
        progress.updates += self._scaler.get_scale() >= scale
        return sums / tokens.numel()

    def _report_steps(self, sums: Tensor, count: int, looked: float, done: float) -> float:
        kl, ce = (self._workers.mean(sums) / count).tolist()
        if not (math.isfinite(kl) and math.isfinite(ce)):
            raise QuantizationError(
                f"the loss is not finite after step {self.progress.step} (KL {kl}, cross-entropy {ce}); "
                "a lower lr, or precision bf16 or fp32, may help"
            )
        now = time.perf_counter()
        speed = count * self.recipe.batch * self.recipe.seqlen / (now - looked)
        self._report(StepsDone(self.progress.step, done, kl, ce, speed))
        return now

    def _evaluate(self) -> None:
        """Measure the held-out loss; keep the weights if it is the lowest."""
        progress = self.progress
        kl, nll = held_out_loss(self.distiller, self._held_out, self._micro, compiled=self.distiller.compiled)
        evaluation = Evaluation(progress.step, kl, nll)
        best = min(progress.evaluations, key=self._score, default=None)
        better = best is None or self._score(evaluation) < self._score(best)
        progress.evaluations.append(evaluation)
        if better:
            progress.best = progress.step
            progress.best_weights = {name: value.cpu().clone() for name, value in self.student.state().items()}
        self._report(Evaluated(evaluation, better))

    def _score(self, evaluation: Evaluation) -> float:
        """What decides: the loss that is trained."""
        score = self.recipe.kl * evaluation.kl + self.recipe.ce * evaluation.nll
        return score if math.isfinite(score) else math.inf

    def _save(self, stop: bool) -> None:
        if self._state is None or not self._workers.first:
            return
        progress = self.progress
        progress.weights = self.student.state()
        progress.moments = moments_of(self._optimizer, self.student.trained())
        progress.scaler = self._scaler.state_dict()
        self._state.save(progress)
        self._report(Saved(progress.step, stop))


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
    # Ignored, as for a job in the background, a signal stays ignored.
    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
