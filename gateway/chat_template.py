"""The model's chat template: messages in, one text out, with the spans that a user wrote marked as inert.

A user may write the spelling of a control token (`<|im_end|>`). Before rendering, a marker character that occurs
nowhere else is put inside each such spelling, so that after rendering those that the template wrote can be told from
those that a user wrote, whatever the template did to the text around them. `prompt.py` takes the marker out again.

Templates come with the model, never with a request. They run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson
from jinja2 import Template, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, InvalidRequest, shorten

_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
_PRIVATE_USE = range(0xE000, 0xF900)
_MAX_REASON_CHARS = 500
"""Of a template's own words, which may hold a message's."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`text` may hold `marker` (one character) inside spellings of control tokens that a user wrote; "" if none."""

    text: str
    marker: str


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja.
        template_tokens: variables such as `bos_token`.
        control_texts: how the model's control tokens are spelled.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, template_tokens: dict[str, str], control_texts: Iterable[str]) -> None:
        self._variables = template_tokens
        self._template = _compile(source)
        spellings = sorted(filter(None, control_texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def render(self, messages: Sequence[dict[str, str]]) -> RenderedChat:
        """The prompt's text, ready for the answer to begin.

        Raises:
            InvalidRequest: the template refuses the messages; its reason is the message.
        """
        marker = self._marker_for(messages)
        marked = [self._mark(message, marker) for message in messages] if marker else list(messages)
        try:
            text = self._template.render(
                messages=marked, add_generation_prompt=True, tools=None, documents=None, **self._variables
            )
        except _Refused as refusal:
            raise _refuse(str(refusal)) from None
        except _TEMPLATE_FAILURES as error:
            reason = str(error) or type(error).__name__
            raise _refuse(f"the model's chat template cannot render these messages: {reason}") from None
        return RenderedChat(text, marker)

    def _marker_for(self, messages: Sequence[dict[str, str]]) -> str:
        """A character that occurs in no message; "" when no message spells a control token."""
        values = [value for message in messages for value in message.values()]
        if self._control is None or not any(self._control.search(value) for value in values):
            return ""
        used = set().union(*values)
        return next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)

    def _mark(self, message: dict[str, str], marker: str) -> dict[str, str]:
        control = self._control
        assert control is not None
        return {name: control.sub(lambda m: m[0][:1] + marker + m[0][1:], text) for name, text in message.items()}


def _refuse(reason: str) -> InvalidRequest:
    text = f"messages: {shorten(reason, _MAX_REASON_CHARS)}"
    return InvalidRequest(text, param="messages", code="chat_template_error")


class _Refused(Exception):
    """`raise_exception` was called by the template."""


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Undefined, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the model's chat template does not compile: {error}") from None


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    option = orjson.OPT_INDENT_2 if indent else 0
    return orjson.dumps(value, option=option).decode()
