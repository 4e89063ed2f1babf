"""The process that renders one chat template: a program of its own, which `template_process.py` starts and speaks to.

A template is code from a model folder. The sandbox keeps it from reaching out; that it ends, and how much memory it
takes, no sandbox of Python's can bound. So it runs here, with a limit on this process' memory and one on the time of
each rendering, and at worst this process dies.

Frames of both directions are a length, 4 bytes little-endian, and JSON. In: first {"source", "variables", "max_cpu_s"},
then {"messages"} each. Out: for each but the first {"text"}, {"refused": reason}, {"failed": reason}.
"""

from __future__ import annotations

import datetime
import math
import resource
import sys
import time
from typing import Any, BinaryIO, NoReturn

import orjson
from jinja2 import Template, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 512 << 20
MAX_TEXT_CHARS = 8 << 20
"""Of a rendered text: twice what the gateway tokenizes at most."""
_MAX_REASON_CHARS = 1000
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


class Refused(Exception):
    """`raise_exception` was called by the template."""


def make_environment() -> ImmutableSandboxedEnvironment:
    """With what templates of models expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Undefined, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    option = orjson.OPT_INDENT_2 if indent else 0
    return orjson.dumps(value, option=option).decode()


def render(template: Template, variables: dict[str, str], messages: list[dict[str, str]]) -> dict[str, str]:
    """What is answered for `messages`."""
    try:
        text = template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **variables)
        if len(text) > MAX_TEXT_CHARS:
            return {"failed": f"its text has {len(text)} characters, more than {MAX_TEXT_CHARS}"}
    except Refused as refusal:
        return {"refused": str(refusal)[:_MAX_REASON_CHARS]}
    except _FAILURES as error:
        return {"failed": (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]}
    return {"text": text}


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = source.read(4)
    return source.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def frame(value: Any) -> bytes:
    """`value` as a frame."""
    body = orjson.dumps(value)
    return len(body).to_bytes(4, "little") + body


def main() -> None:
    """Render until the other side closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    setting = orjson.loads(first)
    template: Template | None = None
    while (data := read_frame(source)) is not None:
        # seconds of computing, not of a clock: a machine may be busy; the kernel ends this process by SIGXCPU
        most = math.ceil(time.process_time()) + setting["max_cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        try:
            template = template or make_environment().from_string(setting["source"])
            answer = render(template, setting["variables"], orjson.loads(data)["messages"])
        except _FAILURES as error:
            answer = {"failed": (str(error) or type(error).__name__)[:_MAX_REASON_CHARS]}
        # a template can make lone surrogates, which no JSON holds
        sink.write(frame({key: value.encode(errors="replace").decode() for key, value in answer.items()}))
        sink.flush()


if __name__ == "__main__":
    main()
