"""Log lines: one an event, and few of what comes again and again."""

from __future__ import annotations

import itertools
import logging

import pytest

from shared import logs
from shared.logs import RECURRING_S, Log

_names = itertools.count()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO)
    return Log(logging.getLogger(f"test.{next(_names)}"))


def test_a_line_is_an_event_and_its_fields(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """A value with spaces or line breaks should be quoted, so that a line stays one and splits into fields."""
    log.info("request.left", request_id="r1", why="two words", seconds=0.123456789, text="a\nb", none="")
    assert caplog.messages == ["request.left request_id=r1 why='two words' seconds=0.123457 text='a\\nb' none=''"]


def test_what_recurs_is_written_seldom(
    log: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurring warning should be written when it is new and then once in a while, with how many were left out;
    another event's should not wait for it."""
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    for _ in range(50):
        log.recurring("inbox.failed", error="gone")
    log.recurring("beat.failed", error="gone")
    assert caplog.messages == ["inbox.failed error=gone", "beat.failed error=gone"]
    now += RECURRING_S
    log.recurring("inbox.failed", error="gone")
    log.recurring("beat.failed", error="gone")
    assert caplog.messages[2:] == ["inbox.failed error=gone unwritten=49", "beat.failed error=gone"]
