"""Settings: a wrong one is named with its value and range, a right one means the same by flag and by variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared import config, flags
from shared.config import GatewayConfig, SchedulerConfig, ServeConfig, WorkerConfig
from shared.errors import ConfigError
from shared.flags import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    names: tuple[str, ...] = setting((), "some names")
    is_on: bool = setting(True, "whether")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    model: str = setting("", "which", is_positional=True)
    size: int = setting(8, "how many 100%", minimum=1, maximum=64)
    share: float = setting(0.5, "how much", minimum=0.0, maximum=1.0)
    limit: int | None = setting(None, "at most", minimum=1)
    dtype: str = setting("auto", "type", choices=("auto", "float32"))


def parse(*argv: str, **environ: str) -> Outer:
    return flags.parse(Outer, argv, environ, program="test")


def test_defaults_need_nothing() -> None:
    """Without flags and variables the defaults should hold."""
    assert parse() == Outer()


def test_flags_variables_and_groups_mean_the_same() -> None:
    """A setting should be one thing, however it is given."""
    expected = Outer(
        inner=Inner(names=("a", "b"), is_on=False), model="m", size=3, share=0.25, limit=5, dtype="float32"
    )
    assert expected == parse(
        "m", "--size", "3", "--share=0.25", "--limit", "5", "--dtype", "float32", "--no-is-on", "--names", "a", "b"
    )
    assert expected == parse(
        QUIRE_MODEL="m",
        QUIRE_SIZE="3",
        QUIRE_SHARE="0.25",
        QUIRE_LIMIT="5",
        QUIRE_DTYPE="float32",
        QUIRE_IS_ON="false",
        QUIRE_NAMES="a,b",
    )


def test_a_flag_wins_over_its_variable() -> None:
    """What is typed is meant."""
    assert parse("--size", "3", QUIRE_SIZE="4").size == 3


@pytest.mark.parametrize("text", ["none", "auto", ""])
def test_an_optional_setting_can_be_unset(text: str) -> None:
    """A variable should be able to say that there is no value."""
    assert parse(QUIRE_LIMIT=text).limit is None


@pytest.mark.parametrize(
    ("name", "value", "range_text"),
    [
        ("size", "0", "1 to 64"),
        ("size", "65", "1 to 64"),
        ("size", "many", "whole number"),
        ("size", "1.5", "whole number"),
        ("share", "1.5", "0.0 to 1.0"),
        ("share", "nan", "0.0 to 1.0"),
        ("share", "inf", "0.0 to 1.0"),
        ("share", "lots", "a number"),
        ("limit", "0", "at least 1"),
        ("dtype", "int4", "auto, float32"),
    ],
)
def test_a_bad_value_names_setting_value_and_range(name: str, value: str, range_text: str) -> None:
    """The error should say all that is needed to mend it, by flag and by variable."""
    for source, call in ((f"--{name}", lambda: parse(f"--{name}={value}")),
                         (f"QUIRE_{name.upper()}", lambda: parse(**{f"QUIRE_{name.upper()}": value}))):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            call()
        assert all(part in str(caught.value) for part in (source, repr(value), range_text))


@pytest.mark.parametrize(
    ("flag", "text"), [("--host", ""), ("--metrics-host", ""), ("--served-model-name", ""), ("--drain-s", "1e12"),
                       ("--drain-s", "inf"), ("--record-ttl-s", "inf"), ("--worker-lease-s", "inf")])  # fmt: skip
def test_what_would_open_or_overflow_is_refused(flag: str, text: str) -> None:
    """An empty address would listen everywhere; a duration beyond a year is beyond clocks and calendars."""
    with pytest.raises(ConfigError, match=f"{flag}="):
        flags.parse(ServeConfig, [f"{flag}={text}"], {}, program="quire serve")


@pytest.mark.parametrize("flag", ["--engine-flags", "--serve-flags"])
def test_an_open_quote_is_told(flag: str) -> None:
    """Flags inside a flag that a shell could not read should be refused by name."""
    assert flags.split(flag, "--a 'b c' --d") == ["--a", "b c", "--d"]
    with pytest.raises(ConfigError, match=f"{flag}=--x '.*quot"):
        flags.split(flag, "--x '")


def test_a_bad_bool_is_named() -> None:
    """Only clear words should count as true or false."""
    with pytest.raises(ConfigError, match=r"QUIRE_IS_ON='maybe'.*true or false"):
        parse(QUIRE_IS_ON="maybe")


@pytest.mark.parametrize("argv", [["--sizes", "1"], ["--siz", "1"], ["--size"], ["m", "extra"], ["-x"]])
def test_unknown_or_broken_flags_are_refused(argv: list[str]) -> None:
    """A mistyped flag should not be guessed at, and the error should point to --help."""
    with pytest.raises(ConfigError, match="--help"):
        parse(*argv)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: parse("--sizes", "1"), "did you mean --size?"),
        (lambda: parse("--sizes=1"), "did you mean --size?"),
        (lambda: parse(QUIRE_SIZES="1"), "did you mean QUIRE_SIZE?"),
    ],
)
def test_a_slip_is_told_what_was_meant(call: Callable[[], Outer], hint: str) -> None:
    """A name that is almost one of ours should bring that one to mind; one that is like nothing should not."""
    with pytest.raises(ConfigError) as caught:
        call()
    assert hint in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse("--zzz")
    assert "did you mean" not in str(caught.value)


def test_unknown_variables_are_refused() -> None:
    """A mistyped variable of ours should be named; others are none of our business."""
    with pytest.raises(ConfigError, match="QUIRE_SIZES"):
        parse(QUIRE_SIZES="1")
    assert parse(HOME="/root", SIZE="3") == Outer()
    known = frozenset({"QUIRE_OTHER"})
    assert flags.parse(Outer, [], {"QUIRE_OTHER": "1"}, program="test", known_variables=known) == Outer()


def test_a_positional_and_its_flag_clash() -> None:
    """Two models given should be refused, showing both."""
    assert parse("--model", "m").model == "m"
    with pytest.raises(ConfigError, match=r"'a'.*'b'"):
        parse("a", "--model", "b")


@pytest.mark.parametrize(
    "given", [Outer(), Outer(size=3, share=1.0, limit=7, inner=Inner(names=("a", "b"), is_on=False), model="m")]
)
def test_a_config_can_be_handed_on(given: Outer) -> None:
    """`to_argv` should give the flags that make the same config, for child processes."""
    assert parse(*flags.to_argv(given)) == given


def test_help_shows_every_public_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """--help should name each flag with its help and default, and leave out what is for tests."""
    with pytest.raises(SystemExit) as stopped:
        flags.parse(ServeConfig, ["--help"], {}, program="quire serve")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    for name in flags.names(ServeConfig) - {
        "failpoints", "die_with_parent", "parent_pid", "state_file", "memory_shares",
    }:  # fmt: skip
        assert f"--{name.replace('_', '-')}" in shown
    assert "--failpoints" not in shown


def test_help_is_grouped_and_speaks_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    """--help should sort settings by whom they are for, show defaults as they are typed, and name the variables."""
    with pytest.raises(SystemExit):
        flags.parse(ServeConfig, ["--help"], {}, program="quire serve")
    shown = capsys.readouterr().out
    assert shown.startswith("usage: quire serve [MODEL] [MORE_MODELS ...] [options]\n")
    places = [shown.index(text) for text in ("--workers", "The model:", "The gateways:", "--port", "The workers:",
                                             "--block-size", "The scheduler:", "All services:", "QUIRE_")]  # fmt: skip
    assert places == sorted(places)
    assert "(default: off)" in shown
    assert "(default: False)" not in shown


@pytest.mark.parametrize("config_class", [GatewayConfig, SchedulerConfig, WorkerConfig, ServeConfig])
def test_each_service_starts_from_defaults(config_class: type) -> None:
    """No service should need a setting, and the launcher should know all settings of all services."""
    assert flags.parse(config_class, [], {}, program="test") == config_class()
    assert flags.names(config_class) <= flags.names(ServeConfig)


def test_settings_of_other_services_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment should serve all services of a machine."""
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "4")
    assert config.load(GatewayConfig, [], program="gateway") == GatewayConfig()
    assert config.load(WorkerConfig, [], program="worker").engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--preemption-mode=swap"], "--swap-space"),
        (["--swap-space=1", "--kv-layout=contiguous"], "--kv-layout=contiguous"),
        (["--swap-space=0.5", "--batching=static"], "--batching=static"),
        (["--swap-space=-1"], "--swap-space"),
        (["--swap-space=nan"], "--swap-space"),
        (["--preemption-mode=never"], "auto, swap, recompute"),
    ],
)
def test_swap_is_refused_where_it_cannot_be(argv: list[str], named: str) -> None:
    """Host memory that nothing could use, or a mode without it, should be an error that names the other flag."""
    with pytest.raises(ConfigError, match=named):
        config.load(WorkerConfig, argv, program="test")


def test_host_memory_is_given_in_gib() -> None:
    """The flag should be whole or part GiB, and none be taken where victims compute again."""
    for argv, expected in (
        (["--swap-space=1.5"], 3 << 29), (["--swap-space=2", "--preemption-mode=swap"], 2 << 30),
        (["--swap-space=2", "--preemption-mode=recompute"], 0), ([], 0),
    ):  # fmt: skip
        assert config.load(WorkerConfig, argv, program="test").engine.swap_bytes == expected
