"""One evaluation: every task on every model, one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.model_dir import ModelDir
from ..engine.generation import stop_ids
from ..errors import InputError, UsageError
from .candidate import Candidate, library_versions, open_candidate
from .corpus import Corpus, text_corpus, wikitext2
from .divergence import Divergence, divergence
from .perplexity import check_window, cut_windows, perplexity
from .request_cache import RequestCache
from .settings import TEXT_TASKS, Reporter, Settings

if TYPE_CHECKING:
    from .tasks.resolve import HarnessTask

# The window of the GPTQ paper, where the model's context is no shorter.
WINDOW = 2048


@dataclass(slots=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        settings: what was asked. candidates: the models with their results, the baseline first.
        corpora: the texts by task. tasks: lm-eval's, by name. versions: of the libraries, by name.
        divergence: of the candidate from the baseline, with the task ``kl``. wall_s: seconds in all.
    """

    settings: Settings
    candidates: list[Candidate]
    corpora: dict[str, Corpus]
    tasks: dict[str, HarnessTask]
    versions: dict[str, str]
    divergence: Divergence | None = None
    wall_s: float = 0.0

    def candidate(self, role: str) -> Candidate | None:
        """The model of that role, "model" or "checkpoint", or None."""
        return next((candidate for candidate in self.candidates if candidate.role == role), None)


def run(settings: Settings, roles: Sequence[tuple[str, Path]], reporter: Reporter) -> Evaluation:
    """Run every task on every model.

    Args:
        settings: what to run. roles: ("model" or "checkpoint", directory), in this order.
        reporter: gets notes, warnings and progress.

    Raises:
        UsageError: no such task, or options that it does not take. InputError: a model, a text or a task's data is
            missing or damaged. MissingError: lm-eval or the device is missing. What can be checked before the first
            forward pass is checked before it.
    """
    started = time.perf_counter()
    for _, path in roles:
        ModelDir(path)
    names = [task for task in settings.tasks if task in TEXT_TASKS]
    corpora = {name: wikitext2(settings.data_dirs) if name == "wikitext2" else _text(settings) for name in names}
    if "kl" in settings.tasks:
        corpora["kl"] = corpora.get("perplexity") or _text(settings)
    for corpus in dict.fromkeys(corpora.values()):
        if corpus.warning:
            reporter.warn(corpus.warning)
    tasks = _load_tasks(settings, reporter) if settings.harness_tasks else {}
    result = Evaluation(settings, [], corpora, tasks, library_versions(*(["lm_eval", "datasets"] if tasks else [])))
    try:
        for role, path in roles:
            candidate = open_candidate(role, path, settings, reporter)
            result.candidates.append(candidate)
            for name in names:
                _run_text(candidate, name, corpora[name], settings, reporter)
            for task in tasks.values():
                _run_harness(candidate, task, settings, reporter)
            if "kl" not in settings.tasks:
                # Only kl needs both models in memory at once.
                candidate.runner = None
        if "kl" in settings.tasks:
            result.divergence = _run_divergence(result, settings, reporter)
    finally:
        for candidate in result.candidates:
            candidate.runner = None
            if candidate.cache:
                candidate.cache.close()
    result.wall_s = time.perf_counter() - started
    return result


def _text(settings: Settings) -> Corpus:
    return text_corpus(settings.text)


def _load_tasks(settings: Settings, reporter: Reporter) -> dict[str, HarnessTask]:
    from .tasks.resolve import Loader, needs_lm_eval

    with needs_lm_eval(settings.harness_tasks):
        from .tasks.harness import quiet_harness

        loader, tasks = Loader(settings.data_dirs, settings.num_fewshot), {}
        for name in settings.harness_tasks:
            with quiet_harness():
                task = loader.load(name)
            tasks[task.name] = task
    owners: dict[str, str] = {}
    for task in tasks.values():
        for leaf in task.leaves:
            if leaf in owners:
                raise UsageError(f"--tasks: {leaf} is part of both {owners[leaf]} and {task.name}; name it once")
            owners[leaf] = task.name
    for warning in loader.warnings:
        reporter.warn(warning)
    return tasks


def _run_text(candidate: Candidate, name: str, corpus: Corpus, settings: Settings, reporter: Reporter) -> None:
    assert candidate.runner is not None
    started, spent = time.perf_counter(), 0.0
    windows = _windows(candidate, corpus, settings)
    with reporter.progress(f"{candidate.role} {name}", len(windows)) as bar:

        def on_window(model_s: float) -> None:
            nonlocal spent
            spent += model_s
            bar.advance()

        found = perplexity(candidate.runner, windows, cache=candidate.cache, on_window=on_window)
    candidate.perplexities[name] = found
    candidate.wall_s[name], candidate.model_s[name] = time.perf_counter() - started, spent


def _run_harness(candidate: Candidate, task: HarnessTask, settings: Settings, reporter: Reporter) -> None:
    from ..integrations.lm_eval import TrirunLM
    from .tasks.harness import run_task, seeds

    assert candidate.runner is not None
    terminal = sys.stderr

    @contextmanager
    def watch(what: str, count: int) -> Iterator[Callable[[float], None]]:
        with redirect_stderr(terminal), reporter.progress(f"{candidate.role} {task.name}: {what}", count) as bar:
            yield lambda share: bar.advance(share * count)

    lm = TrirunLM(
        candidate.runner,
        candidate.tokenizer,
        device=candidate.facts["device"],
        batch_size=settings.batch_size,
        stop_ids=stop_ids(ModelDir(candidate.path)),
        seed=seeds(settings.seed)[1],
        cache=candidate.cache,
        watch=watch,
    )
    if task.prompts != "lm-eval":
        reporter.note(f"{task.name}: prompts {task.prompts}, not lm-eval's")
    found = run_task(lm, task, limit=settings.limit, chat_template=settings.chat_template, seed=settings.seed)
    candidate.runs[task.name] = found
    candidate.wall_s[task.name], candidate.model_s[task.name] = found.wall_s, found.model_s
    reporter.note(
        f"{candidate.role} {task.name}: {found.wall_s:.1f} s, {found.model_s / found.wall_s:.0%} of it in the model"
        + (f" ({found.plan})" if found.plan else " (every request was finished before)")
    )
    for warning in found.warnings:
        reporter.warn(f"lm-eval: {warning}")
    if found.truncated:
        context = candidate.runner.max_positions
        lost = f"{found.truncated:,} prompts lost their beginning"
        reporter.warn(f"{task.name}: {lost} to a context of {context} tokens (--ctx)")


def _run_divergence(result: Evaluation, settings: Settings, reporter: Reporter) -> Divergence:
    baseline, candidate = result.candidate("model"), result.candidate("checkpoint")
    assert baseline and candidate and baseline.runner and candidate.runner
    started, corpus = time.perf_counter(), result.corpora["kl"]
    windows = _windows(baseline, corpus, settings)
    if _windows(candidate, corpus, settings).tolist() != windows.tolist():
        raise InputError("kl: model and checkpoint tokenize the text differently, so their predictions do not compare")
    cache = None
    if settings.resume:
        identity = {"model": baseline.identity, "checkpoint": candidate.identity}
        cache = RequestCache(settings.resume / "kl.jsonl", identity)
    try:
        with reporter.progress("kl", len(windows)) as bar:
            found = divergence(baseline.runner, candidate.runner, windows, cache=cache, on_window=bar.advance)
    finally:
        if cache:
            cache.close()
    candidate.wall_s["kl"] = candidate.model_s["kl"] = time.perf_counter() - started
    return found


def _windows(candidate: Candidate, corpus: Corpus, settings: Settings) -> Any:
    assert candidate.runner is not None
    length = settings.window or min(WINDOW, candidate.runner.max_positions)
    check_window(candidate.runner, length)
    return cut_windows(candidate.tokenizer(corpus.text, verbose=False)["input_ids"], length, settings.limit)
