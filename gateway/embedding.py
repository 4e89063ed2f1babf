"""POST /v1/embeddings: from its bytes to a request that can be stored, and from its events to the answer.

An embedding goes the way of every other request, so it is queued, moved and taken up again like one. It is a prompt
that draws no token: its log holds one entry, its end, with the vector in it.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.directory import ModelDirectory
from gateway.fold import EmbeddingEvent, Event, Usage
from gateway.intake import SHORT_BODY_BYTES, Intake, check_fits, hash_body
from gateway.openai import EmbeddingBody, parse_body, parse_json
from gateway.prompt import context_error, read_prompts
from gateway.served_model import ServedModel
from gateway.text_pool import TextPool
from shared.clock import unix_now
from shared.ids import RequestId, new_request_id
from shared.messages import RequestBody, SamplingParams, WorkerHello

KIND = "embedding"
_NO_TOKENS = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
"""A place for one token is reserved behind each prompt, as for any other, and stays empty."""


@dataclass(frozen=True, slots=True)
class _Read:
    request: EmbeddingBody
    served: ServedModel
    ignored: list[str]
    prompts: tuple[tuple[int, ...], ...]
    body_hash: str


class EmbeddingDesk:
    """Makes an `Intake` of each POST.

    Args:
        directory: the models that may be asked for.
    """

    def __init__(self, directory: ModelDirectory, pool: TextPool) -> None:
        self._directory = directory
        self._pool = pool

    async def take(self, data: bytes) -> tuple[Intake, WorkerHello]:
        """The request in `data`, and the worker it was checked against.

        Raises:
            InvalidRequest, NotFound: the request is wrong.
            Overloaded: no worker lives.
        """
        is_short = len(data) <= SHORT_BODY_BYTES
        read = self._read(data) if is_short else await self._pool.run(lambda: self._read(data))
        longest = max(map(len, read.prompts))
        _check_length(longest, read.served.text.max_model_len)
        worker = self._directory.require_worker(read.served)
        _check_length(longest, worker.max_model_len)
        check_fits(worker, longest + 1, "input")
        return _build(read), worker

    def _read(self, data: bytes) -> _Read:
        raw = parse_json(data)
        request, ignored = parse_body(raw, EmbeddingBody)
        served = self._directory.find(request.model)
        encoder = served.text.encoder
        prompts = tuple(encoder.encode(prompt, "input") for prompt in read_prompts(request.input, "input"))
        return _Read(request, served, ignored, prompts, hash_body(KIND, raw))


def embedding_answer(request_id: RequestId, body: RequestBody, events: Iterable[Event], usage: Usage) -> bytes:
    """The JSON answer in OpenAI's shape."""
    vectors = {event.choice: event.vector for event in events if isinstance(event, EmbeddingEvent)}
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vectors[index], body.encoding_format)}
        for index in sorted(vectors)
    ]
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    head = {"id": request_id, "object": "list", "created": body.created, "model": body.model}
    return orjson.dumps(head | {"data": data, "usage": tokens})


def _check_length(longest: int, max_model_len: int) -> None:
    if longest >= max_model_len:
        shown = None if longest > max_model_len else 1
        raise context_error(str(longest), shown, max_model_len, "input")


def _build(read: _Read) -> Intake:
    request = read.request
    body = RequestBody(
        kind=KIND,
        model=read.served.name,
        created=unix_now(),
        prompts=read.prompts,
        n=1,
        sampling=_NO_TOKENS,
        cache_salt=request.cache_salt or "",
        card=read.served.text.card_id,
        encoding_format=request.encoding_format or "float",
    )
    return Intake(
        request_id=new_request_id(KIND),
        served=read.served,
        body=body,
        body_hash=read.body_hash,
        ignored=read.ignored,
        priority=request.priority or 0,
        user=request.user or "",
    )


def _encode(vector: bytes, encoding_format: str) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return array("f", vector).tolist()
