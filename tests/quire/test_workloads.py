"""The four workloads: lengths as published, contents fixed by seed and repeat."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench import workloads
from shared.errors import ConfigError

NAMES = ("w1", "w2", "w3", "w4")


def make_prompts(name: str, **arguments: int) -> list[tuple[int, ...]]:
    workload = workloads.build(name, **arguments)
    everyone = [*workload.requests, *filter(None, [workload.intruder])]
    return [request.prompt for request in everyone if isinstance(request.prompt, tuple)]


@pytest.mark.parametrize(
    ("name", "count", "total_in", "total_out"),
    [
        ("w1", 1, 128, 128),
        ("w2", 32, 4522, 4622),
        ("w3", 16, 16 * 544, 16 * 32),
        ("w4", 9, 8 * 32 + 2048, 8 * 160 + 32),
    ],
)
def test_lengths_are_the_published_ones(name: str, count: int, total_in: int, total_out: int) -> None:
    """Numbers of requests and tokens should be those of the workload table, in every repeat."""
    for repeat in (0, 3):
        workload = workloads.build(name, repeat=repeat)
        everyone = [*workload.requests, *filter(None, [workload.intruder])]
        prompts = make_prompts(name, repeat=repeat)
        assert (len(everyone), len(prompts)) == (count, count)
        assert sum(map(len, prompts)) == total_in
        assert sum(request.max_tokens for request in everyone) == total_out


@pytest.mark.parametrize("name", NAMES)
def test_contents_depend_on_the_repeat_only(name: str) -> None:
    """The same repeat should give the same ids, another repeat others."""
    assert make_prompts(name, repeat=1) == make_prompts(name, repeat=1)
    assert make_prompts(name, repeat=1) != make_prompts(name, repeat=2)


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_lie_in_the_asked_range(name: str) -> None:
    """Ids should lie from 300 up to the limit, so that no special token and no missing row is hit."""
    ids = [i for prompt in make_prompts(name, highest_token_id=8000) for i in prompt]
    assert min(ids) >= 300
    assert max(ids) < 8000


def test_first_ids_are_pinned() -> None:
    """The random stream should never change, or figures of two versions could not be compared."""
    assert make_prompts("w1", repeat=1)[0][:4] == (5155, 22460, 20483, 12038)
    assert [len(prompt) for prompt in make_prompts("w2")[:4]] == [227, 197, 136, 82]


def test_sharers_have_one_prefix() -> None:
    """All prompts of w3 should share exactly their first 512 tokens."""
    prompts = make_prompts("w3")
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:] for prompt in prompts}) == 16


def test_file_gives_its_requests(tmp_path: Path) -> None:
    """Each line should become a request: text, token ids or messages."""
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "hi", "max_tokens": 3}\n\n{"prompt": [1, 2], "max_tokens": 4}\n'
        '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}\n'
    )
    requests = workloads.build(str(path)).requests
    assert [request.max_tokens for request in requests] == [3, 4, 5]
    assert (requests[0].prompt, requests[1].prompt) == ("hi", (1, 2))
    assert requests[2].messages == ({"role": "user", "content": "x"},)


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"prompt": "x"}', '{"max_tokens": 3}', '{"prompt": [], "max_tokens": 1}',
     '{"prompt": ["a"], "max_tokens": 1}', '{"prompt": "x", "max_tokens": true}', '{"prompt": "x", "max_tokens": 0}'],
)  # fmt: skip
def test_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    """A wrong line should be refused with file and line number."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 2"):
        workloads.build(str(path))


def test_unknown_workload_is_refused(tmp_path: Path) -> None:
    """Neither a name nor a file, or an empty file, should be an error that says so."""
    with pytest.raises(ConfigError, match="w1, w2, w3, w4"):
        workloads.build("w9")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no requests"):
        workloads.build(str(tmp_path / "empty.jsonl"))
