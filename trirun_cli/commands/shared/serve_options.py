"""The options of ``trirun serve``, in the groups of its --help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import completes

# The groups of --help.
_MODELS, _LIMITS, _NETWORK, _OPERATIONS = "Models", "Limits", "Network", "Operations"

Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Models: directories, GGUF files, names of the hub (ORG/NAME), demo, a folder of models; NAME=MODEL "
        "names one. With --backend vllm, its own options after --.",
        show_default=False,
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="trirun's own server, or vllm: vLLM's, with this checkpoint on trirun's kernels, for several GPUs.",
        autocompletion=completes("trirun", "vllm"),
        rich_help_panel=_MODELS,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.", rich_help_panel=_NETWORK)]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.", rich_help_panel=_NETWORK)]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        help="Name in the API: any number of one model, or one each. Default: the directory's.",
        rich_help_panel=_MODELS,
    ),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        help="Requests that run at once. Default: by the device's memory and the model.", rich_help_panel=_LIMITS
    ),
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of a request, prompt included. Default: the model's.", rich_help_panel=_LIMITS),
]
MaxWaiting = Annotated[
    int, typer.Option(help="Requests that may wait; more return status 429.", rich_help_panel=_LIMITS)
]
MaxModels = Annotated[
    int | None,
    typer.Option(
        help="Of several models, loaded at once. Default: as many as the memory holds.", rich_help_panel=_MODELS
    ),
]
IdleUnload = Annotated[
    float | None,
    typer.Option(
        help="Unload a model that had no request for so many seconds. Default: never.", rich_help_panel=_MODELS
    ),
]
Preload = Annotated[
    str,
    typer.Option(
        help="Models loaded at the start: first or all; others when asked for.",
        autocompletion=completes("first", "all"),
        rich_help_panel=_MODELS,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(help="Jinja file that replaces the tokenizer's chat template.", rich_help_panel=_MODELS),
]
ApiKey = Annotated[str | None, typer.Option(help="Required of clients as a Bearer token.", rich_help_panel=_NETWORK)]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="Read the key from a file, where the process list does not show it.", rich_help_panel=_NETWORK),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="Origin that browsers may call from; * is any. May be given several times.", rich_help_panel=_NETWORK
    ),
]
Page = Annotated[bool, typer.Option("--ui/--no-ui", help="A page to chat with, at /.", rich_help_panel=_NETWORK)]
Drain = Annotated[
    float, typer.Option(help="Seconds that running requests get when the server stops.", rich_help_panel=_NETWORK)
]
StreamInterval = Annotated[
    float,
    typer.Option(
        help="Milliseconds between chunks of a stream; 0 sends every token at once.", rich_help_panel=_NETWORK
    ),
]
LogRequests = Annotated[
    bool,
    typer.Option("--log-requests", help="Log a line per request: tokens, latency, id.", rich_help_panel=_OPERATIONS),
]
LogFormat = Annotated[
    str,
    typer.Option(
        help="text, or json: one document a line.",
        rich_help_panel=_OPERATIONS,
        autocompletion=completes("text", "json"),
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Send a trace of every request to this OpenTelemetry collector: the URL of OTLP over HTTP.",
        rich_help_panel=_OPERATIONS,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads on the CPU. Default: OMP_NUM_THREADS, or one per processor. A small model with many clients "
        "may do better with one fewer, which is left to the connections.",
        rich_help_panel="Machine",
    ),
]
