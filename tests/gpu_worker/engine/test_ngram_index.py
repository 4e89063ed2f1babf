"""What has followed the end of a text before."""

from __future__ import annotations

import random

from gpu_worker.engine.ngram_index import PORTION, NgramIndex


def by_scanning(token_ids: list[int], count: int, longest: int, shortest: int) -> tuple[int, ...]:
    """What the index should answer, found by looking at the whole text."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                text = list(token_ids)
                for i in range(count):
                    text.append(text[end + i])
                return tuple(text[len(token_ids) :])
    return ()


def test_the_longest_and_latest_place_wins() -> None:
    """A longer match should win over a later one, and a later one over an earlier one of its length."""
    index = NgramIndex(3, 1)
    assert index.continuation([1, 2, 3, 10, 5, 3, 11, 1, 2, 3], 1) == (10,)
    assert NgramIndex(1, 1).continuation([1, 2, 3, 10, 5, 3, 11, 1, 2, 3], 2) == (11, 1)
    assert NgramIndex(3, 2).continuation([3, 10, 3], 2) == ()


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    """Where the match reaches the end, its continuation should go round."""
    assert NgramIndex(2, 1).continuation([7, 8, 9, 7, 8], 5) == (9, 7, 8, 9, 7)
    assert NgramIndex(2, 2).continuation([4, 4, 4], 3) == (4, 4, 4)


def test_nothing_comes_from_a_short_text() -> None:
    """Texts without a place before their end should have no continuation."""
    for text in ([], [1], [1, 2]):
        assert NgramIndex(4, 1).continuation(text, 3) == ()


def test_it_equals_a_scan_of_the_whole_text() -> None:
    """Asked at any times while a text grows, it should answer as a scan would."""
    rng = random.Random(5)
    for _ in range(60):
        longest, vocabulary = rng.randint(1, 5), rng.randint(2, 6)
        shortest = rng.randint(1, longest)
        index, text = NgramIndex(longest, shortest), [rng.randrange(vocabulary) for _ in range(rng.randrange(30))]
        for _ in range(30):
            text += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))]
            assert index.continuation(text, 6) == by_scanning(text, 6, longest, shortest)


def test_a_long_text_is_taken_in_portions() -> None:
    """A long prompt should give nothing until it has been read, a portion at each lookup, and then its continuation."""
    text = [*range(PORTION * 2), 0, 1]
    index = NgramIndex(2, 2)
    answers = [index.continuation(text, 2) for _ in range(4)]
    assert answers == [(), (), (2, 3), (2, 3)]
