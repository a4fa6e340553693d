"""Chat templates without transformers: jinja2, in the surroundings that Hugging Face's templates are written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

# Before it, the sandbox had holes, and templates are programs of whoever made the model.
_JINJA = (3, 1, 6)


class LightTemplate:
    """A template ready to be filled in with messages of a role and text.

    Args:
        source: Jinja. special: names and texts of the tokenizer's special tokens, which it may ask for.

    Raises:
        ImportError: there is no jinja2, or one too old. jinja2.TemplateSyntaxError: it is not Jinja, or has
            statements of transformers' own.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from importlib.metadata import version

        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if tuple(int(part) for part in version("jinja2").split(".")[:3] if part.isdecimal()) < _JINJA:
            raise ImportError(f"jinja2 {version('jinja2')}")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _namespace(),
            # Not the type itself, which leads to others.
            "dict": lambda *entries, **named: dict(*entries, **named),
        }
        self._template = environment.from_string(source)
        self._special = dict(special)

    def __call__(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation; ``add_generation_prompt``: up to where the model's answer begins.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
        """
        return self._template.render(
            self._special,
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


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
