"""``trirun serve``: OpenAI's API over the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..console import Console
from ..errors import InputError, UsageError
from ..missing import missing_package
from .shared.checkpoint_options import CheckpointOption, OriginalOption, Verify, one_checkpoint
from .shared.options import (
    Accumulate,
    ActBits,
    Compile,
    Device,
    DType,
    Engine,
    Head,
    Json,
    KvCacheDType,
    Quiet,
    Tf32,
    check_machine,
    options_given,
)
from .shared.serve_options import (
    ApiKey,
    ApiKeyFile,
    Backend,
    ChatTemplate,
    Context,
    CorsOrigin,
    Drain,
    Host,
    IdleUnload,
    LogFormat,
    LogRequests,
    MaxBatch,
    MaxModels,
    MaxWaiting,
    Models,
    OtlpTracesEndpoint,
    Page,
    Port,
    Preload,
    ServedModelName,
    StreamInterval,
    Threads,
)

if TYPE_CHECKING:
    from ..server.model import ServedModel


# What vLLM's server has too; its other options go to it as they are.
_OF_BOTH_BACKENDS = (
    *("--checkpoint", "--model", "--backend", "--host", "--port", "--served-model-name", "--max-batch", "--ctx"),
    *("--chat-template", "--api-key", "--api-key-file", "--cors-origin", "--drain", "--dtype", "--json", "--quiet"),
)


def command(
    context: typer.Context,
    models: Models = None,
    checkpoint_option: CheckpointOption = None,
    original: OriginalOption = None,
    backend: Backend = "trirun",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    max_batch: MaxBatch = None,
    ctx: Context = None,
    max_waiting: MaxWaiting = 256,
    max_models: MaxModels = None,
    idle_unload: IdleUnload = None,
    preload: Preload = "first",
    chat_template: ChatTemplate = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    cors_origin: CorsOrigin = None,
    ui: Page = True,
    drain: Drain = 30,
    stream_interval: StreamInterval = 25,
    log_requests: LogRequests = False,
    log_format: LogFormat = "text",
    otlp_traces_endpoint: OtlpTracesEndpoint = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: KvCacheDType = "auto",
    head: Head = "auto",
    accumulate: Accumulate = "fp32",
    engine: Engine = "auto",
    tf32: Tf32 = False,
    compiled: Compile = False,
    verify: Verify = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve one or several models over HTTP with OpenAI's API.

    /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /tokenize, /detokenize,
    /tokenizer_info: /docs has their fields, / is a page to chat with. /health, /version and /metrics need no key.
    SIGTERM or Ctrl-C lets running requests end, then exits with code 0; a second Ctrl-C cancels them. --json prints one
    document when the server takes requests.

    Examples:

      trirun serve DIR

      trirun serve small=DIR large=DIR --max-models 1 --idle-unload 600

      trirun serve DIR --host 0.0.0.0 --api-key-file key.txt --max-batch 64

      trirun serve DIR --backend vllm -- --tensor-parallel-size 2

      curl localhost:8000/v1/completions --json '{"prompt": "Once upon a time"}'
    """
    check_machine(dtype, act_bits, engine, accumulate, kv_cache_dtype, threads=threads, head=head)
    if backend not in ("trirun", "vllm"):
        raise UsageError(f"--backend {backend}: trirun or vllm")
    positional = models or []
    first_own = next((at for at, value in enumerate(positional) if value.startswith("-")), len(positional))
    given_models, own = [Path(value) for value in positional[:first_own]], positional[first_own:]
    if len(given_models) < 2 or checkpoint_option or original:
        given_models = [one_checkpoint(next(iter(given_models), None), checkpoint_option, original)]
    if own and backend != "vllm":
        raise UsageError(f"{own[0]}: nothing goes after the checkpoint without --backend vllm")
    least_values = {"--max-batch": (max_batch, 1), "--ctx": (ctx, 1), "--max-models": (max_models, 1)}
    for name, (value, least) in (least_values | {"--max-waiting": (max_waiting, 0)}).items():
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: at least {least}")
    if idle_unload is not None and not 0 < idle_unload <= 31_536_000:
        raise UsageError(f"--idle-unload {idle_unload:g}: seconds above 0, at most a year")
    if preload not in ("first", "all"):
        raise UsageError(f"--preload {preload}: first or all")
    if log_format not in ("text", "json"):
        raise UsageError(f"--log-format {log_format}: text or json")
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

    from ..server.pool.sources import model_sources

    sources = model_sources(given_models, served_model_name or (), console, verify=verify)
    names, checkpoint = sources[0]
    if backend == "vllm" and len(sources) > 1:
        raise UsageError(f"--backend vllm serves one model, and {len(sources)} are given")
    if preload == "all" and (max_models or len(sources)) < len(sources):
        raise UsageError(f"--preload all: {len(sources)} models, and --max-models {max_models}")
    if backend == "vllm":
        given = options_given(context)
        if other := [option for option in given if option.startswith("-") and option not in _OF_BOTH_BACKENDS]:
            raise UsageError(f"{other[0]} is not an option of --backend vllm", "vLLM's own options go after --")
        from ..integrations.vllm_server import check_installation, run_server, server_command, url_of_server

        version = check_installation()
        url, port = url_of_server(host, port)
        server = server_command(
            checkpoint,
            host=host,
            port=port,
            names=names,
            dtype=dtype,
            sequences=max_batch,
            context=ctx,
            chat_template=chat_template,
            cors_origins=cors_origin or (),
            drain_s=drain if "--drain" in given else None,
            own=own,
        )

        def started() -> None:
            console.note(f"{names[0]} on vLLM {version}, serving at {url}/v1; Ctrl-C stops")
            console.json("serve/1", {"url": url, "models": names, "engine": f"vllm {version}"})

        console.note(f"starting vLLM {version} on {checkpoint}")
        run_server(server, url, key, started)
        return
    try:
        from ..server.app import create_app
        from ..server.http.run import listen, serve, url_of
    except ModuleNotFoundError as error:
        raise missing_package(error, "serving", "serve") from error
    from ..server.operations.tracing import Tracing, exporter_to
    from ..server.pool.entry import source_of
    from ..server.pool.pool import Pool

    listener = listen(host, port)
    url = url_of(listener)

    def load(checkpoint: Path) -> ServedModel:
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
            head=head,
            engine=engine,
            tf32=tf32,
            compiled=compiled,
            slots=max_batch,
            context=ctx,
            threads=threads,
        )
        running = RunningEngine(runner, max_waiting=max_waiting)
        return ServedModel.start(checkpoint, running, tokenizer, runner.why_slots or "--max-batch")

    pool = Pool(
        [source_of(names, path, load, ctx) for names, path in sources],
        max_waiting=max_waiting,
        max_loaded=max_models,
        idle_s=idle_unload,
    )
    tracing = None if otlp_traces_endpoint is None else Tracing(exporter_to(otlp_traces_endpoint))
    app = create_app(pool, api_key=key, cors_origins=cors_origin or (), page=ui, tracing=tracing)

    def ready() -> None:
        assert pool.entries[0].service is not None
        model = pool.entries[0].service.model
        running = model.engine
        console.note(f"{names[0]} on {running.description}")
        console.note(f"{running.slots} requests at once ({model.why_slots}), {running.context} tokens each")
        console.note(f"serving at {url}/v1{f', a page to chat with at {url}' if ui else ''}; Ctrl-C stops")
        if len(sources) > 1:
            console.note(f"{len(sources)} models: {', '.join(pool.names)}")
        facts = {"url": url, "models": pool.names, "engine": running.name, "slots": running.slots}
        facts["slots_reason"] = model.why_slots
        console.json("serve/1", {**facts, "context": running.context})

    console.note(f"loading {checkpoint}")
    serve(
        app,
        pool,
        listener,
        preload=len(sources) if preload == "all" else 1,
        ready=ready,
        drain_s=drain,
        stream_interval_s=stream_interval / 1e3,
        log_requests=log_requests,
        log_format="json" if log_format == "json" else "text",
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
