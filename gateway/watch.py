"""The life of one response as metrics and log lines see it: exactly one outcome for each accepted request."""

from __future__ import annotations

import time

from gateway.fold import Batch, ChoiceEnd, TextEvent, Usage
from gateway.metrics import GatewayMetrics
from shared.ids import RequestId
from shared.logs import get_log

_log = get_log("gateway.request")


class ResponseWatch:
    """Times one response. `is_counted` False: a resumed or joined one, which was accepted elsewhere."""

    def __init__(self, metrics: GatewayMetrics, request_id: RequestId, *, is_counted: bool, started: float) -> None:
        self._metrics = metrics
        self._request_id = request_id
        self._is_counted = is_counted
        self._started = started
        self._first: float | None = None
        self._last = 0.0
        self._reasons: list[str] = []
        if is_counted:
            metrics.accepted.inc()

    def note(self, batch: Batch) -> None:
        """Events that go to the client now."""
        now = time.monotonic()
        for _, event in batch:
            if isinstance(event, ChoiceEnd):
                self._reasons.append(event.reason)
            elif isinstance(event, TextEvent):
                self._note_text(now)

    def note_text(self) -> None:
        """Text that goes to the client now, and nothing else."""
        self._note_text(time.monotonic())

    def end(self, outcome: str, usage: Usage) -> None:
        """The response is over: finished, failed or cancelled (left by its client)."""
        elapsed = time.monotonic() - self._started
        _log.info("response.ended", request_id=self._request_id, outcome=outcome, seconds=elapsed,
                  prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)  # fmt: skip
        if not self._is_counted:
            return
        self._metrics.outcome[outcome].inc()
        if outcome == "finished":
            self._note_finished(elapsed, usage)
        else:
            self._metrics.finished_reason["error" if outcome == "failed" else "abort"].inc()

    def _note_text(self, now: float) -> None:
        if not self._is_counted:
            return
        if self._first is None:
            self._first = now
            self._metrics.ttft_s.observe(now - self._started)
        elif now > self._last:
            self._metrics.itl_s.observe(now - self._last)
        self._last = now

    def _note_finished(self, elapsed: float, usage: Usage) -> None:
        for reason in self._reasons:
            self._metrics.finished_reason[reason].inc()
        self._metrics.e2e_s.observe(elapsed)
        self._metrics.prompt_tokens.observe(usage.prompt_tokens)
        self._metrics.generation_tokens.observe(usage.completion_tokens)
        if self._first is not None and usage.completion_tokens > 1:
            self._metrics.tpot_s.observe((self._last - self._first) / (usage.completion_tokens - 1))
