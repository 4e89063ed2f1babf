"""What generating gives, in vLLM's classes, and how they are read from answers and streams of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.api.lora_request import LoRARequest

_ID_NAME = "token_id:"


@dataclass(slots=True)
class Logprob:
    """`rank` of the token, from 1, where it is among those asked for. `decoded_token`: its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt. `logprobs` has a mapping from token id for each of `token_ids`."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Nothing will be added to it."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, as the caller saw them, in unix seconds. Only streams know their first token."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """All that came of one prompt. `prompt` is None where it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: None = None


@dataclass(slots=True)
class GrowingOutput:
    """One choice of a request, from parts of a stream or from a whole answer."""

    index: int
    reader: LogprobReader
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Take `choice`, of a chunk or an answer, in."""
        self.text += text_of(choice)
        self.token_ids += choice.get("token_ids") or ()
        if choice.get("logprobs"):
            self._add_logprobs(self.reader.read(choice["logprobs"]))
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.stop_reason = choice.get("stop_reason", self.stop_reason)

    def mark(self) -> tuple[int, int]:
        """Where it ends now, in characters and tokens."""
        return len(self.text), len(self.token_ids)

    def shown(self, mark: tuple[int, int] = (0, 0)) -> CompletionOutput:
        """What lies behind `mark`, as it is now; sums are over all."""
        text_from, ids_from = mark
        return CompletionOutput(
            index=self.index,
            text=self.text[text_from:],
            token_ids=self.token_ids[ids_from:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[ids_from:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_logprobs(self, positions: list[dict[int, Logprob]]) -> None:
        drawn = (next(iter(position.values())) for position in positions)  # the drawn token is the first of each
        self.cumulative_logprob = sum((item.logprob for item in drawn), self.cumulative_logprob or 0.0)
        self.logprobs = self.logprobs or []
        self.logprobs += positions


def text_of(choice: Mapping[str, Any]) -> str:
    """The text in a choice of an answer or a chunk, of completions or chat."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def named_ids(answer: Mapping[str, Any]) -> set[int]:
    """The token ids that the logprobs of an answer or a chunk name."""
    names: set[str] = set()
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs") or {}
        names.update(logprobs.get("tokens") or ())
        for top in logprobs.get("top_logprobs") or ():
            names.update(top or ())
        for item in logprobs.get("content") or ():
            names.add(item["token"])
            names.update(top["token"] for top in item["top_logprobs"])
    return {_to_id(name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobReader:
    """Reads logprobs whose tokens are named by id. `texts`: of token ids; `num_top` alternatives were asked for."""

    texts: Mapping[int, str]
    num_top: int

    def read(self, logprobs: Mapping[str, Any]) -> list[dict[int, Logprob]]:
        """Of each position, the drawn token first, then the alternatives, best first."""
        if "content" in logprobs:
            return [self._position(item["token"], item["logprob"], _chat_top(item)) for item in logprobs["content"]]
        tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
        columns = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        return [self._position(name, chosen, top) for name, chosen, top in columns]

    def _position(self, name: str, chosen: float, top: Mapping[str, float]) -> dict[int, Logprob]:
        found = {_to_id(name): Logprob(chosen, None, self.texts.get(_to_id(name)))}
        for rank, (other, logprob) in enumerate(list(top.items())[: self.num_top], 1):
            token_id = _to_id(other)
            found[token_id] = Logprob(logprob, rank, self.texts.get(token_id))
        return found


def _chat_top(item: Mapping[str, Any]) -> dict[str, float]:
    return {other["token"]: other["logprob"] for other in item["top_logprobs"]}


def _to_id(name: str) -> int:
    return int(name.removeprefix(_ID_NAME))
