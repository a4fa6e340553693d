"""Running lm-eval's tasks on a model."""

from __future__ import annotations

import functools
import io
import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .scores import TaskScore, scores_of

if TYPE_CHECKING:
    from ...integrations.lm_eval import TrirunLM
    from .resolve import HarnessTask

# lm-eval's seeds: Python's, and that of numpy, torch and the few-shot examples. --seed replaces both.
PYTHON_SEED, OTHER_SEED = 0, 1234
# Warnings of lm-eval that do not concern the results.
NOISE = ("Custom kwargs can be passed", "is defined, but aggregation is not", "is defined, but higher_is_better is not")


@dataclass(slots=True)
class HarnessRun:
    """The scores of a task or group, and what it took to run.

    Attributes:
        scores: groups before their parts. wall_s: seconds in all. model_s: seconds in the model.
        tokens: that the model was given. truncated: prompts cut on the left to fit the context.
        plan: how the model was run, for people. warnings: lm-eval's.
    """

    scores: list[TaskScore]
    wall_s: float
    model_s: float
    tokens: int
    truncated: int
    plan: str
    warnings: list[str]


def run_task(
    lm: TrirunLM, task: HarnessTask, *, limit: int | None, chat_template: bool, seed: int | None
) -> HarnessRun:
    """Run one task or group on a model.

    Args:
        lm: the model. limit: questions of each task; None for all.
        chat_template: wrap prompts in the tokenizer's chat template, examples as turns.
        seed: None for lm-eval's defaults.
    """
    from lm_eval.evaluator import evaluate

    python, other = seeds(seed)
    _seed_everything(python, other)
    for leaf in task.leaves.values():
        leaf.set_fewshot_seed(seed=other)
    scorer, started = lm.scorer, time.perf_counter()
    before = (scorer.model_s, scorer.tokens, scorer.truncated)
    with quiet_harness() as warnings, _templates_compiled_once():
        # lm-eval's bootstrap takes minutes; scores_of has the standard errors from the questions.
        results = evaluate(
            lm,
            task.loaded,
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
        )
    assert results is not None
    scores = scores_of(results, task.loaded, other)
    return HarnessRun(
        scores,
        time.perf_counter() - started,
        scorer.model_s - before[0],
        scorer.tokens - before[1],
        scorer.truncated - before[2],
        scorer.plan,
        warnings,
    )


def seeds(seed: int | None) -> tuple[int, int]:
    """Python's seed, and that of numpy, torch and the examples, for a value of ``--seed``."""
    return (PYTHON_SEED, OTHER_SEED) if seed is None else (seed, seed)


@contextmanager
def quiet_harness() -> Iterator[list[str]]:
    """Hide the progress bars of lm-eval and datasets; yields the list that gets lm-eval's warnings at the end."""
    seen: dict[str, None] = {}

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = " ".join(record.getMessage().split())
            if not any(noise in message for noise in NOISE):
                seen.setdefault(message[:200])

    logger, handler = logging.getLogger("lm_eval"), Collector(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    warnings: list[str] = []
    try:
        with redirect_stderr(io.StringIO()):
            yield warnings
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        warnings += seen


@contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """Cache the compiled templates of a task, which lm-eval compiles again for every question and example.

    Building the prompts of MMLU takes 0.6 s instead of 12, with five examples 1.5 s instead of 65.
    """
    from lm_eval.utils import env

    compile_template = env.from_string
    env.from_string = functools.lru_cache(maxsize=1024)(compile_template)
    try:
        yield
    finally:
        env.from_string = compile_template


def _seed_everything(python: int, other: int) -> None:
    import numpy
    import torch

    random.seed(python)
    numpy.random.seed(other)
    torch.manual_seed(other)
