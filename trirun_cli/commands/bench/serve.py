"""``trirun bench serve``: load on a server, its latencies and its throughput."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...checkpoint.hub import local_model
from ...console import Console, bytes_text
from ...errors import CheckFailed, TrirunError, UsageError
from .. import serve
from ..shared.missing import missing_package
from ..shared.options import Json, Quiet

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
    url: Annotated[str | None, typer.Argument(help="An OpenAI-compatible server, as http://127.0.0.1:8000.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", "-c", help="Start a server on this checkpoint instead.")
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
    serve_options: Annotated[str, typer.Option(help="Options of trirun serve, with --checkpoint.")] = "",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a server under load: throughput, and latencies as its clients see them.

    Any OpenAI-compatible server will do. In an open loop latencies count from the time a request was due, so that they
    show when a server falls behind. "Between chunks" is the time between pieces of text of one or several tokens.

    Examples:

      trirun bench serve -c DIR --concurrency 64 --serve-options "--max-batch 64"

      trirun bench serve http://127.0.0.1:8000 --rate 4 --requests 200 --json
    """
    if (url is None) == (checkpoint is None):
        raise UsageError("give the URL of a server or --checkpoint, one of the two")
    if url is not None and serve_options:
        raise UsageError("--serve-options belongs to --checkpoint; the server at URL is running already")
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
    if url is not None:
        document = _measure(console, url, api_key, load, check)
    else:
        from ...bench.server_process import ServerProcess
        from ...checkpoint.model_dir import read_config

        assert checkpoint is not None
        read_config(local_model(checkpoint, console))
        console.note(f"starting a server on {checkpoint}")
        with ServerProcess(checkpoint, options) as server:
            document = _measure(console, server.url, api_key, load, check)
            document["server"] = server.facts
            document["server_memory"] = [{"seconds": at, "bytes": size} for at, size in server.memory]
    console.json("bench.serve/1", document)
    _print(console, load, document)
    if wrong := document.get("check", {}).get("differing_prompts"):
        raise CheckFailed(f"{len(wrong)} of {prompts} prompts had another response than alone, as prompt {wrong[0]}")
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
    try:
        options = shlex.split(given)
        typer.main.get_command(parser).make_context("serve", ["--checkpoint", "", *options])
    except ValueError as error:
        raise UsageError(f"--serve-options {given}: {error}") from None
    except misuse as error:
        raise UsageError(f"--serve-options {given}: {error.format_message()}") from None
    return options


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
