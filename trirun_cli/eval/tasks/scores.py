"""The scores of lm-eval's tasks and groups, question by question, with standard errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import standard_errors


@dataclass(frozen=True, slots=True)
class Sample:
    """One question and its answer.

    Attributes:
        id: its number in the data. prompt: the text before the answers; of the first, where they differ.
        answers: the scored continuations, none where text is generated. likelihoods: of the answers, in nats.
        prediction: the index of the chosen answer, whether the only answer is the greedy one, or the generated text.
        target: the right answer. values: by metric.
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
        parts: the tasks of a group; a task has none.
        questions: asked. of: in the data.
        scores, stderrs, higher_is_better: by metric; a filter's name follows after a comma.
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


def scores_of(results: dict[str, Any], loaded: dict[str, Any], seed: int) -> list[TaskScore]:
    """The scores in what ``lm_eval.evaluator.evaluate`` returned, groups before their parts.

    Args:
        results: with samples. loaded: the tasks and groups that were run. seed: of resampling, for standard errors.
    """
    leaves = {name: _leaf(name, results, leaf, seed) for name, leaf in loaded["tasks"].items()}
    groups = {name: _group(name, results, group, leaves) for name, group in loaded.get("groups", {}).items()}
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
        effect = standard_errors.influence(values, float(value))
        if effect is not None:
            score.stderrs[label] = standard_errors.stderr_of_mean(effect)
        else:
            score.stderrs[label] = standard_errors.bootstrap_stderr(values, aggregations[metric], seed)
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
        score.stderrs[label] = None if effects is None else standard_errors.group_stderr(effects, float(value))
    return score


def strata(parts: list[TaskScore], metric: str) -> list[list[float]] | None:
    """What each question adds to each part's score, by part; None where a score is no mean over questions."""
    effects = []
    for part in parts:
        effect = standard_errors.influence([sample.values[metric] for sample in part.samples], part.scores[metric])
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
