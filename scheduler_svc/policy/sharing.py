"""Which workers of a model hold which prefixes: those in their caches, and those of the requests assigned to them.

What is *cached* is told by reports, and makes a prompt cheap to compute there. What is *in use*, by requests that are
assigned to a worker with a prefix cache, is told by nobody but ourselves: another request that brings the same prefix
takes no blocks for it, and need not wait for a report to be sent where the first one went.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_svc.policy.prefix_index import PrefixIndex
from shared.ids import WorkerId
from shared.messages import WorkerReport
from shared.prefix import unpack

Names = Sequence[bytes]


class FleetPrefixes:
    """Of all workers of one model."""

    def __init__(self) -> None:
        self._cached = PrefixIndex()
        self._used = PrefixIndex()
        self._num_users: dict[WorkerId, dict[bytes, int]] = {}

    def take(self, report: WorkerReport, *, is_next: bool) -> None:
        """Take over what a report tells; one before it may be lost unless it `is_next`."""
        if not is_next:
            self._cached.forget(report.worker_id)
        if report.prefixes_here or report.prefixes_gone:
            self._cached.note(report.worker_id, unpack(report.prefixes_here), unpack(report.prefixes_gone))

    def use(self, worker_id: WorkerId, prompts: Iterable[Names]) -> None:
        """A request with prompts of these names was assigned to `worker_id`."""
        users = self._num_users.setdefault(worker_id, {})
        for names in prompts:
            self._used.note(worker_id, [name for name in names if name not in users], ())
            for name in names:
                users[name] = users.get(name, 0) + 1

    def release(self, worker_id: WorkerId, prompts: Iterable[Names]) -> None:
        """It has left `worker_id`."""
        users = self._num_users[worker_id]
        for names in prompts:
            for name in names:
                users[name] -= 1
                if users[name] == 0:
                    del users[name]
            self._used.note(worker_id, (), [name for name in names if name not in users])

    def forget(self, worker_id: WorkerId) -> None:
        """`worker_id` is gone, and all that was assigned to it has left it."""
        self._cached.forget(worker_id)
        self._used.forget(worker_id)
        self._num_users.pop(worker_id, None)

    def num_in_use(self, worker_id: WorkerId, names: Names) -> int:
        """How many of a prompt's first blocks requests on `worker_id` use."""
        users = self._num_users.get(worker_id, {})
        return next((depth for depth, name in enumerate(names) if name not in users), len(names))

    def holders(self, names: Names) -> dict[WorkerId, int]:
        """How many of a prompt's first blocks each worker has, cached or in use; those that have none are left out."""
        found = self._cached.longest(names)
        for worker_id, depth in self._used.longest(names).items():
            found[worker_id] = max(depth, found.get(worker_id, 0))
        return found
