"""The model's chat template: messages in, one text out, with the spans that a user wrote marked as inert.

A user may write the spelling of a control token (`<|im_end|>`). Before rendering, a marker character that occurs
nowhere else is put inside each such spelling, so that after rendering those that the template wrote can be told from
those that a user wrote, whatever the template did to the text around them. `prompt.py` takes the marker out again.

Templates come with the model, never with a request. They run in Jinja's immutable sandbox, in a process of their own
with a bound on time and memory (`template_process.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from gateway.template_child import make_environment
from gateway.template_process import TemplateProcess
from shared.errors import ConfigError, InvalidRequest, shorten

_PRIVATE_USE = range(0xE000, 0xF900)
_MAX_REASON_CHARS = 500
"""Of a template's own words, which may hold a message's."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`text` may hold `marker` (one character) inside spellings of control tokens that a user wrote; "" if none."""

    text: str
    marker: str


class ChatTemplate:
    """One template.

    Args:
        source: Jinja.
        template_tokens: variables such as `bos_token`.
        control_texts: how the model's control tokens are spelled.

    Raises:
        ConfigError: the template has a wrong syntax.
    """

    def __init__(self, source: str, template_tokens: dict[str, str], control_texts: Iterable[str]) -> None:
        _check_syntax(source)
        self._process = TemplateProcess(source, template_tokens)
        spellings = sorted(filter(None, control_texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def render(self, messages: Sequence[dict[str, str]]) -> RenderedChat:
        """The prompt's text, ready for the answer to begin.

        Raises:
            InvalidRequest: the template refuses the messages; its reason is the message.
        """
        marker = self._marker_for(messages)
        marked = [self._mark(message, marker) for message in messages] if marker else list(messages)
        answer = self._process.render(marked)
        if "refused" in answer:
            raise _refuse(answer["refused"])
        if "failed" in answer:
            raise _refuse(f"the model's chat template cannot render these messages: {answer['failed']}")
        return RenderedChat(answer["text"], marker)

    def close(self) -> None:
        """End the template's process."""
        self._process.close()

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


def _check_syntax(source: str) -> None:
    """Parsed only: compiling would compute what is constant in it."""
    try:
        make_environment().parse(source)
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"the model's chat template has a wrong syntax: {error}") from None
