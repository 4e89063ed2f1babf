"""Which adapter lies in which slot."""

from __future__ import annotations

from gpu_worker.lora.adapter import Adapter, AdapterSlots
from gpu_worker.lora.peft_weights import Parts
from gpu_worker.lora.targets import Key


class Backend:
    """Notes what was put where."""

    def __init__(self) -> None:
        self.held: dict[int, object] = {}

    def prepare(self, factors: dict[Key, Parts]) -> object:
        return factors

    def put(self, slot: int, prepared: object) -> None:
        self.held[slot] = prepared


def make_adapters(names: str) -> list[Adapter]:
    return [Adapter(name, name) for name in names]


def test_slots_go_to_the_least_recently_used() -> None:
    """An adapter should keep its slot until another needs it, and be put there when the step starts, not before."""
    backend = Backend()
    slots = AdapterSlots(2, backend)
    a, b, c = make_adapters("abc")
    given = slots.give([a, b, a])
    assert backend.held == {}
    slots.place()
    assert backend.held == {given[a]: "a", given[b]: "b"}
    assert slots.give([a]) == {a: given[a]}
    assert slots.give([c]) == {c: given[b]}
    assert backend.held[given[b]] == "b"
    slots.place()
    assert backend.held == {given[a]: "a", given[b]: "c"}
    assert set(slots.contents) == {"a", "c"}
    assert slots.num_placed == 3


def test_a_plan_that_was_not_started_costs_nothing() -> None:
    """A slot that was given and taken back before a start should not have moved anything."""
    backend = Backend()
    slots = AdapterSlots(1, backend)
    a, b = make_adapters("ab")
    slots.give([a])
    slots.place()
    slots.give([b])
    slots.give([a])
    slots.place()
    assert slots.num_placed == 1


def test_equal_content_is_the_same_adapter() -> None:
    """One that was read again should find its slot."""
    slots = AdapterSlots(2, Backend())
    (first,), (again,) = make_adapters("a"), make_adapters("a")
    assert slots.give([first])[first] == slots.give([again])[again]
