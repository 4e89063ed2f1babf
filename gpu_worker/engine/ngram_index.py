"""Where the end of a text has stood in it before: the latest earlier place of its last few tokens.

The index grows with the text, a dictionary entry for each token and each length of n-grams, and never looks at tokens
again. A lookup is one dictionary access a length. It takes about 200 bytes an entry: a context of 32,768 tokens with
lengths 2 to 4 takes 20 MB. A text that is long when its index begins is taken in portions, so that no step waits.

Source: prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding) scans the text each time.
"""

from __future__ import annotations

PORTION = 2048
"""Tokens taken in at most in one lookup: about 2 ms with three lengths (Python 3.11, one core of a Sapphire Rapids)."""


class NgramIndex:
    """Of one text, given as its list of token ids, to which tokens are only appended.

    Args:
        longest, shortest: lengths of n-grams; a longer match is better.
    """

    __slots__ = ("_ends", "_lengths", "_num_indexed")

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def continuation(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow: those behind the latest earlier place of the longest n-gram that ends the
        text. Where they reach the end of the text they go on with themselves, as a text does that repeats a phrase.
        Empty when there is no such place, or while the index has not caught up."""
        self._extend(token_ids)
        known = len(token_ids)
        if self._num_indexed < known - 1:
            return ()
        for length in self._lengths:
            end = self._ends.get(tuple(token_ids[-length:])) if length < known else None
            if end is not None:
                period = known - end
                return tuple(token_ids[end + i % period] for i in range(count))
        return ()

    def _extend(self, token_ids: list[int]) -> None:
        """Take in the n-grams that end before the last token."""
        start = self._num_indexed
        self._num_indexed = max(start, min(len(token_ids) - 1, start + PORTION))
        for length in self._lengths:
            for end in range(max(start + 1, length), self._num_indexed + 1):
                self._ends[tuple(token_ids[end - length : end])] = end
