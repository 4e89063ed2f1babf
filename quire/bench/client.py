"""Sends one streaming request to an OpenAI-style server and notes when its tokens arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from quire.bench.statistics import Trace
from quire.bench.workloads import BenchRequest


class BenchClient:
    """One server and the model asked for; `session` is the caller's, with an address base and headers set."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    async def stream(self, request: BenchRequest, on_arrival: Callable[[Trace], None] | None = None) -> Trace:
        """Send `request`, read its stream to the end. What goes wrong is told in the trace's `error`.

        Args:
            on_arrival: called after each arrival of text or token ids.
        """
        path, body = self._to_http(request)
        trace = Trace(sent_at=time.monotonic())
        try:
            async with self._session.post(path, json=body) as response:
                if response.status != 200:
                    trace.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return trace
                async for line in response.content:
                    if line.startswith(b"data:"):
                        _take_event(trace, line[5:].strip(), on_arrival)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.error = trace.error or _check_lengths(request, trace)
        return trace

    def _to_http(self, request: BenchRequest) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.has_fixed_length:
            body["ignore_eos"] = True
        if request.messages is not None:
            return "/v1/chat/completions", body | {"messages": list(request.messages)}
        return "/v1/completions", body | {"prompt": request.prompt}


async def first_model(session: aiohttp.ClientSession) -> str:
    """The id of the first model that the server lists."""
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def _take_event(trace: Trace, data: bytes, on_arrival: Callable[[Trace], None] | None) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        trace.error = str(event["error"].get("message", event["error"]))[:200]
        return
    if any(map(_brings_tokens, event.get("choices") or ())):
        trace.arrivals.append(time.monotonic())
        if on_arrival is not None:
            on_arrival(trace)
    if event.get("usage"):
        trace.num_prompt_tokens = event["usage"]["prompt_tokens"]
        trace.num_output_tokens = event["usage"]["completion_tokens"]


def _brings_tokens(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or choice.get("token_ids") or delta.get("content"))


def _check_lengths(request: BenchRequest, trace: Trace) -> str:
    """What is wrong with the lengths that the server reports, empty if nothing is."""
    if not trace.num_output_tokens:
        return "no usage was sent, or no token"
    if request.has_fixed_length and trace.num_output_tokens != request.max_tokens:
        return f"{trace.num_output_tokens} tokens came, {request.max_tokens} were asked for"
    if isinstance(request.prompt, tuple) and trace.num_prompt_tokens != len(request.prompt):
        return f"the server counts {trace.num_prompt_tokens} prompt tokens, {len(request.prompt)} were sent"
    return ""
