"""A client that writes down everything a stream shows: events, ids, text, finishes, usage and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson


@dataclass(slots=True)
class StreamRecord:
    """What one client saw. `ending`: "done", "error", "cut" (closed without a terminal event) or "left" (by us).

    `texts` and `finishes` are keyed by choice index.
    """

    status: int = 0
    request_id: str = ""
    event_ids: list[tuple[int, int]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    num_events: int = 0
    ending: str = "cut"

    @property
    def last_event_id(self) -> str:
        """For `Last-Event-ID`; empty when nothing came."""
        return "{}.{}".format(*self.event_ids[-1]) if self.event_ids else ""

    def outcome(self) -> dict[str, Any]:
        """What must equal the undisturbed run; what was found in a cache may differ."""
        usage = {name: count for name, count in (self.usage or {}).items() if name != "prompt_tokens_details"}
        return {"texts": self.texts, "finishes": self.finishes, "usage": usage, "ending": self.ending}


async def follow_all(url: str, bodies: dict[str, dict[str, Any]], *, timeout_s: float = 90) -> dict[str, StreamRecord]:
    """All of `bodies` at once as completions; their records by name."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), connector=connector) as session:
        streams = [follow(session, url + "/v1/completions", body) for body in bodies.values()]
        return dict(zip(bodies, await asyncio.gather(*streams), strict=True))


async def follow(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any] | None,
    *,
    record: StreamRecord | None = None,
    leave_after: int | None = None,
    headers: dict[str, str] | None = None,
) -> StreamRecord:
    """POST `body` (or GET when None) and record the stream until it ends; goes on in `record` when one is given."""
    record = record or StreamRecord()
    record.ending = "cut"
    method = "GET" if body is None else "POST"
    try:
        async with session.request(method, url, json=body, headers=headers) as response:
            record.status = response.status
            record.request_id = response.headers.get("x-request-id", record.request_id)
            if response.status != 200:
                record.error = (await response.json())["error"]
                record.ending = "error"
                return record
            await _read_events(response, record, leave_after)
    except (aiohttp.ClientError, asyncio.IncompleteReadError, ConnectionError):
        pass
    return record


async def _read_events(response: aiohttp.ClientResponse, record: StreamRecord, leave_after: int | None) -> None:
    event_id = ""
    async for line in response.content:
        if line.startswith(b"id:"):
            event_id = line[3:].strip().decode()
        elif line.startswith(b"data:"):
            _note_event(record, event_id, line[5:].strip())
            event_id = ""
            if record.ending in ("done", "error"):
                return
            if leave_after is not None and record.num_events >= leave_after:
                record.ending = "left"
                return


def _note_event(record: StreamRecord, event_id: str, data: bytes) -> None:
    record.num_events += 1
    if event_id:
        entries, _, event = event_id.partition(".")
        record.event_ids.append((int(entries), int(event)))
    if data == b"[DONE]":
        record.ending = "done"
        return
    chunk = orjson.loads(data)
    if "error" in chunk:
        record.error, record.ending = chunk["error"], "error"
        return
    record.usage = chunk.get("usage") or record.usage
    for choice in chunk["choices"]:
        index = choice["index"]
        delta = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        record.texts[index] = record.texts.get(index, "") + delta
        if choice["finish_reason"] is not None:
            record.finishes.setdefault(index, []).append(choice["finish_reason"])
