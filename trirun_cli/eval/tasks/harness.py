"""Running lm-eval's tasks on a trirun model, and what comes out of it question by question."""

from __future__ import annotations

import functools
import io
import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import statistics

if TYPE_CHECKING:
    from ...integrations.lm_eval import TrirunLM
    from .resolve import HarnessTask

# lm-eval's own seeds, which --seed replaces all at once: Python's, and numpy's, torch's and the examples'.
PYTHON_SEED, OTHER_SEED = 0, 1234
# Of lm-eval's warnings, those that say nothing about the results.
NOISE = ("Custom kwargs can be passed", "is defined, but aggregation is not", "is defined, but higher_is_better is not")


@dataclass(frozen=True, slots=True)
class Sample:
    """One question.

    Attributes:
        id: its number in the data. prompt: the text before the answer; of the first answer, if they have several.
        answers: the continuations scored, or nothing where text is generated.
        likelihoods: of the answers, in nats. prediction: the index of the answer chosen, whether the only answer is the
            greedy one, or the text generated. target: what is right. values: of each metric.
    """

    id: int
    prompt: str
    answers: list[str]
    likelihoods: list[float]
    prediction: Any
    target: Any
    values: dict[str, Any]


@dataclass(slots=True)
class TaskScore:
    """A task's or group's scores.

    Attributes:
        parts: the tasks of a group; a task by itself has none.
        questions, of: how many were asked, and how many there are.
        scores, stderrs, higher_is_better: by metric; the name of a filter follows after a comma.
        samples: the questions of a task; a group has none of its own.
    """

    name: str
    version: str
    num_fewshot: int | None
    questions: int
    of: int
    parts: list[str] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float | None] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class HarnessRun:
    """Scores of one requested task, groups before their parts, and how long it took.

    Attributes:
        wall_s: seconds in all. model_s: of them, in the model. tokens: that the model was given.
        truncated: prompts cut on the left to fit the context. plan: how the model was run. warnings: lm-eval's.
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
        # No bootstrap here: lm-eval's takes minutes, and the errors come from the questions below.
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
    scores = _scores(results, task, other)
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
    """Python's seed, and the one of everything else, for a value of ``--seed``."""
    return (PYTHON_SEED, OTHER_SEED) if seed is None else (seed, seed)


@contextmanager
def quiet_harness() -> Iterator[list[str]]:
    """lm-eval and datasets without their progress bars; yields the list that their warnings are collected in."""
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
    """lm-eval compiles a task's templates anew for every question and example; this makes it remember them.

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


def _scores(results: dict[str, Any], task: HarnessTask, seed: int) -> list[TaskScore]:
    leaves = {name: _leaf(name, results, leaf, seed) for name, leaf in task.leaves.items()}
    groups = {name: _group(name, results, group, leaves) for name, group in task.loaded.get("groups", {}).items()}
    return [*(group for group in groups.values() if group.scores), *leaves.values()]


def _leaf(name: str, results: dict[str, Any], task: Any, seed: int) -> TaskScore:
    count = results["n-samples"][name]
    score = TaskScore(
        name,
        str(results["versions"].get(name)),
        results["n-shot"].get(name),
        count["effective"],
        count["original"],
        samples=_samples(results["samples"][name]),
    )
    aggregations, better = task.aggregation(), task.higher_is_better()
    for key, value in results["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        label = _label(metric, filtered)
        values = [sample.values[label] for sample in score.samples]
        score.scores[label], score.higher_is_better[label] = float(value), better.get(metric)
        effect = statistics.influence(values, float(value))
        if effect is not None:
            score.stderrs[label] = statistics.stderr_of_mean(effect)
        else:
            score.stderrs[label] = statistics.bootstrap_stderr(values, aggregations[metric], seed)
    return score


def _group(name: str, results: dict[str, Any], group: Any, leaves: dict[str, TaskScore]) -> TaskScore:
    parts = [leaves[task.task_name] for task in group.get_all_tasks()]
    score = TaskScore(
        name,
        group.version,
        parts[0].num_fewshot if len({part.num_fewshot for part in parts}) == 1 else None,
        sum(part.questions for part in parts),
        sum(part.of for part in parts),
        [part.name for part in parts],
    )
    for key, value in results.get("groups", {}).get(name, {}).items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        label = _label(metric, filtered)
        score.scores[label] = float(value)
        score.higher_is_better[label] = parts[0].higher_is_better.get(label)
        effects = strata(parts, label)
        score.stderrs[label] = None if effects is None else statistics.group_stderr(effects, float(value))
    return score


def strata(parts: list[TaskScore], metric: str) -> list[list[float]] | None:
    """What each question adds to each part's score, part by part; None where a score is no mean of questions."""
    effects = []
    for part in parts:
        effect = statistics.influence([sample.values[metric] for sample in part.samples], part.scores[metric])
        if effect is None:
            return None
        effects.append(effect)
    return effects


def _samples(entries: list[dict[str, Any]]) -> list[Sample]:
    samples: dict[int, Sample] = {}
    for entry in entries:
        values = {_label(metric, entry["filter"]): entry[metric] for metric in entry["metrics"]}
        known = samples.setdefault(entry["doc_id"], _sample(entry))
        known.values.update(values)
    return [samples[key] for key in sorted(samples)]


def _sample(entry: dict[str, Any]) -> Sample:
    requests, responses = entry["arguments"], [response[0] for response in entry["resps"]]
    scored = all(isinstance(response, tuple | list) for response in responses)
    answers = [request[1] for request in requests] if scored else []
    # With several contexts and one answer, the contexts are what is chosen between.
    if len(set(answers)) == 1 < len(answers):
        answers = [request[0] for request in requests]
    likelihoods = [float(response[0]) for response in responses] if scored else []
    if len(likelihoods) > 1:
        prediction: Any = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    else:
        prediction = bool(responses[0][1]) if scored else entry["filtered_resps"][0]
    return Sample(entry["doc_id"], requests[0][0], answers, likelihoods, prediction, entry["target"], {})


def _label(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric},{filtered}"
