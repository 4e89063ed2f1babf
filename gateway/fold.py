"""From the token log to what a client sees: a pure fold over log entries, from entry 0.

Every event has an id `(entries folded, number of the event within that entry)`. Since the fold knows nothing but the
request's body and the entries, any gateway that folds the same log gives the same events under the same ids: that is
what makes a stream resumable anywhere. Rules:

* chat: a choice's first entry gives its role event; text comes as it is sure, that is, complete characters that no stop
  string may claim; the finish event carries no text;
* a stop string ends its choice at the entry that completes it (`take_stops`); later entries of that choice are void;
* tokens of a prompt that were found in the prefix cache are those of its first choice;
* an embedding is a choice's only entry, its end;
* the end token (one of `stop_token_ids`) has no text and no logprobs, but counts as a completion token;
* with `return_token_ids` each choice's first entry gives its opening event in completions, too; every token gives an
  event, whatever text it has, with its id and its logprobs, the end token also; the finish event says what ended it;
* with `best_of` all choices are folded; which of them the client gets follows from their logprobs in the log;
* the entry that ends the last choice also gives the usage event (if wanted) and the done event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.detokenize import TokenText
from gateway.stopping import StopMatcher
from shared.log import FinishEntry, LogEntry, TokenEntry
from shared.messages import RequestBody
from shared.work_time import WorkTime


class EventId(NamedTuple):
    """Ordered; written `entries.number`."""

    entries: int
    number: int


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token's logprobs, and where its text begins in the choice's text (characters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text_offset: int


@dataclass(frozen=True, slots=True)
class RoleEvent:
    choice: int


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More text of a choice; `tokens` only when logprobs were asked for, `token_ids` only when these were."""

    choice: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingEvent:
    """A prompt's embedding: little-endian float32."""

    choice: int
    vector: bytes


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """`stop_reason`: the stop string that ended it, or the token of the request's `stop_token_ids`; None: another
    reason, or token ids were not asked for."""

    choice: int
    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` of the prompt tokens were found in the prefix cache. `worked`: worker time, if it was asked for,
    which is not in the log (`delivery.py`)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    worked: WorkTime | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing follows."""


Event = RoleEvent | TextEvent | EmbeddingEvent | ChoiceEnd | Usage | Done
Batch = list[tuple[EventId, Event]]


class ResponseFold:
    """The state of one response after some entries of its log."""

    def __init__(self, body: RequestBody, token_text: TokenText) -> None:
        self._body = body
        self._choices = [_ChoiceFold(i, body, token_text) for i in range(len(body.prompts) * body.n)]
        self._num_open = len(self._choices)
        self._stops: list[tuple[int, int]] = []
        self.num_entries = 0
        self._is_plain = not body.stop and body.sampling.num_logprobs is None and not body.returns_token_ids

    @property
    def is_complete(self) -> bool:
        """Every choice has ended; further entries change nothing."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """Prompt tokens once a prompt, completion tokens over all choices."""
        prompt_tokens = sum(len(prompt) for prompt in self._body.prompts)
        cached_tokens = sum(choice.num_cached for choice in self._choices[:: self._body.n])
        return Usage(prompt_tokens, sum(choice.num_tokens for choice in self._choices), cached_tokens)

    def feed(self, entries: Iterable[LogEntry]) -> Batch:
        """Fold `entries` in; the events that they give, in order."""
        found: Batch = []
        for entry in entries:
            if self.is_complete:
                break
            self.num_entries += 1
            events = self._fold(entry)
            found += [(EventId(self.num_entries, index), event) for index, event in enumerate(events)]
        return found

    def feed_token(self, choice: int, token_id: int) -> str | None:
        """As `feed` for one token that gives text and nothing else: the text, perhaps none. None, and nothing is
        folded, when there is more to it: a choice that begins or has ended, stop strings, logprobs."""
        if not self._is_plain or not 0 <= choice < len(self._choices):
            return None
        text = self._choices[choice].feed_token(token_id)
        if text is not None:
            self.num_entries += 1
        return text

    def shown_choices(self) -> list[int]:
        """The choices that the client gets, in its order: all, or of each prompt's the best ones, best first (of equal
        ones the lower number). Final when complete."""
        n, num_returned = self._body.n, self._body.num_returned
        if num_returned is None:
            return list(range(len(self._choices)))
        shown = []
        for first in range(0, len(self._choices), n):
            ranked = sorted(range(first, first + n), key=lambda c: -self._choices[c].mean_logprob)
            shown += ranked[:num_returned]
        return shown

    def take_stops(self) -> list[tuple[int, int]]:
        """Stop strings found since the last call: (choice, index of the choice's entry that completed it)."""
        stops, self._stops = self._stops, []
        return stops

    def _fold(self, entry: LogEntry) -> list[Event]:
        choice = self._choices[entry.choice]
        if choice.is_done:
            return []
        events = choice.feed(entry)
        if choice.stop_index is not None:
            self._stops.append((entry.choice, choice.stop_index))
        if events and isinstance(events[-1], ChoiceEnd):
            self._num_open -= 1
            if self.is_complete:
                events += [self.usage, Done()] if self._body.include_usage else [Done()]
        return events


class _ChoiceFold:
    def __init__(self, index: int, body: RequestBody, token_text: TokenText) -> None:
        self._index = index
        self._sampling = body.sampling
        self._end_ids = frozenset(body.sampling.stop_token_ids)
        self._model_end_ids = token_text.end_ids
        self._returns_ids = body.returns_token_ids
        self._detokenizer = token_text.new_detokenizer()
        self._matcher = StopMatcher(body.stop)
        self._role_due = body.kind == "chat" or body.returns_token_ids
        self._pending: deque[ShownToken] = deque()
        self._num_decoded = 0
        self._num_shown = 0
        self.num_tokens = 0
        self.num_cached = 0
        self._logprob_sum = 0.0
        self.stop_index: int | None = None
        self._end_token: int | None = None
        self.is_done = False

    def feed(self, entry: LogEntry) -> list[Event]:
        events: list[Event] = [RoleEvent(self._index)] if self._role_due else []
        self._role_due = False
        if isinstance(entry, FinishEntry):
            if entry.embedding:
                events.append(EmbeddingEvent(self._index, entry.embedding))
            return events + self._end(entry.reason)
        self.num_tokens += 1
        self.num_cached += entry.num_cached
        self._logprob_sum += 0.0 if entry.logprobs is None else entry.logprobs.chosen
        if entry.token_id in self._end_ids:
            self._end_token = entry.token_id
            return events + self._show_unseen(entry)
        self._note_logprobs(entry)
        shown, is_stopped = self._pass(self._detokenizer.feed(entry.token_id))
        events += self._show(shown, self._take_pending(), entry.token_id)
        if is_stopped:
            self.stop_index = self.num_tokens - 1
            self.is_done = True
            events.append(self._stopped())
        return events

    @property
    def mean_logprob(self) -> float:
        """Mean log probability (natural, of the raw model) of the tokens that count, the end token among them."""
        return self._logprob_sum / self.num_tokens if self.num_tokens else float("-inf")

    def feed_token(self, token_id: int) -> str | None:
        """The text of a token in the midst of the choice, None (and nothing is folded) at its beginning or end."""
        if self._role_due or self.is_done:
            return None
        self.num_tokens += 1
        return "" if token_id in self._end_ids else self._detokenizer.feed(token_id)

    def _end(self, reason: str) -> list[Event]:
        self.is_done = True
        shown, is_stopped = self._pass(self._detokenizer.finish())
        if is_stopped:
            return [*self._show(shown, self._take_pending()), self._stopped()]
        shown += self._matcher.finish()
        tokens = tuple(self._pending)
        is_asked = self._returns_ids and reason == "stop" and self._end_token not in self._model_end_ids
        return [*self._show(shown, tokens), ChoiceEnd(self._index, reason, self._end_token if is_asked else None)]

    def _stopped(self) -> ChoiceEnd:
        return ChoiceEnd(self._index, "stop", self._matcher.found if self._returns_ids else None)

    def _pass(self, text: str) -> tuple[str, bool]:
        """Through the stop matcher; a match within the first `min_tokens` tokens does not count."""
        self._num_decoded += len(text)
        shown, is_stopped = self._matcher.feed(text, is_armed=self.num_tokens > self._sampling.min_tokens)
        self._num_shown += len(shown)
        return shown, is_stopped

    def _note_logprobs(self, entry: TokenEntry) -> None:
        if self._sampling.num_logprobs is not None and entry.logprobs is not None:
            top = entry.logprobs.top[: self._sampling.num_logprobs]
            self._pending.append(ShownToken(entry.token_id, entry.logprobs.chosen, top, self._num_decoded))

    def _take_pending(self) -> tuple[ShownToken, ...]:
        """Logprobs of tokens whose text has begun to show: they never run ahead of the text, but for those that come
        with their ids."""
        taken = []
        while self._pending and (self._returns_ids or self._pending[0].text_offset < self._num_shown):
            taken.append(self._pending.popleft())
        return tuple(taken)

    def _show(self, text: str, tokens: tuple[ShownToken, ...], token_id: int | None = None) -> list[Event]:
        """The event of `text`; of `token_id`, too, where ids are wanted."""
        token_ids = (token_id,) if self._returns_ids and token_id is not None else ()
        return [TextEvent(self._index, text, tokens, token_ids)] if text or tokens or token_ids else []

    def _show_unseen(self, entry: TokenEntry) -> list[Event]:
        """The event of an end token, which is none where ids are not wanted."""
        if not self._returns_ids:
            return []
        self._note_logprobs(entry)
        return self._show("", self._take_pending(), entry.token_id)
