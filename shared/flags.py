"""Settings from flags and environment: one frozen dataclass a service, flat on the command line.

A setting is declared once, as a dataclass field made by `setting(default, help, ...)`; groups of settings nest. Field
`max_num_seqs` is flag `--max-num-seqs` and variable `QUIRE_MAX_NUM_SEQS`; a flag wins over its variable, a variable
over the default. A bool `enable_x` is `--enable-x` / `--no-enable-x`. Unknown flags, unknown `QUIRE_` variables and
values out of range are a `ConfigError` that names flag or variable, value and range.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shared.errors import ConfigError, shorten

C = TypeVar("C")
ENV_PREFIX = "QUIRE_"


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    may_be_empty: bool = True,
    is_hidden: bool = False,
    is_positional: bool = False,
) -> Any:
    """Declare one setting as a dataclass field. `minimum` and `maximum` are inclusive; a text, or each of several, is
    empty only if it `may_be_empty`."""
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "may_be_empty": may_be_empty,
        "is_hidden": is_hidden,
        "is_positional": is_positional,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    config_class: type[C],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str,
    description: str = "",
    known_variables: frozenset[str] = frozenset(),
) -> C:
    """A `config_class` from `argv` and `environ`; prints help and exits on `--help`.

    Args:
        known_variables: other `QUIRE_` variables that are no mistake (those of the other services).

    Raises:
        ConfigError: an unknown name or a bad value.
    """
    leaves = _leaves(config_class)
    given = _parse_argv(_make_parser(leaves, program, description), leaves, argv)
    for name in leaves:
        positional = given.pop(name + "_positional", None)
        if positional == []:  # several values, and none was given
            positional = None
        if positional is not None and given[name] is not None:
            raise ConfigError(f"{name} is given twice: {shorten(positional)!r} and {shorten(given[name])!r}")
        given[name] = given[name] if positional is None else positional
    _refuse_unknown_variables(environ, set(leaves), known_variables)
    values = {name: _value(name, leaf, given.get(name), environ) for name, leaf in leaves.items()}
    return typing.cast(C, _build(config_class, values))


def to_argv(config: Any) -> list[str]:
    """The flags that give `config` again: those whose value is not the default."""
    argv: list[str] = []
    for name, leaf in _leaves(type(config)).items():
        value = _read(config, name)
        if value == leaf.field.default:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, tuple):
            argv += [flag, *map(str, value)]
        else:
            argv += [f"{flag}={value}"]
    return argv


def names(config_class: type) -> frozenset[str]:
    """Names of all settings of `config_class`, its groups' too."""
    return frozenset(_leaves(config_class))


def variable(name: str) -> str:
    """The environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    field: dataclasses.Field[Any]
    kind: type
    is_optional: bool
    is_list: bool
    group: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{shorten(message)} (see {self.prog} --help)")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _make_parser(leaves: Mapping[str, _Leaf], program: str, description: str) -> _Parser:
    positionals = "".join(
        f"[{name.upper()}{' ...' if leaf.is_list else ''}] "
        for name, leaf in leaves.items()
        if leaf.field.metadata["is_positional"]
    )
    parser = _Parser(
        prog=program,
        usage=f"%(prog)s {positionals}[options]",
        description=description,
        epilog=f"Every flag is an environment variable too, --some-flag as {variable('some_flag')} (several values "
        "with commas between them); a flag wins over its variable.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup | _Parser] = {"": parser}
    for name, leaf in leaves.items():
        if leaf.group not in groups:
            groups[leaf.group] = parser.add_argument_group(leaf.group)
        _add_argument(groups[leaf.group], name, leaf)
    return parser


def _parse_argv(parser: _Parser, leaves: Mapping[str, _Leaf], argv: Sequence[str]) -> dict[str, Any]:
    """What `argv` gives, None for the rest. Raises `ConfigError` for what is no option, naming the one meant."""
    num_positionals = sum(leaf.field.metadata["is_positional"] for leaf in leaves.values())
    read = parser.parse_known_args if num_positionals < 2 else parser.parse_known_intermixed_args
    given, unknown = read(list(argv))
    if unknown:
        options = ["--" + name.replace("_", "-") for name in leaves]
        meant = _meant(unknown[0].partition("=")[0], options)
        what = f"unrecognized arguments: {shorten(' '.join(unknown))}{meant}"
        raise ConfigError(f"{what} (see {parser.prog} --help)")
    return vars(given)


def _meant(word: str, known: Sequence[str]) -> str:
    """A hint at what `word` may have been meant for; empty when nothing is like it."""
    return "".join(f"; did you mean {found}?" for found in difflib.get_close_matches(word, known, n=1, cutoff=0.7))


def _leaves(config_class: type, group: str = "") -> dict[str, _Leaf]:
    """All settings by name. `group`: the help's heading, the first line of the docstring of the group's class."""
    hints = typing.get_type_hints(config_class)
    leaves: dict[str, _Leaf] = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            leaves |= _leaves(typing.cast(type, hint), (hint.__doc__ or "").splitlines()[0].rstrip("."))
        else:
            leaves[field.name] = _to_leaf(field, hint, group)
    return leaves


def _to_leaf(field: dataclasses.Field[Any], hint: Any, group: str) -> _Leaf:
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (kind,) = [a for a in arguments if a is not types.NoneType]
        return _Leaf(field, kind, is_optional=True, is_list=False, group=group)
    if typing.get_origin(hint) is tuple:
        return _Leaf(field, arguments[0], is_optional=False, is_list=True, group=group)
    return _Leaf(field, hint, is_optional=False, is_list=False, group=group)


def _add_argument(parser: argparse._ActionsContainer, name: str, leaf: _Leaf) -> None:
    metadata, flag = leaf.field.metadata, "--" + name.replace("_", "-")
    help_text = argparse.SUPPRESS if metadata["is_hidden"] else _help(leaf)
    options: dict[str, Any] = {"dest": name, "default": None, "help": help_text}
    if leaf.kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = "|".join(metadata["choices"]) if metadata["choices"] else leaf.kind.__name__.upper()
    if leaf.is_list:
        options["nargs"] = "+"
    if metadata["is_positional"]:
        nargs = "*" if leaf.is_list else "?"
        parser.add_argument(
            name + "_positional", nargs=nargs, default=None, metavar=name.upper(), help=f"same as {flag}"
        )
    parser.add_argument(flag, **options)


def _help(leaf: _Leaf) -> str:
    text, default = leaf.field.metadata["help"], leaf.field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(map(str, default))
    shown = "" if default in (None, "") else f" (default: {default})"
    return str(text + shown).replace("%", "%%")


def split(flag: str, text: str) -> list[str]:
    """Flags that were given as one text, quoted as for a shell. Raises `ConfigError` that names `flag`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}={shorten(text)}: {error}; quote it as for a shell") from None


def _refuse_unknown_variables(environ: Mapping[str, str], names: set[str], known: frozenset[str]) -> None:
    allowed = {variable(name) for name in names} | known
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in allowed:
            meant = _meant(name, sorted(allowed)) or "; unset it, or see --help for the settings"
            raise ConfigError(f"unknown environment variable {shorten(name)}{meant}")


def _value(name: str, leaf: _Leaf, given: Any, environ: Mapping[str, str]) -> Any:
    source, flag = variable(name), "--" + name.replace("_", "-")
    if given is not None:
        raw, source = given, flag
    elif source in environ:
        raw = environ[source].split(",") if leaf.is_list else environ[source]
    else:
        return leaf.field.default
    if leaf.is_list:
        return tuple(_convert(source, item, leaf) for item in raw)
    return _convert(source, raw, leaf)


def _convert(source: str, raw: Any, leaf: _Leaf) -> Any:
    if isinstance(raw, bool):
        return raw
    if leaf.is_optional and raw.lower() in ("", "none", "auto"):
        return None
    value = _parse_text(source, raw, leaf.kind)
    metadata = leaf.field.metadata
    low, high, choices = metadata["minimum"], metadata["maximum"], metadata["choices"]
    if value == "" and not metadata["may_be_empty"]:
        raise ConfigError(f"{source}={shorten(raw)!r}: must not be empty; leave it out for the default")
    if choices is not None and value not in choices:
        raise ConfigError(f"{source}={shorten(raw)!r}: choose from {', '.join(choices)}")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
        raise ConfigError(f"{source}={shorten(raw)!r}: must be {bounds}")
    return value


def _parse_text(source: str, raw: str, kind: type) -> Any:
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if raw.lower() not in words:
            raise ConfigError(f"{source}={shorten(raw)!r}: must be true or false")
        return words[raw.lower()]
    try:
        return kind(raw)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{source}={shorten(raw)!r}: must be {wanted}") from None


def _build(config_class: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(config_class)
    arguments = {}
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        is_group = dataclasses.is_dataclass(hint)
        arguments[field.name] = _build(typing.cast(type, hint), values) if is_group else values[field.name]
    return config_class(**arguments)


def _read(config: Any, name: str) -> Any:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found = _read(value, name)
            if found is not _MISSING:
                return found
        elif field.name == name:
            return value
    return _MISSING


_MISSING = object()
