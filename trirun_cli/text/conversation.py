"""A conversation with a model: its history, what of it fits the context, and the next answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ..engine.engine import Engine
from ..engine.sampling import SamplingParams
from ..errors import InputError
from .completion import Completion, Prompt, complete
from .detokenizer import render_chat, token_ids

# What begins a turn where there is no chat template, and therefore ends an answer.
USER, ASSISTANT = "User:", "Assistant:"


class Conversation:
    """Messages so far, and a model that continues them.

    The oldest turns are left out once the history and a quarter of the context for the answer no longer fit; the system
    message stays. A turn begins with the very tokens of the one before wherever they say the same, and these are in the
    engine's cache already.

    Args:
        engine: not started. stop_ids: token ids that end an answer.
        system: the system message. plain: write a transcript of "User:" and "Assistant:" instead of using the model's
            chat template, for models that have none.

    Attributes:
        messages: of "role" and "content", the system message not among them.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        params: SamplingParams,
        stop_ids: Collection[int],
        *,
        system: str | None = None,
        plain: bool = False,
    ) -> None:
        self._engine, self._tokenizer, self._stop_ids, self._plain = engine, tokenizer, stop_ids, plain
        self._params = replace(params, stop=(*params.stop, f"\n{USER}")) if plain else params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._answers = 0
        # The conversation up to the last answer's end, as text and as the tokens that were read and written.
        self._text = ""
        self._ids: list[int] = []

    def reset(self) -> None:
        """Forget every message but the system's."""
        self.messages.clear()

    def answer(
        self, text: str, on_text: Callable[[str], None], interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[Completion, int]:
        """The answer to a message of the user. Both become part of the history, an answer cut short as far as it came.

        Args:
            on_text: gets the answer piece by piece. interrupted: asked after every token; True ends the answer.

        Returns:
            the answer, and how many messages had to be left out.

        Raises:
            InputError: the message alone is too long, the template refuses it, or the model's logits are not finite;
                the history is as before.
        """
        turns = [*self.messages, {"role": "user", "content": text}]
        room = self._engine.context - min(self._params.max_tokens, self._engine.context // 4)
        read = self._render(turns)
        ids = self._encode(read)
        while len(ids) > room and len(turns) > 2:
            turns = turns[2:]
            read = self._render(turns)
            ids = self._encode(read)
        if len(ids) >= self._engine.context:
            raise InputError(f"the message makes {len(ids)} tokens, the context is {self._engine.context} (--ctx)")
        # A seed gives the same conversation again, not the same random numbers for every answer.
        seed = None if self._params.seed is None else (self._params.seed + self._answers) % 2**64
        prompt = Prompt(f"answer {self._answers}", ids, replace(self._params, seed=seed))
        (done,) = complete(
            self._engine,
            self._tokenizer,
            [prompt],
            self._stop_ids,
            on_text=lambda _, piece: on_text(piece),
            interrupted=interrupted,
        )
        left_out = len(self.messages) + 1 - len(turns)
        self._answers += 1
        self.messages = [*turns, {"role": "assistant", "content": done.text}]
        self._text, self._ids = read + done.text, [*ids, *done.token_ids]
        return done, left_out

    def _render(self, turns: list[dict[str, str]]) -> str:
        if not self._plain:
            first = [{"role": "system", "content": self.system}] if self.system else []
            return render_chat(self._tokenizer, first + turns)
        # An answer brings the space after "Assistant:" itself.
        named = {"user": f"{USER} ", "assistant": ASSISTANT}
        lines = [f"{named[turn['role']]}{turn['content']}\n" for turn in turns]
        head = f"{self.system}\n\n" if self.system else ""
        return head + "".join(lines) + ASSISTANT

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._tokenizer
        ids = token_ids(tokenizer, text, special=self._plain)
        if self._text and text.startswith(self._text):
            # A text has more than one tokenization, and the model need not have written the tokenizer's.
            rest = token_ids(tokenizer, text[len(self._text) :], special=False)
            joined = [*self._ids, *rest]
            if tokenizer.decode(joined) == tokenizer.decode(ids):
                return joined
        return ids
