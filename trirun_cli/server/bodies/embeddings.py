"""The body of OpenAI's embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from .base import Body, at_least
from .openai import prompts
from .other_fields import Rule, check_other_fields

# As many texts as OpenAI takes.
MOST_INPUTS = 2048
OTHER_EMBEDDING_FIELDS: Mapping[str, Rule] = {
    "user": Rule(None, "names the caller's own user, for OpenAI's abuse reports"),
    "truncate_prompt_tokens": Rule((), "a text is used whole or refused"),
    "priority": Rule((0,), "requests run in the order in which they come"),
    "messages": Rule((), "put the text into input"),
    "embed_dtype": Rule(("float32",), "encoding_format is float or base64, of float32"),
    "endianness": Rule(("native", "little"), "base64 is of little-endian floats"),
}


def _inputs(value: Any) -> Any:
    found = prompts(value)
    if len(found) > MOST_INPUTS:
        raise ValueError(f"has {len(found)} texts, at most {MOST_INPUTS} are taken")
    return found


class EmbeddingsBody(Body):
    """The body of POST /v1/embeddings; ``pooling`` and ``normalize`` are beyond OpenAI's."""

    input: Annotated[Any, AfterValidator(_inputs)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, AfterValidator(at_least(1))] = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool = True
    add_special_tokens: bool = True

    def check_fields(self) -> None:
        """Refuse unsupported fields, and warn of unknown ones.

        Raises:
            ApiError: 400, naming the field.
        """
        check_other_fields(self.model_extra or {}, OTHER_EMBEDDING_FIELDS)
