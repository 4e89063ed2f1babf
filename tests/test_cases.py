"""Each behaviour of the committed list `cases.txt` should be held by a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
_MARK = re.compile(r"@pytest\.mark\.case\(([\d,\s]+)\)")


def _listed() -> set[int]:
    return {int(number) for number in (TESTS / "cases.txt").read_text().split()}


def _marked() -> set[int]:
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        for match in _MARK.finditer(path.read_text()):
            found |= {int(number) for number in match.group(1).split(",")}
    return found


def test_every_listed_case_has_a_test() -> None:
    """A number in cases.txt without a test marked `case(number)` should fail here."""
    assert sorted(_listed() - _marked()) == []
