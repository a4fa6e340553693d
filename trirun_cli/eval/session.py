"""One evaluation: the models, the texts and the tasks of a command line, run one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.model_dir import ModelDir
from ..console import Console
from ..engine.generation import stop_ids
from ..errors import InputError, UsageError
from .candidate import Side, library_versions, open_side
from .corpus import Corpus, text_corpus, wikitext2
from .divergence import Divergence, divergence
from .perplexity import check_window, cut_windows, perplexity_of, window_loss
from .request_cache import RequestCache

if TYPE_CHECKING:
    from .tasks.resolve import HarnessTask

# Tasks that need no lm-eval.
TEXT_TASKS = ("perplexity", "wikitext2")
BUILT_IN = (*TEXT_TASKS, "kl")
# The window of the GPTQ paper, where the model's context is no shorter.
WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for; see the options of ``trirun eval``."""

    tasks: tuple[str, ...]
    text: Path | None = None
    window: int | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    data_dirs: tuple[Path, ...] = ()
    chat_template: bool = False
    seed: int | None = None
    batch_size: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    act_bits: int | None = None
    kv_cache_dtype: str = "auto"
    as_served: bool = False
    resume: Path | None = None

    @property
    def harness_tasks(self) -> list[str]:
        """Those that lm-eval runs."""
        return [task for task in self.tasks if task not in BUILT_IN]


@dataclass(slots=True)
class Evaluation:
    """What came out: by side, and between the sides. ``wall_s`` is of everything."""

    settings: Settings
    sides: list[Side]
    corpora: dict[str, Corpus]
    tasks: dict[str, HarnessTask]
    versions: dict[str, str]
    divergence: Divergence | None = None
    wall_s: float = 0.0

    def side(self, role: str) -> Side | None:
        """The side of that role, if it took part."""
        return next((side for side in self.sides if side.role == role), None)


def run(settings: Settings, roles: Sequence[tuple[str, Path]], console: Console) -> Evaluation:
    """Run every task on every model.

    Args:
        settings: what to run. roles: ("model" or "checkpoint", directory), in this order.
        console: shows notes and progress.

    Raises:
        UsageError, InputError, MissingError: a task, its data, a model or lm-eval is not as it must be. Everything that
            can be checked before the first forward pass is.
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
            console.warn(corpus.warning)
    tasks = _load_tasks(settings, console) if settings.harness_tasks else {}
    result = Evaluation(settings, [], corpora, tasks, library_versions(*(["lm_eval", "datasets"] if tasks else [])))
    try:
        for role, path in roles:
            side = open_side(role, path, settings, console)
            result.sides.append(side)
            for name in names:
                _run_text(side, name, corpora[name], settings, console)
            for task in tasks.values():
                _run_harness(side, task, settings, console)
            if "kl" not in settings.tasks:
                # Two models at once only where both are needed at once.
                side.runner = None
        if "kl" in settings.tasks:
            result.divergence = _run_divergence(result, settings, console)
    finally:
        for side in result.sides:
            side.runner = None
            if side.cache:
                side.cache.close()
    result.wall_s = time.perf_counter() - started
    return result


def _text(settings: Settings) -> Corpus:
    return text_corpus(settings.text)


def _load_tasks(settings: Settings, console: Console) -> dict[str, HarnessTask]:
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
        console.warn(warning)
    return tasks


def _run_text(side: Side, name: str, corpus: Corpus, settings: Settings, console: Console) -> None:
    assert side.runner is not None
    started = time.perf_counter()
    windows = _windows(side, corpus, settings)
    losses, spent = [], 0.0
    with console.progress(f"{side.role} {name}", len(windows)) as bar:
        for tokens in windows:
            key = tokens.tolist()
            loss = side.cache.get("window", key) if side.cache else None
            if loss is None:
                before = time.perf_counter()
                loss = window_loss(side.runner, tokens)
                spent += time.perf_counter() - before
                if side.cache:
                    side.cache.put("window", key, value=loss)
            losses.append(loss)
            bar.advance()
    side.perplexities[name] = perplexity_of(losses, windows.shape[1])
    side.wall_s[name], side.model_s[name] = time.perf_counter() - started, spent


def _run_harness(side: Side, task: HarnessTask, settings: Settings, console: Console) -> None:
    from ..integrations.lm_eval import TrirunLM
    from .tasks.harness import run_task, seeds

    assert side.runner is not None
    terminal = sys.stderr

    @contextmanager
    def watch(what: str, count: int) -> Iterator[Callable[[float], None]]:
        with redirect_stderr(terminal), console.progress(f"{side.role} {task.name}: {what}", count) as bar:
            yield lambda share: bar.advance(share * count)

    lm = TrirunLM(
        side.runner,
        side.tokenizer,
        device=side.facts["device"],
        batch_size=settings.batch_size,
        stop_ids=stop_ids(ModelDir(side.path)),
        seed=seeds(settings.seed)[1],
        cache=side.cache,
        watch=watch,
    )
    if task.prompts != "lm-eval":
        console.note(f"{task.name}: prompts {task.prompts}, not lm-eval's")
    found = run_task(lm, task, limit=settings.limit, chat_template=settings.chat_template, seed=settings.seed)
    side.runs[task.name] = found
    side.wall_s[task.name], side.model_s[task.name] = found.wall_s, found.model_s
    console.note(
        f"{side.role} {task.name}: {found.wall_s:.1f} s, {found.model_s / found.wall_s:.0%} of it in the model"
        + (f" ({found.plan})" if found.plan else " (every request was finished before)")
    )
    for warning in found.warnings:
        console.warn(f"lm-eval: {warning}")
    if found.truncated:
        context = side.runner.max_positions
        console.warn(f"{task.name}: {found.truncated:,} prompts lost their beginning to a context of {context} tokens")


def _run_divergence(result: Evaluation, settings: Settings, console: Console) -> Divergence:
    model, checkpoint = result.side("model"), result.side("checkpoint")
    assert model and checkpoint and model.runner and checkpoint.runner
    started, corpus = time.perf_counter(), result.corpora["kl"]
    windows = _windows(model, corpus, settings)
    if _windows(checkpoint, corpus, settings).tolist() != windows.tolist():
        raise InputError("kl: model and checkpoint tokenize the text differently, so their predictions do not compare")
    cache = None
    if settings.resume:
        identity = {"model": model.identity, "checkpoint": checkpoint.identity}
        cache = RequestCache(settings.resume / "kl.jsonl", identity)
    try:
        with console.progress("kl", len(windows)) as bar:
            found = divergence(model.runner, checkpoint.runner, windows, cache=cache, on_window=bar.advance)
    finally:
        if cache:
            cache.close()
    checkpoint.wall_s["kl"] = checkpoint.model_s["kl"] = time.perf_counter() - started
    return found


def _windows(side: Side, corpus: Corpus, settings: Settings) -> Any:
    assert side.runner is not None
    length = settings.window or min(WINDOW, side.runner.max_positions)
    check_window(side.runner, length)
    return cut_windows(side.tokenizer(corpus.text, verbose=False)["input_ids"], length, settings.limit)
