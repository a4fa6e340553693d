"""trirun as a model of lm-eval: ``lm_eval.simple_evaluate("trirun", model_args={"pretrained": DIR})``.

Importing this module registers the name; lm-eval has no entry points to do it by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..backends.device import pick_device
from ..backends.registry import open_runner
from ..engine.engine import Engine
from ..engine.likelihoods import Likelihood, ResultCache, Scorer
from ..engine.request import Request
from ..engine.sampling import SamplingParams
from ..engine.scoring import ScoringModel
from ..errors import InputError
from ..text.detokenizer import load_tokenizer

# Shows progress: called with what is done and how many there are; the block gets a function that takes further shares.
Watch = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]
# Strings given to the tokenizer at once.
TOKENIZE = 4096


@register_model("trirun")
class TrirunLM(TemplateLM):
    """Any model directory that trirun runs, as a model of lm-eval.

    Prompts are tokenized as lm-eval's ``hf`` model does it: with the special tokens that the tokenizer adds, unless the
    prompt begins with BOS; an empty context becomes BOS, or EOS where there is no BOS.

    Args:
        pretrained: a model directory, or an open model.
        tokenizer: its tokenizer; None loads the directory's.
        device, dtype, act_bits: as :func:`trirun_cli.backends.registry.open_runner`.
        batch_size: sequences of a batch, or "auto".
        max_batch_size: ignored; lm-eval passes it.
        stop_ids: token ids that end a generated text, besides the tokenizer's EOS. seed: of sampled texts.
        cache: of finished requests. watch: shows progress.

    Raises:
        InputError: the directory is not a model, or the tokenizer has neither BOS nor EOS.
    """

    def __init__(
        self,
        pretrained: str | ScoringModel,
        tokenizer: Any = None,
        *,
        device: str | None = None,
        dtype: str = "auto",
        act_bits: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        stop_ids: Collection[int] = (),
        seed: int = 1234,
        cache: ResultCache | None = None,
        watch: Watch = lambda what, count: nullcontext(lambda share: None),
    ) -> None:
        super().__init__()
        target = pick_device(device or "auto")
        if isinstance(pretrained, str):
            tokenizer = tokenizer or load_tokenizer(pretrained)
            options: dict[str, Any] = {"device": target, "dtype": dtype, "act_bits": act_bits}
            pretrained = ScoringModel(open_runner(pretrained, scoring=True, **options))
        self._device = torch.device(target)
        self.model, self.tokenizer = pretrained, tokenizer
        size = None if batch_size in (None, "auto") else int(batch_size)
        self.scorer = Scorer(pretrained, target, batch_size=size, cache=cache)
        self._stop_ids = frozenset({*stop_ids, self.eot_token_id} - {None})
        self._seed, self._cache, self._watch = seed, cache, watch
        if self.prefix_token_id is None:
            raise InputError("the tokenizer has neither a BOS nor an EOS token, one of which must begin a bare text")

    @property
    def eot_token_id(self) -> int:
        """The EOS token, which ends a generated text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """BOS, or EOS without BOS: the context of a text that has none."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its continuation."""
        return self.model.max_positions

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's cache of prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text of a prompt."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of one string; None adds special tokens unless it begins with BOS."""
        return self._encode([string], add_special_tokens)[string]

    def _encode(self, strings: Sequence[str], special: bool | None = None) -> dict[str, list[int]]:
        """Token ids of each distinct string; the tokenizer encodes many at a time on all processors."""
        bos = self.tokenizer.decode(self.prefix_token_id)
        encoded: dict[str, list[int]] = {}
        kinds: dict[bool, list[str]] = {}
        for string in dict.fromkeys(strings):
            add = special if special is not None else not has_bos_prefix(string, bos)
            kinds.setdefault(add, []).append(string)
        for add, group in kinds.items():
            for start in range(0, len(group), TOKENIZE):
                part = group[start : start + TOKENIZE]
                ids = self.tokenizer(part, add_special_tokens=add, verbose=False)["input_ids"]
                encoded.update(zip(part, ids, strict=True))
        return encoded

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Likelihood]:
        """For each (context, answer): the log-likelihood in nats, and whether the answer is the greedy one."""
        pairs = [_moved_spaces(*request.args) for request in requests]
        bare = self._encode([answer for context, answer in pairs if not context], special=False)
        whole = self._encode([text for context, answer in pairs if context for text in (context, context + answer)])
        split = []
        for context, answer in pairs:
            if context:
                head = whole[context]
                tail = whole[context + answer][len(head) :]
                if not tail:
                    raise InputError(f"the answer {answer!r} leaves no token of its own after ...{context[-40:]!r}")
                split.append((head, tail))
            else:
                ids = bare[answer]
                begun = ids[:1] == [self.prefix_token_id]
                split.append((ids[:1], ids[1:]) if begun else ([self.prefix_token_id], ids))
        with self._watch("likelihoods", len(requests)) as advance:
            return self.scorer.score(split, advance)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[Likelihood]:
        return self.scorer.score([(context, answer) for _, context, answer in requests], lambda share: None)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text in nats, over windows of the context's length."""
        texts = [request.args[0] for request in requests]
        encoded = self._encode(texts)
        windows, owners = [], []
        for owner, text in enumerate(texts):
            for pair in get_rolling_token_windows(encoded[text], self.prefix_token_id, self.max_length, 1):
                windows.append(make_disjoint_window(pair))
                owners.append(owner)
        with self._watch("windows", len(windows)) as advance:
            scores = self.scorer.score(windows, advance)
        totals = [0.0] * len(texts)
        for owner, (likelihood, _) in zip(owners, scores, strict=True):
            totals[owner] += likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A generated text for each (prompt, options), cut before the first of its stop strings."""
        prompts = self._encode([request.args[0] for request in requests])
        texts = []
        with self._watch("texts", len(requests)) as advance:
            for number, request in enumerate(requests):
                texts.append(self._generate(prompts[request.args[0]], request.args[1], number))
                advance(1 / len(requests))
        return texts

    def _generate(self, prompt: list[int], settings: dict[str, Any], number: int) -> str:
        options = normalize_gen_kwargs(settings, 256)
        most = int(options["max_gen_toks"])
        room = self.max_length - most
        if room < 1:
            context = f"a context of {self.max_length} (--ctx)"
            raise InputError(f"generating {most} tokens leaves no room for a prompt in {context}")
        self.scorer.truncated += len(prompt) > room
        prompt = prompt[-room:] or [self.prefix_token_id]
        stops = [stop for stop in options.get("until", []) if stop]
        sampled = bool(options.get("do_sample"))
        params = SamplingParams(
            max_tokens=most,
            temperature=float(options.get("temperature") or 1.0) if sampled else 0.0,
            top_p=float(options.get("top_p") or 1.0) if sampled else 1.0,
            top_k=int(options.get("top_k") or 0) if sampled else 0,
            # By the request's number, so that repetitions differ and results from the cache change no later seed.
            seed=self._seed + number,
        )
        key = (prompt, [ord(letter) for letter in repr((most, stops, params))])
        found = self._cache.get("generate", *key) if self._cache else None
        if found is None:
            found = self._write(prompt, params, stops)
            if self._cache:
                self._cache.put("generate", *key, value=found)
        return found

    @cached_property
    def _engine(self) -> Engine:
        # Of the same runner. Its slots are shared: the scored sequence gives its own back.
        self.model.reset()
        return Engine(self.model.runner)

    def _write(self, prompt: list[int], params: SamplingParams, stops: list[str]) -> str:
        ids: list[int] = []
        # A stop string has at most a token per byte, and its first token may begin before it.
        tail = max((len(stop.encode()) for stop in stops), default=0) + 1
        request = Request("text", tuple(prompt), params, self._stop_ids)
        started = time.perf_counter()
        with closing(self._engine.generate([request])) as events:
            for event in events:
                if event.error is not None:
                    raise InputError(event.error)
                for token in event.tokens:
                    ids.append(token.id)
                    recent = self.tokenizer.decode(ids[-tail:])
                    if any(stop in recent for stop in stops):
                        break
                else:
                    continue
                # Closing the iteration aborts the request.
                break
        self.scorer.model_s += time.perf_counter() - started
        self.scorer.tokens += len(prompt) + len(ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _moved_spaces(context: str, answer: str) -> tuple[str, str]:
    """Move spaces from the end of a context to the answer, where tokenizers expect them."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + answer
