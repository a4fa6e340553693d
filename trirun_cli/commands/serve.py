"""``trirun serve``: OpenAI's API over the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..checkpoint.hub import local_model, model_name
from ..console import Console
from ..errors import InputError, UsageError
from .shared.generation_options import Checkpoint
from .shared.missing import missing_package
from .shared.options import (
    Accumulate,
    ActBits,
    Compile,
    Device,
    DType,
    Engine,
    Json,
    KvCacheDType,
    Quiet,
    Tf32,
    check_machine,
)

if TYPE_CHECKING:
    from ..server.model import ServedModel


def command(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API; may be given several times. Default: the directory's.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests that run at once. Default: by the device's memory and the model.")
    ] = None,
    ctx: Annotated[int | None, typer.Option(help="Tokens of a request, prompt included. Default: the model's.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more return status 429.")] = 256,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file that replaces the tokenizer's chat template.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Required of clients as a Bearer token.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Read the key from a file, where the process list does not show it.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin that browsers may call from; * is any. May be given several times.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get when the server stops.")] = 30,
    stream_interval: Annotated[
        float, typer.Option(help="Milliseconds between chunks of a stream; 0 sends every token at once.")
    ] = 25,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log a line per request: tokens, latency, id.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Of the CPU decoder. Default: one per processor. A small model with many clients may do better with "
            "one fewer, which is left to the connections.",
            rich_help_panel="Machine",
        ),
    ] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: KvCacheDType = "auto",
    accumulate: Accumulate = "fp32",
    engine: Engine = "auto",
    tf32: Tf32 = False,
    compiled: Compile = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /tokenizer_info; /docs has their fields.
    /health, /version and /metrics need no key. SIGTERM or Ctrl-C lets running requests end, then exits with code 0; a
    second Ctrl-C cancels them. --json prints one document when the server takes requests.

    Examples:

      trirun serve --checkpoint DIR

      trirun serve -c DIR --host 0.0.0.0 --api-key-file key.txt --max-batch 64

      curl localhost:8000/v1/completions --json '{"prompt": "Once upon a time"}'
    """
    check_machine(dtype, act_bits, engine, accumulate, kv_cache_dtype)
    least_values = {"--max-batch": (max_batch, 1), "--ctx": (ctx, 1), "--threads": (threads, 1)}
    for name, (value, least) in (least_values | {"--max-waiting": (max_waiting, 0)}).items():
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: at least {least}")
    if threads is not None and threads > (processors := len(os.sched_getaffinity(0))):
        raise UsageError(f"--threads {threads}: this process may use {processors} processors")
    if not 0 <= drain < 86_400:
        raise UsageError(f"--drain {drain:g}: seconds from 0 to a day")
    if not 0 <= stream_interval <= 10_000:
        raise UsageError(f"--stream-interval {stream_interval:g}: milliseconds from 0 to 10000")
    if not 0 <= port < 65_536:
        raise UsageError(f"--port {port}: from 0 to 65535")
    for name in served_model_name or ():
        if not name.strip() or not name.isprintable():
            raise UsageError(f"--served-model-name {name!r}: no name of printable characters")
    key = _key(api_key, api_key_file)
    template = None if chat_template is None else _text(chat_template)
    console = Console(as_json=json, quiet=quiet)

    from ..checkpoint.model_dir import read_config

    names = served_model_name or [model_name(checkpoint)]
    checkpoint = local_model(checkpoint, console)
    read_config(checkpoint)
    try:
        from ..server.app import create_app
        from ..server.run import listen, serve, url_of
    except ModuleNotFoundError as error:
        raise missing_package(error, "serving", "serve") from error
    from ..server.service import Service

    listener = listen(host, port)
    url = url_of(listener)
    service = Service(names, max_waiting=max_waiting)
    app = create_app(service, api_key=key, cors_origins=cors_origin or ())

    def load() -> ServedModel:
        from ..backends.registry import open_runner
        from ..engine.engine import Engine as RunningEngine
        from ..server.model import ServedModel, serving_tokenizer

        tokenizer = serving_tokenizer(checkpoint, template, chat_template)
        runner = open_runner(
            checkpoint,
            device=device,
            dtype=dtype,
            act_bits=act_bits,
            accumulate=accumulate,
            kv_cache_dtype=kv_cache_dtype,
            engine=engine,
            tf32=tf32,
            compiled=compiled,
            slots=max_batch,
            context=ctx,
            threads=threads,
        )
        running = RunningEngine(runner, max_waiting=max_waiting)
        return ServedModel.start(checkpoint, running, tokenizer, runner.why_slots or "--max-batch")

    def ready(model: ServedModel) -> None:
        running = model.engine
        console.note(f"{names[0]} on {running.description}")
        console.note(f"{running.slots} requests at once ({model.why_slots}), {running.context} tokens each")
        console.note(f"serving at {url}/v1; Ctrl-C stops")
        facts = {"url": url, "models": names, "engine": running.name, "slots": running.slots}
        facts["slots_reason"] = model.why_slots
        console.json("serve/1", {**facts, "context": running.context})

    console.note(f"loading {checkpoint}")
    serve(
        app,
        service,
        listener,
        load,
        ready=ready,
        drain_s=drain,
        stream_interval_s=stream_interval / 1e3,
        log_requests=log_requests,
    )


def _key(given: str | None, file: Path | None) -> str | None:
    if given is not None and file is not None:
        raise UsageError("--api-key and --api-key-file are both given; one is enough")
    key = given if file is None else _text(file).strip()
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise UsageError("the API key must be printable ASCII characters without spaces")
    return key


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
