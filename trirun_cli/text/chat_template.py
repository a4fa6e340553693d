"""Chat templates without transformers: jinja2, in the surroundings that Hugging Face's templates are written for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError

# Before it, the sandbox had holes, and templates are programs of whoever made the model.
_JINJA = (3, 1, 6)
# The most that a template may make of one text or number, in characters or bits, by multiplying or as a power.
_MOST_PRODUCT = 50_000_000
_DEADLINE = "deadline_"


class TemplateTimeout(Exception):
    """A template took too long."""


class LightTemplate:
    """A template ready to be filled in with messages, tools and documents.

    Args:
        source: Jinja. special: names and texts of the tokenizer's special tokens, which it may ask for.

    Raises:
        ImportError: there is no jinja2, or one too old. jinja2.TemplateSyntaxError: it is not Jinja.

    It gives the text that transformers gives, whose compilation and rendering (``chat_template_utils``) it mirrors.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols

        environment = _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _namespace(),
            _TICK: lambda: "",
            # Not the type itself, which leads to others.
            "dict": lambda *entries, **named: dict(*entries, **named),
        }
        # Makes texts of any length, for no template of a conversation.
        del environment.globals["lipsum"]
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise TemplateSyntaxError("nested too deeply", 1) from None
        self._special = dict(special)

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        seconds: float | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: of "role", "content" (text) and whatever else the template asks for, in values of JSON.
            tools: JSON schemas of functions. documents: of "title" and "text".
            add_generation_prompt: up to where the model's answer begins. continue_final_message: up to the end of the
                last message's content, for the model to go on with it.
            seconds: of processor time that it may take; None is any.
            variables: others that the template may ask for; they come before special tokens of the same name.

        Raises:
            TemplateTimeout: it takes longer than ``seconds``. jinja2.TemplateError: the template refuses the messages,
                or multiplies to something huge. ValueError: there is no last message to continue,
                or the template leaves it out.
        """
        filled = [_filled(message) for message in messages]
        if continue_final_message:
            filled = _marked(filled)
        text = self._template.render(
            self._special
            | variables
            | {_DEADLINE: None if seconds is None else (time.thread_time() + seconds, seconds)},
            messages=filled,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
        )
        return _up_to_mark(text, messages[-1]["content"]) if continue_final_message else text


def check_chat_template(tokenizer: Any, file: Path) -> None:
    """Try a tokenizer's chat template, if it has one, with a message of a user.

    Args:
        file: that the template is in, for the message.

    Raises:
        InputError: it is no Jinja, or fails. One that refuses the message in its own words works: it may want others.
    """
    if not tokenizer.chat_template:
        return
    from jinja2 import TemplateError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False)
    # A template is a program: it may fail with any of Python's errors.
    except Exception as error:
        # What raise_exception() raises, and none of the kinds that jinja2 derives from it.
        if type(error) is TemplateError:
            return
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" in line {line}"
        reason = f"{type(error).__name__}{where}: {' '.join(str(error).split())[:300]}"
        fix = "mend it, or serve the model with another: --chat-template FILE"
        raise InputError(f"{file}: the chat template is broken: {reason}", fix) from error


# What stands for the end of the last message, and is cut off with all that follows it.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Names of a message's reasoning, the one that templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: without fields that are None, which many would write as "None", and with its
    reasoning by every name that they ask for."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise ValueError("continue_final_message needs a last message with text")
    return [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + _MARK}]


def _up_to_mark(text: str, last: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0 or last.strip() not in text:
        raise ValueError("continue_final_message: the template leaves out, or changes, the last message")
    # A template that trims its messages has trimmed the mark instead of the text before it.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


# The name of the call that is put into every loop.
_TICK = "tick_"


@cache
def _sandbox() -> Callable[..., Any]:
    """A sandbox that looks at the time: at every call, and every loop has one. Jinja's own stops a template from
    reaching into Python, not from running for ever.

    Raises:
        ImportError: there is no jinja2, or one too old.
    """
    from importlib.metadata import version

    if tuple(int(part) for part in version("jinja2").split(".")[:3] if part.isdecimal()) < _JINJA:
        raise ImportError(f"jinja2 {version('jinja2')}")
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Limited(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def _generate(self, source: Any, *args: Any, **kwargs: Any) -> Any:
            for loop in source.find_all(nodes.For):
                tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(tick).set_lineno(loop.lineno))
            return super()._generate(source, *args, **kwargs)

        # The names are jinja2's: a template may name its own arguments as it likes.
        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            limit = __context.get(_DEADLINE)
            if limit is not None and time.thread_time() > limit[0]:
                raise TemplateTimeout(f"takes more than {limit[1]:g} s")
            return super().call(__context, __obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _made(operator, left, right) > _MOST_PRODUCT:
                raise SecurityError(f"{operator} makes something huge")
            return super().call_binop(context, operator, left, right)

    return Limited


def _made(operator: str, left: Any, right: Any) -> int:
    """Characters or items of a repeated text or list, bits of a product or power of whole numbers; otherwise 0."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(repeated, "__len__"):
            return len(repeated) * times
    return 0


@cache
def _generation_tag() -> Any:
    """transformers' own statement, ``{% generation %} ... {% endgeneration %}``: it marks what a model has written, for
    training, and changes nothing of the text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an attribute of instances)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A scope of its own, as the caller block of transformers' statement has.
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            return caller()

    return Generation


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@cache
def _namespace() -> Callable[..., Any]:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Plain(Namespace):
        """A namespace of values alone: names with an underscore could reach into Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            # The signature leaves every name to the template, "self" too.
            self, *rest = args
            Namespace.__init__(self)
            for name, value in dict(*rest, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a chat template must not set {name}")
            super().__setitem__(name, value)

    return Plain
