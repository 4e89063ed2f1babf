"""Stop strings: find the first one in a growing text, and hold back whatever may become one.

One Knuth–Morris–Pratt automaton a stop string, fed character by character: its state is the length of the longest
beginning of the stop string that ends the text. So the held-back text is the longest state, a match is a full state,
and the result never depends on how tokens cut the text. Of several matches the one that is complete first wins; of
those complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes a text through up to its first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, *, is_armed: bool) -> tuple[str, bool]:
        """What may be shown of everything so far and was not yet, and whether a stop string is complete.

        Args:
            text: the next characters.
            is_armed: False: a match that `text` completes does not count.
        """
        if not self._automata:
            return text, False
        self._held += text
        for number, char in enumerate(text, 1):
            matched = max((a.length for a in self._automata if a.advance(char)), default=0)
            if matched and is_armed:
                end = len(self._held) - len(text) + number
                self.found = self._held[end - matched : end]
                shown, self._held = self._held[: end - matched], ""
                return shown, True
        shown_len = len(self._held) - max(automaton.state for automaton in self._automata)
        shown, self._held = self._held[:shown_len], self._held[shown_len:]
        return shown, False

    def finish(self) -> str:
        """What was held back, when the text ends without a match."""
        shown, self._held = self._held, ""
        return shown


class _Automaton:
    __slots__ = ("_fallback", "_stop", "length", "state")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.state = 0
        self._fallback = [0] * (self.length + 1)
        for end in range(1, self.length):
            self._fallback[end + 1] = self._next(self._fallback[end], stop[end])

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        self.state = self._next(self.state, char)
        if self.state < self.length:
            return False
        self.state = self._fallback[self.length]
        return True

    def _next(self, state: int, char: str) -> int:
        """The longest beginning of the stop string, shorter than it, that `char` prolongs."""
        while state and self._stop[state] != char:
            state = self._fallback[state]
        return state + 1 if self._stop[state] == char else 0
