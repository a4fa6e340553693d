"""trirun in a Python program: a model that generates text, many prompts at once, on the engine of ``trirun serve``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import cast

from .backends.registry import open_runner
from .console import Console
from .engine.constraint import Grammar
from .engine.engine import Engine
from .engine.generation import sampling_defaults, stop_ids
from .engine.request import Request
from .engine.sampling import SamplingParams
from .errors import InputError, UsageError
from .text.completion import Completion, Prompt, complete
from .text.detokenizer import Detokenizer, encode_chat, encode_prompt, quick_tokenizer
from .text.grammar import GrammarCompiler, compile_grammar
from .workflows.import_cache import as_model_dir

Message = dict[str, str]
_SEEDS = 2**64


class LLM:
    """A language model that is ready to generate.

    It runs on the same engine, backend and tokenizer as ``trirun generate`` and gives the same tokens. A packed
    checkpoint on a CPU needs neither torch nor transformers. One thread may use it at a time.

    Args:
        model: a packed checkpoint or an ordinary Hugging Face directory, or the hub's ORG/NAME[@REVISION].
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on the CPU, the checkpoint's own on a GPU.
        act_bits: 8 or 16 overrides the checkpoint's activation width.
        kv_cache_dtype: "auto", or "int8" on the native decoder of a GPU: half the memory per token.
        head: an output head that is not packed: "16bit", "int8", or "auto": int8 on a CPU alone.
        engine: "native", "transformers", or "auto": native where it runs the model.
        max_batch: prompts that run at once; more of them wait.
        ctx: most tokens of a prompt and its completion; None is the model's own, at most 8192 of the native decoder.
        threads: on the CPU; None takes OMP_NUM_THREADS, or one per processor that this process may use.

    Attributes:
        path: the model's directory. tokenizer: its tokenizer.
        name: what runs it, for people; why_slower: why no faster backend does, or empty.
        context: most tokens of a sequence. vocab_size: token ids are below it.
        default_params: what :meth:`generate` uses where it is given none: the model's generation_config.json where
            that samples, or else greedy; 128 tokens.

    Raises:
        InputError: the model cannot be loaded. MissingError: the device is not there.
        OutOfMemoryError: the cache does not fit. UsageError: an argument is out of range.

    Example:
        >>> from trirun_cli import LLM, SamplingParams
        >>> with LLM("model-2bit", device="cpu") as llm:
        ...     (completion,) = llm.generate("The sea was", SamplingParams(max_tokens=16))
        ...     print(completion.text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        act_bits: int | None = None,
        kv_cache_dtype: str = "auto",
        head: str = "auto",
        engine: str = "auto",
        max_batch: int = 16,
        ctx: int | None = None,
        threads: int | None = None,
    ) -> None:
        choices = (
            ("dtype", dtype, ("auto", "float32", "float16", "bfloat16")),
            ("act_bits", act_bits, (None, 8, 16)),
            ("kv_cache_dtype", kv_cache_dtype, ("auto", "int8")),
            ("head", head, ("auto", "16bit", "int8")),
            ("engine", engine, ("auto", "native", "transformers")),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        self.path = as_model_dir(Path(model), Console(quiet=True))
        self._stop_ids = frozenset(stop_ids(self.path))
        self.tokenizer = quick_tokenizer(self.path)
        self.default_params = SamplingParams(**sampling_defaults(self.path))
        runner = open_runner(
            self.path,
            device=device,
            dtype=dtype,
            act_bits=act_bits,
            kv_cache_dtype=kv_cache_dtype,
            head=head,
            engine=engine,
            slots=max_batch,
            context=ctx,
            threads=threads,
        )
        self._engine = Engine(runner)
        self.name, self.why_slower = runner.name, runner.why_slower
        self.context, self.vocab_size = runner.context, runner.vocab_size
        self._requests = 0
        self._compilers: dict[frozenset[int], GrammarCompiler] = {}

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: Grammar | None = None,
    ) -> list[Completion]:
        """Continue prompts, many at once.

        Args:
            prompts: a text, or a list of texts or of lists of token ids. No chat template is used; see :meth:`chat`.
            params: for all of them, or one each; None is ``default_params``. With one ``seed`` for all, prompt i is
                sampled with seed + i, as ``trirun generate --prompts-file`` does it.
            grammar: what each text must be, as ``Grammar.of_schema(...)`` or ``Grammar.of_choices([...])``.

        Returns:
            a completion per prompt, in their order.

        Raises:
            InputError: a prompt does not fit the model, before any is run; or the model's logits are not finite, or
                the grammar cannot be held.
            UsageError: there are not as many params as prompts.

        Example:
            >>> texts = ["Once upon a time", "The old clock"]
            >>> for completion in llm.generate(texts, SamplingParams(max_tokens=32, temperature=0.8, seed=1)):
            ...     print(completion.text, completion.finish_reason)
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        ids = [self._encode(prompt) for prompt in prompts]
        return self._complete(ids, params, self._stop_ids, grammar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: Grammar | None = None,
    ) -> list[Completion]:
        """Answer conversations through the model's chat template, many at once.

        Args:
            messages: one conversation or a list of them; each message has "role" (system, user or assistant) and
                "content". params, grammar: as of :meth:`generate`.

        Returns:
            an answer per conversation, in their order.

        Raises:
            InputError: as :meth:`generate`; or there is no chat template, or it refuses the messages.

        Example:
            >>> (answer,) = llm.chat([{"role": "user", "content": "What is a tide?"}])
            >>> print(answer.text)
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = cast(list[Sequence[Message]], [messages] if single else list(messages))
        ids = [encode_chat(self.tokenizer, conversation) for conversation in conversations]
        ends = self._stop_ids | ({self.tokenizer.eos_token_id} - {None})
        return self._complete(ids, params, ends, grammar)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the text that continues one prompt, whole characters only, as they become certain. Leaving the
        iteration ends the request.

        Args:
            prompt: a text, or token ids. params: None is ``default_params``.

        Raises:
            InputError: as :meth:`generate`.

        Example:
            >>> for piece in llm.stream("The sea was"):
            ...     print(piece, end="", flush=True)
        """
        params = params or self.default_params
        ids = self._encode(prompt)
        request = Request(self._next_id(), tuple(ids), params, self._stop_ids)
        self._engine.check(request)
        return self._pieces(request)

    def close(self) -> None:
        """Free the model's memory; it takes no more prompts."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return encode_prompt(self.tokenizer, prompt, chat=False)
        ids = list(prompt)
        if all(isinstance(id, int) for id in ids):
            return ids
        raise UsageError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")

    def _complete(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        ends: frozenset[int],
        grammar: Grammar | None,
    ) -> list[Completion]:
        params = params or self.default_params
        if isinstance(params, SamplingParams):
            first, seed = params, params.seed
            each = [first if seed is None else replace(first, seed=(seed + i) % _SEEDS) for i in range(len(prompts))]
        elif len(params) == len(prompts):
            each = list(params)
        else:
            raise UsageError(f"{len(params)} params for {len(prompts)} prompts")
        constraint = compile_grammar(grammar, self.tokenizer, self.vocab_size, ends, self._compilers)
        waiting = [Prompt(self._next_id(), ids, wanted, constraint) for ids, wanted in zip(prompts, each, strict=True)]
        for prompt in waiting:
            self._engine.check(Request(prompt.id, tuple(prompt.ids), prompt.params))
        done = {found.id: found for found in complete(self._engine, self.tokenizer, waiting, ends)}
        return [done[prompt.id] for prompt in waiting]

    def _pieces(self, request: Request) -> Iterator[str]:
        params = request.params
        detokenizer = Detokenizer(self.tokenizer, request.prompt, params.stop, min_tokens=params.min_tokens)
        with closing(self._engine.generate([request])) as events:
            for event in events:
                if event.error is not None:
                    raise InputError(event.error)
                ids = [token.id for token in event.tokens]
                if piece := detokenizer.take(ids, last=event.finish is not None).text:
                    yield piece
                if detokenizer.stopped:
                    return

    def _next_id(self) -> str:
        self._requests += 1
        return str(self._requests)
