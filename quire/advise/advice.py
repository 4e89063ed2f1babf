"""One piece of advice, and the order in which they are given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Group(IntEnum):
    """In this order settings are worth trying: the first ones cost nothing and change what the later ones see."""

    PREFIX_CACHING = 1
    BLOCKS_AND_MEMORY = 2
    KV_QUANTIZATION = 3
    OTHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`rule` names it in docs/tuning.md. `seen`: what was measured on the system; `gain`: what to expect of it, and
    whether that was measured on another run or is arithmetic. `factor`: that gain as a ratio, for the order inside a
    group; 1: not known. `flags`: what to set, first of all; may be empty where it is for clients to do."""

    rule: str
    group: Group
    title: str
    seen: str
    gain: str
    flags: tuple[str, ...] = ()
    factor: float = 1.0


def in_order(advice: Iterable[Advice]) -> list[Advice]:
    """By group, the largest gain first."""
    return sorted(advice, key=lambda one: (one.group, -one.factor))
