"""How often the drafts of one sequence are right, and how long a draft is worth computing for that."""

from __future__ import annotations

FIRST_RATE = 0.7
"""Of a sequence of which nothing is known: most that have a repeated n-gram repeat more than one token."""
NEW_SHARE = 0.15
"""Of a guess in the rate: half of it is from the last four or five guesses."""
MIN_PRICE = 0.1
"""A drafted token is taken to cost at least this share of a token: it is looked up, drawn and compared, too."""


class Acceptance:
    """The probability that the next drafted token is right when those before it are, as a running mean.

    A draft of k tokens gives rate + rate² + … + rate^k tokens on average, so its last token pays when rate^k is more
    than its price. A guess counts whether or not it was computed: the token that followed tells. So a sequence whose
    drafts fail stops having them computed, and has them again as soon as its guesses come true.
    """

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = FIRST_RATE

    def note(self, num_right: int, *, is_wrong_then: bool) -> None:
        """The first `num_right` tokens of a guess were right, and the next one, if it had any, wrong."""
        for _ in range(num_right):
            self.rate += NEW_SHARE * (1.0 - self.rate)
        if is_wrong_then:
            self.rate -= NEW_SHARE * self.rate

    def worthwhile(self, price: float, most: int) -> int:
        """Length of the longest draft, at most `most`, of which every token pays.

        Args:
            price: what computing a drafted token costs, as a share of what a token costs without drafts.
        """
        price = max(price, MIN_PRICE)
        length, probability = 0, self.rate
        while length < most and probability > price:
            length += 1
            probability *= self.rate
        return length
