"""A decision log fed to a fresh policy: does it decide the same, and where not first?

The events of a log are those that followed what *was* decided. Once a replay with other settings has decided something
else, later events no longer answer it; so what stands behind the first difference shows a tendency, not a course.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import BadDecisionLog, Step, decode_head, decode_steps
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from scheduler_svc.service import policy_config
from shared.config import SchedulerConfig
from shared.errors import ConfigError, QuireError, shorten

MAX_SHOWN = 5
Kinds = Counter[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Line `line` of the log, and what was decided now in place of what it says."""

    line: int
    step: Step
    replayed: list[d.Decision]


@dataclass(slots=True)
class Replay:
    """What a replay found. `changed` are the settings that were not those of the log, old and new."""

    changed: dict[str, tuple[object, object]]
    first: Difference | None = None
    num_events: int = 0
    num_different: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    policy_s: float = 0.0
    logged: Kinds = field(default_factory=Counter)
    replayed: Kinds = field(default_factory=Counter)

    @property
    def is_equal(self) -> bool:
        return self.first is None


def replay(path: Path, given: PolicyConfig) -> Replay:
    """Feed the log to a policy with its own settings, but for those `given` that are not the default.

    Raises:
        ConfigError: there is no such file.
        QuireError: it is no decision log.
    """
    try:
        with path.open("rb") as file:
            logged = decode_head(file.readline())
            config, changed = _change(logged, given)
            found, policy = Replay(changed), Policy(config)
            for line, step in enumerate(decode_steps(file), start=2):
                _compare(found, line, step, policy)
    except BadDecisionLog as error:
        raise QuireError(f"{shorten(path)}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--replay={shorten(path)}: {error.strerror}") from None
    return found


def format_replay(found: Replay) -> str:
    """A few lines."""
    span_s = found.last_s - found.first_s
    rate = found.num_events / found.policy_s if found.policy_s else 0.0
    lines = [f"settings       {name}: {old} in the log, {new} here" for name, (old, new) in found.changed.items()]
    lines.append(f"replayed       {found.num_events:,} events of {span_s:,.1f} s, {rate:,.0f} events/s")
    kinds = sorted(found.logged | found.replayed)
    lines += [f"{kind:<15}{found.logged[kind]:,} in the log, {found.replayed[kind]:,} here" for kind in kinds]
    if found.first is None:
        return "\n".join([*lines, "no difference"])
    first = found.first
    lines.append(f"different      answers to {found.num_different:,} events; the first is line {first.line}, at "
                 f"{first.step.now - found.first_s:,.3f} s, a {type(first.step.event).__name__}")  # fmt: skip
    lines += [f"  in the log   {text}" for text in _shown(first.step.decisions)]
    lines += [f"  here         {text}" for text in _shown(first.replayed)]
    if found.changed:
        lines.append("later events are still those that followed what was decided in the log")
    return "\n".join(lines)


def _change(logged: PolicyConfig, given: PolicyConfig) -> tuple[PolicyConfig, dict[str, tuple[object, object]]]:
    """The log's settings with those that were given, and what that changed."""
    default = policy_config(SchedulerConfig())
    changed = {}
    for field_ in dataclasses.fields(PolicyConfig):
        old, new = getattr(logged, field_.name), getattr(given, field_.name)
        if new != getattr(default, field_.name) and new != old:
            changed[field_.name] = (old, new)
    return dataclasses.replace(logged, **{name: new for name, (_, new) in changed.items()}), changed


def _compare(found: Replay, line: int, step: Step, policy: Policy) -> None:
    since = time.thread_time()
    decisions = policy.on_event(step.event, step.now)
    found.policy_s += time.thread_time() - since
    if found.num_events == 0:
        found.first_s = step.now
    found.last_s = step.now
    found.num_events += 1
    found.logged.update(type(decision).__name__ for decision in step.decisions)
    found.replayed.update(type(decision).__name__ for decision in decisions)
    if decisions != step.decisions:
        found.num_different += 1
        found.first = found.first or Difference(line, step, decisions)


def _shown(decisions: list[d.Decision]) -> list[str]:
    texts = [shorten(decision) for decision in decisions[:MAX_SHOWN]] or ["nothing"]
    more = len(decisions) - MAX_SHOWN
    return [*texts, f"and {more} more"] if more > 0 else texts
