"""The short way of a token writes what the long way writes, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.detokenize import TokenText
from gateway.fold import ResponseFold
from gateway.histogram import TokenHistogram
from gateway.live import LiveStream
from gateway.metrics import GatewayMetrics
from gateway.model_folder import load_model_folder
from gateway.relay import Listener, Relay
from gateway.sse import Renderer
from gateway.watch import ResponseWatch
from shared.ids import GatewayId, RequestId
from shared.log import FinishEntry, LogEntry, Logprobs, TokenEntry, decode_entries, encode_entry
from shared.memory_bus import MemoryBus
from shared.messages import RequestBody, SamplingParams, TokenChunk
from tests.gateway.tiny_model import END, make_tokenizer

TINY = make_tokenizer()
END_ID = TINY.token_to_id(END)
VOCAB = TINY.get_vocab_size(with_added_tokens=True)
REQUEST = RequestId("cmpl-1")
KINDS = {
    "plain": {},
    "chat of two": {"kind": "chat", "n": 2, "include_usage": True},
    "stop strings": {"stop": ("the", "o w")},
    "logprobs": {"num_logprobs": 1},
}


class Recorder(asyncio.Transport):
    """A connection that keeps what is written; `num_unsent` bytes wait in it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.num_unsent = 0
        self.is_shut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_shut

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


class Response:
    """One response of which each log entry is offered to the short way and, if that refuses, goes the long one."""

    def __init__(self, token_text: TokenText, body: RequestBody) -> None:
        self.transport = Recorder()
        self.fold = ResponseFold(body, token_text)
        self.renderer = Renderer(REQUEST, body, token_text)
        watch = ResponseWatch(GatewayMetrics("tiny"), REQUEST, is_counted=True, started=0.0)
        self.live = LiveStream(self.transport, self.fold, self.renderer, watch)
        self.num_live = 0

    def take(self, data: bytes) -> None:
        if self.live(data):
            self.num_live += 1
            return
        frames = self.renderer.frames(self.fold.feed(decode_entries(data)))
        if frames:
            self.transport.written += b"%x\r\n%b\r\n" % (len(frames), frames)

    def body(self) -> bytes:
        """What was written, without the chunks' sizes."""
        left, found = self.transport.written, b""
        while left:
            size, _, left = left.partition(b"\r\n")
            found, left = found + left[: int(size, 16)], left[int(size, 16) + 2 :]
        return found


@pytest.fixture(scope="module")
def token_text(tiny_folder: Path) -> TokenText:
    return TokenText(load_model_folder(tiny_folder))


def make_body(**fields: object) -> RequestBody:
    num_logprobs: Any = fields.pop("num_logprobs", None)
    sampling = SamplingParams(seed=1, max_tokens=99, stop_token_ids=(END_ID,), num_logprobs=num_logprobs)
    defaults = {"kind": "completion", "model": 'ti"ny', "created": 7, "prompts": ((1, 2),), "n": 1, "stream": True}
    return RequestBody(**(defaults | fields), sampling=sampling)  # type: ignore[arg-type]


def logs(num_choices: int) -> st.SearchStrategy[list[LogEntry]]:
    """Tokens of any kind for each choice, the end of each, and tokens that came too late."""
    token = st.builds(
        TokenEntry,
        st.integers(0, num_choices - 1),
        st.integers(0, VOCAB - 1),
        st.just(Logprobs(-0.5, ((3, -0.5),))),
        st.sampled_from([0, 0, 16]),
    )
    plain = st.builds(TokenEntry, st.integers(0, num_choices - 1), st.integers(0, VOCAB - 1), st.none(), st.just(0))
    ends: list[LogEntry] = [FinishEntry(choice, "length") for choice in range(num_choices)]
    entries: st.SearchStrategy[LogEntry] = token | plain
    return st.tuples(st.lists(entries, max_size=30), st.lists(entries, max_size=2)).map(
        lambda parts: [*parts[0], ends[0], *parts[1], *ends[1:]]
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_ways_write_the_same(token_text: TokenText, kind: str, data: st.DataObject) -> None:
    """Whatever the log, the bytes for the client should be those of the fold alone, ids and usage included."""
    body = make_body(**KINDS[kind])
    log = data.draw(logs(body.n))
    response = Response(token_text, body)
    for entry in log:
        response.take(encode_entry(entry))
    whole = ResponseFold(body, token_text)
    assert response.body() == Renderer(REQUEST, body, token_text).frames(whole.feed(log))
    assert response.fold.usage == whole.usage


def test_plain_tokens_take_the_short_way(token_text: TokenText) -> None:
    """All tokens of a completion should take it, and of a chat all but the first, which brings the role."""
    log = [encode_entry(TokenEntry(0, id_)) for id_ in TINY.encode("hello world").ids]
    for kind, num_long in (("completion", 0), ("chat", 1)):
        response = Response(token_text, make_body(kind=kind))
        for data in log:
            response.take(data)
        assert response.num_live == len(log) - num_long


@pytest.mark.parametrize("trouble", ["unsent", "closing", "two entries", "no entry"])
def test_a_refusal_has_no_effect(token_text: TokenText, trouble: str) -> None:
    """Where the short way cannot be taken, nothing should be written or folded."""
    response, token = Response(token_text, make_body()), encode_entry(TokenEntry(0, 65))
    response.transport.num_unsent = trouble == "unsent"
    response.transport.is_shut = trouble == "closing"
    data = {"two entries": token * 2, "no entry": b"\xc1"}.get(trouble, token)
    assert response.live(data) is False
    assert (response.transport.written, response.fold.num_entries) == (b"", 0)


async def test_only_the_very_next_bytes_are_offered() -> None:
    """A listener should offer what follows what was read, while its reader waits; all else the reader should get."""
    bus = MemoryBus()
    listener = Relay(bus, GatewayId("g")).listen(REQUEST)
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return data != tokens[2]

    tokens = [encode_entry(TokenEntry(0, number)) for number in range(5)]
    listener.live = take
    _offer(listener, 0, tokens[0])  # nobody waits yet
    assert await listener.read() == [TokenEntry(0, 0)]
    reading = asyncio.create_task(listener.read())
    await asyncio.sleep(0)
    _offer(listener, 3, tokens[1])
    _offer(listener, 3, tokens[1])  # came twice
    assert taken == [tokens[1]]
    assert await _nothing_yet(reading)
    _offer(listener, 6, tokens[2])  # refused
    _offer(listener, 9, tokens[3])  # behind the refused one
    assert await reading == [TokenEntry(0, 2), TokenEntry(0, 3)]
    assert taken == [tokens[1], tokens[2]]
    listener.close()


def _offer(listener: Listener, offset: int, data: bytes) -> None:
    listener.offer(TokenChunk(request_id=REQUEST, offset=offset, data=data))


async def _nothing_yet(reading: asyncio.Task[list[LogEntry]]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not reading.done()


def test_the_token_histogram_shows_what_prometheus_client_shows() -> None:
    """Its series should be those of the library's own histogram, bounds included."""
    texts = []
    for make in (_own_histogram, _library_histogram):
        registry = CollectorRegistry()
        observe = make(registry)
        for value in (0.0, 0.01, 0.0100001, 0.5, 2.5, 99.0):
            observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created{" not in line])
    assert texts[0] == texts[1]


BOUNDS = (0.01, 0.5, 2.5)


def _own_histogram(registry: CollectorRegistry) -> Callable[[float], None]:
    histogram = TokenHistogram("a:b_seconds", "text", BOUNDS, ("model_name", "tiny"))
    registry.register(histogram)
    return histogram.observe


def _library_histogram(registry: CollectorRegistry) -> Callable[[float], None]:
    histogram = Histogram("a:b_seconds", "text", ("model_name",), registry=registry, buckets=BOUNDS)
    return histogram.labels("tiny").observe
