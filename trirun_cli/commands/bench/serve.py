"""``trirun bench serve``: load on a server, its latencies and its throughput."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...console import Console, bytes_text
from ...errors import CheckFailed, TrirunError, UsageError
from ...missing import missing_package
from ...workflows.import_cache import as_model_dir
from .. import serve
from ..shared.options import Json, Quiet, completes

if TYPE_CHECKING:
    from ...bench.client import Load
    from ...bench.serve import LoadResult

_NAMES = {
    "time_to_first_token": "time to first token",
    "between_chunks": "between chunks",
    "per_output_token": "per output token",
    "end_to_end": "end to end",
}


def command(
    target: Annotated[
        str | None,
        typer.Argument(
            help="An OpenAI-compatible server, as http://127.0.0.1:8000; or a model to start one on, as trirun serve "
            "takes it.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", "-c", help="The model to start a server on, as an option.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: clients, each with one request at a time. Default: 8.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second, at random times.")] = None,
    requests: Annotated[int | None, typer.Option(help="Number of requests.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds in which requests are started. Default: 30.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of a response.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate all of --max-tokens, where the server has the field.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of the responses; 0 is greedy.")] = 0.0,
    prompts: Annotated[int, typer.Option(help="Different prompts, used in turn.")] = 64,
    prompt_words: Annotated[int, typer.Option(help="Words of a prompt.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Text to take prompts from. Default: the demo model's.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrival times and prompts.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Send every prompt alone afterwards; another response is an error.")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="Bearer token of the server.")] = None,
    serve_options: Annotated[str, typer.Option(help="Options of trirun serve, for the server that is started.")] = "",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Who serves the model: trirun, or vllm. Given twice, one after the other takes the same load.",
            autocompletion=completes("trirun", "vllm"),
        ),
    ] = None,
    vllm_options: Annotated[str, typer.Option(help="Options of vLLM's server, with --backend vllm.")] = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a server under load: throughput, and latencies as its clients see them.

    Any OpenAI-compatible server will do. In an open loop latencies count from the time a request was due, so that they
    show when a server falls behind. "Between chunks" is the time between pieces of text of one or several tokens.

    Examples:

      trirun bench serve DIR --concurrency 64 --serve-options "--max-batch 64"

      trirun bench serve DIR --backend trirun --backend vllm

      trirun bench serve http://127.0.0.1:8000 --rate 4 --requests 200 --json
    """
    url = target if target is not None and target.startswith(("http://", "https://")) else None
    if target is None and checkpoint is None:
        raise UsageError("give the URL of a server, or a checkpoint to start one on")
    if target is not None and checkpoint is not None:
        raise UsageError(f"{target} and --checkpoint are both given; one is enough")
    for own, asked in (("--serve-options", serve_options), ("--backend", backend), ("--vllm-options", vllm_options)):
        if url is not None and asked:
            raise UsageError(f"{own}: the server at {url} is running already")
    backends = list(dict.fromkeys(backend or ["trirun"]))
    if unknown := [name for name in backends if name not in ("trirun", "vllm")]:
        raise UsageError(f"--backend {unknown[0]}: trirun or vllm")
    if vllm_options and "vllm" not in backends:
        raise UsageError("--vllm-options needs --backend vllm")
    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency is a closed loop and --rate an open one; give one of the two")
    if check and temperature != 0:
        raise UsageError(f"--check needs greedy answers, not --temperature {temperature:g}")
    positive = {
        "--concurrency": concurrency,
        "--rate": rate,
        "--requests": requests,
        "--seconds": seconds,
        "--prompts": prompts,
        "--prompt-words": prompt_words,
        "--max-tokens": max_tokens,
    }
    for name, value in positive.items():
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{name} {value:g}: more than 0" + (", and an end" if value > 0 else ""))
    options = _serve_options(serve_options)
    try:
        from ...bench.client import Load
        from ...bench.serve import pick_prompts
    except ModuleNotFoundError as error:
        raise missing_package(error, "this benchmark", "serve") from error
    from ...text.detokenizer import read_text

    console = Console(as_json=json, quiet=quiet)
    load = Load(
        prompts=pick_prompts(read_text(text)[0], count=prompts, words=prompt_words, seed=seed),
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        concurrency=(concurrency or 8) if rate is None else None,
        rate=rate,
        requests=requests,
        seconds=30.0 if seconds is None and requests is None else seconds,
        seed=seed,
    )
    documents = []
    if url is not None:
        documents.append(_measure(console, url, api_key, load, check))
    else:
        from ...bench.server_process import ServerProcess

        # A file of another format is imported here, and not while the server's start is waited for.
        model = as_model_dir(checkpoint or Path(target or ""), console)
        for name in backends:
            console.note(f"starting a server on {model}" + (f", by {name}" if backend else ""))
            # What both backends have goes to both.
            extra = ["--backend", "vllm", *options, "--", *_words("--vllm-options", vllm_options)]
            with ServerProcess(model, extra if name == "vllm" else options) as server:
                document = _measure(console, server.url, api_key, load, check)
                document["server"] = server.facts
                if name == "trirun":  # vLLM's memory is that of other processes
                    document["server_memory"] = [{"seconds": at, "bytes": size} for at, size in server.memory]
            documents.append(document)
    if len(documents) == 1:
        console.json("bench.serve/1", documents[0])
    else:
        console.json("bench.serve.backends/1", dict(zip(backends, documents, strict=True)))
    for document in documents:
        _print(console, load, document)
    for document in documents:
        if wrong := document.get("check", {}).get("differing_prompts"):
            which = f"{len(wrong)} of {prompts} prompts"
            raise CheckFailed(f"{which} had another response than alone, as prompt {wrong[0]}")
        if document["errors"]:
            raise TrirunError(f"{sum(document['errors'].values())} of {document['requests']} requests failed")


def _serve_options(given: str) -> list[str]:
    """The options of ``--serve-options``, checked as ``trirun serve`` would.

    Raises:
        UsageError: it would refuse them.
    """
    # click's, which typer keeps in different places.
    misuse: Any = typer.BadParameter.__base__
    parser = typer.Typer()
    parser.command()(serve.command)
    options = _words("--serve-options", given)
    try:
        typer.main.get_command(parser).make_context("serve", ["--checkpoint", "", *options])
    except misuse as error:
        raise UsageError(f"--serve-options {given}: {error.format_message()}") from None
    return options


def _words(option: str, given: str) -> list[str]:
    """An option's value as a shell would split it. Raises UsageError: a quotation mark is left open."""
    try:
        return shlex.split(given)
    except ValueError as error:
        raise UsageError(f"{option} {given}: {error}") from None


def _measure(console: Console, url: str, api_key: str | None, load: Load, check: bool) -> dict[str, Any]:
    import asyncio

    from ...bench.client import Client
    from ...bench.serve import differing, run_load

    async def measure() -> tuple[str, LoadResult, list[int] | None]:
        async with Client(url, api_key) as client:
            model = await client.find_model()
            # Warm up: the first request may take longer than later ones.
            await client.ask(load, 0)
            timed = load.requests is None
            started, shown = time.perf_counter(), 0.0
            with console.progress("seconds" if timed else "requests", load.requests or int(load.seconds or 0)) as bar:

                def progress(done: int) -> None:
                    nonlocal shown
                    now = min(time.perf_counter() - started, load.seconds or 0) if timed else done
                    bar.advance(now - shown)
                    shown = now

                result = await run_load(client, load, progress)
            wrong = None
            if check:
                console.note("sending every prompt alone")
                wrong = await differing(client, load, result.samples)
            return model, result, wrong

    model, result, wrong = asyncio.run(measure())
    loop = {"rate_per_s": load.rate, "seed": load.seed} if load.rate else {"concurrency": load.concurrency}
    document = {"url": url, "model": model, "load": loop | {"max_tokens": load.max_tokens}, **result.document()}
    if wrong is not None:
        answered = len({sample.prompt for sample in result.samples if sample.error is None})
        document["check"] = {"prompts": answered, "differing_prompts": wrong}
    return document


def _print(console: Console, load: Load, document: dict[str, Any]) -> None:
    rows = []
    for key, name in _NAMES.items():
        if (values := document["latency_ms"][key]) is not None:
            rows.append([name, *(f"{values[part]:.1f}" for part in ("p50", "p95", "p99", "mean"))])
    how = f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests/s at random times"
    failed = sum(document["errors"].values())
    title = (
        f"{document['model']} at {document['url']}: {how}, {document['seconds']:.1f} s\n"
        f"{document['requests']} requests, {failed} failed; {document['requests_per_s']:.2f} requests/s, "
        f"{document['generated_tokens_per_s']:.0f} generated tokens/s\n"
        f"{document['prompt_tokens']} prompt tokens, {document['prompt_tokens_cached']} of them from the cache"
    )
    console.table(title, ["milliseconds", "p50", "p95", "p99", "mean"], rows)
    if (share := document["client_cpu_share"]) > 0.8:
        console.warn(f"the clients took {share:.0%} of a processor and may have limited the result")
    for error, count in document["errors"].items():
        console.warn(f"{count} × {error}")
    if memory := document.get("server_memory"):
        first, last = memory[0]["bytes"], memory[-1]["bytes"]
        most = max(entry["bytes"] for entry in memory)
        console.note(f"server memory: {bytes_text(first)} first, {bytes_text(last)} last, {bytes_text(most)} at most")
    if (outcome := document.get("check")) is not None and not outcome["differing_prompts"]:
        console.note(f"every response to {outcome['prompts']} prompts is that of the request alone")
