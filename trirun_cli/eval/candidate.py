"""One evaluated model: what runs it, what its results depend on, and its results so far."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.device import pick_device
from ..backends.registry import open_runner
from ..checkpoint.model_dir import ModelDir
from ..checkpoint.reader import QUANT_METHOD, Checkpoint
from ..engine.scoring import ScoringModel
from ..errors import InputError
from ..text.detokenizer import load_tokenizer
from ..version import __version__
from .perplexity import Perplexity
from .request_cache import RequestCache, model_digest
from .settings import Reporter, Settings

if TYPE_CHECKING:
    from .tasks.harness import HarnessRun


@dataclass(slots=True)
class Candidate:
    """An evaluated model.

    Attributes:
        role: "model" for the baseline, "checkpoint" for the candidate compared with it. path: its directory.
        facts: what runs it, for the results document. runner: the model, None after its last task.
        cache: of finished requests, with ``--resume``.
        perplexities, runs: results of the text tasks and of lm-eval's, by task.
        wall_s, model_s: seconds by task, in all and in the model alone.
    """

    role: str
    path: Path
    facts: dict[str, Any]
    runner: ScoringModel | None
    tokenizer: Any
    cache: RequestCache | None = None
    perplexities: dict[str, Perplexity] = field(default_factory=dict)
    runs: dict[str, HarnessRun] = field(default_factory=dict)
    wall_s: dict[str, float] = field(default_factory=dict)
    model_s: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What a result depends on besides its tokens: the model, what runs it, and the libraries' versions."""
        kept = ("sha256", "device", "dtype", "kernel", "act_bits")
        # The native decoder's results are the same for any number of threads.
        engine = re.sub(r", \d+ threads", "", self.facts["engine"])
        return {name: self.facts[name] for name in kept} | {"engine": engine, "versions": library_versions()}


def open_candidate(role: str, path: Path, settings: Settings, reporter: Reporter) -> Candidate:
    """Open a model and report what runs it.

    Args:
        role: "model" or "checkpoint". path: its directory. reporter: gets a note.

    Raises:
        InputError: it cannot be loaded, has no chat template although ``--chat-template`` is given, or its finished
            requests are of another model. MissingError: there is no such device.
    """
    device = pick_device(settings.device)
    opened = open_runner(
        path,
        device=device,
        dtype=settings.dtype,
        act_bits=settings.act_bits,
        kv_cache_dtype=settings.kv_cache_dtype,
        context=settings.context,
        head=settings.head,
        threads=settings.threads,
        scoring=True,
        exact=not settings.as_served,
    )
    runner = ScoringModel(opened)
    tokenizer = load_tokenizer(path)
    if settings.chat_template and not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{path}: its tokenizer has no chat template", "leave out --chat-template")
    facts = {
        "path": str(path),
        "sha256": model_digest(path),
        "engine": runner.name,
        "device": device,
        "dtype": settings.dtype,
        "context": runner.max_positions,
        **_quantization(path, device, settings),
        "bos": _bos(tokenizer),
    }
    candidate = Candidate(role, path, facts, runner, tokenizer)
    if settings.resume:
        candidate.cache = RequestCache(settings.resume / f"{role}.jsonl", candidate.identity)
        if candidate.cache.found:
            reporter.note(f"{role}: {candidate.cache.found:,} finished requests in {settings.resume}")
    kernel = f", {facts['kernel']} kernels, {facts['act_bits']}-bit activations" if facts["kernel"] else ""
    slower = f" ({opened.why_slower})" if opened.why_slower else ""
    reporter.note(f"{role} {path} on {runner.name}{slower}{kernel}; BOS {facts['bos']}")
    return candidate


def _quantization(path: Path, device: str, settings: Settings) -> dict[str, Any]:
    """The kernels and activation bits of a packed checkpoint; None of any other model."""
    if ModelDir(path).quant_method != QUANT_METHOD:
        return {"kernel": None, "act_bits": None}
    kernel = "CUDA"
    if device == "cpu":
        from trirun_kernels.gemm import cpu

        kernel = cpu.backend()
    return {"kernel": kernel, "act_bits": settings.act_bits or Checkpoint(path).format.activation_bits}


def _bos(tokenizer: Any) -> str:
    """Whether the tokenizer puts BOS before a text, for people."""
    if tokenizer.bos_token_id is None:
        return "none: the tokenizer has no such token"
    ids = tokenizer("a")["input_ids"]
    added = "added" if ids[:1] == [tokenizer.bos_token_id] else "not added"
    return f"{tokenizer.bos_token} ({tokenizer.bos_token_id}): {added} by the tokenizer"


def library_versions(*more: str) -> dict[str, str]:
    """Versions of trirun, of the libraries that results depend on, and of ``more`` packages, by name."""
    packages = ("torch", "transformers", "tokenizers", *more)
    return {"trirun": __version__} | {package: metadata.version(package) for package in packages}
