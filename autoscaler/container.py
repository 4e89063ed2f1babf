"""What the autoscaler knows of a container, and what it can do to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import QuireError

HOST_NAME_LENGTH = 12
"""Of a container's id, these digits are its host name, unless it was given another one."""
_ENDED = ("exited", "dead", "removing")


class EngineError(QuireError):
    """Docker cannot be asked, or refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of the service. `state` is Docker's word; `is_ours`: made by an autoscaler, not by compose."""

    id: str
    name: str
    number: int
    state: str
    is_ours: bool

    @property
    def host_name(self) -> str:
        """What a worker in it calls its host."""
        return self.id[:HOST_NAME_LENGTH]

    @property
    def has_ended(self) -> bool:
        """Nothing runs in it, and nothing will by itself."""
        return self.state in _ENDED


class WorkerContainers(Protocol):
    """The containers of one service of one compose project, and no others. All methods block for as long as the engine
    takes, may be called by several threads, and raise `EngineError`."""

    def find(self) -> Sequence[Container]:
        """All of them, ended ones too, by number."""
        ...

    def add(self, template: Container, number: int) -> bool:
        """Start one like `template`; False when its name is taken already."""
        ...

    def start(self, container: Container) -> None:
        """Start one that was made and not started; no effect when it runs or is gone."""
        ...

    def stop(self, container: Container) -> None:
        """Let it drain and end, then remove it; no effect when it is gone."""
        ...

    def remove(self, container: Container) -> None:
        """Remove one that has ended; no effect when it is gone or runs."""
        ...
