"""What a report says about the requests that are assigned to its worker, and what its silence about one means."""

from __future__ import annotations

from scheduler_svc.decisions import Decision, Recheck, RequeueOne
from scheduler_svc.policy.state import EntryKey, Listed, Request, Worker

GONE_S = 0.5
"""How long a worker that has applied a RunRequest may not list it before it is held to have forgotten it; the record
says sooner whether it has ended or was given back."""
MIN_UNLISTED_REPORTS = 2


def compare(worker: Worker, listed: Listed, now: float, *, lease_s: float) -> list[Decision]:
    """Note who is listed; `Recheck` for those that have just vanished, `RequeueOne` for the forgotten.

    Args:
        listed: requests of `worker` that its last report lists.
        lease_s: patience for a request of which it is not known whether the worker has read its RunRequest.
    """
    assert worker.report is not None
    applied = worker.applied
    for request, held in listed:
        request.was_listed = True
        if request.unlisted_reports:
            request.unlisted_reports, request.unlisted_since = 0, None
        if request.preempt_entry is not None and request.preempt_entry <= applied:
            # The worker has read our Preempt and still holds the request: it found it void, or was to keep it.
            request.is_preempting, request.is_staying, request.preempt_entry = False, False, None
        if held.num_running > 0:
            request.waits_from = request.waits_since = None
        elif request.waits_from is None:
            request.waits_from, request.waits_since = worker.report.num_steps, now
    unlisted = [request for request in worker.assigned.values() if request.held is None]
    return _miss(worker, unlisted, now, lease_s) if unlisted else []


def _miss(worker: Worker, unlisted: list[Request], now: float, lease_s: float) -> list[Decision]:
    gone: list[Request] = []
    found: list[Decision] = []
    for request in unlisted:
        request.waits_from = request.waits_since = None
        if not _is_pending(request, worker.applied):
            is_gone = request.was_listed or request.entry is not None
            if _note_unlisted(request, now, patience_s=GONE_S if is_gone else lease_s):
                found.append(_requeue(worker, request))
            elif is_gone and request.unlisted_reports == 1:
                gone.append(request)
    if gone:
        found.append(Recheck(request_ids=tuple(request.request_id for request in gone)))
    return found


def _is_pending(request: Request, applied: EntryKey) -> bool:
    """Its RunRequest lies in the inbox, not applied yet."""
    return not request.was_listed and request.entry is not None and request.entry > applied


def _note_unlisted(request: Request, now: float, *, patience_s: float) -> bool:
    """Count one more report without it; whether patience is over."""
    request.unlisted_reports += 1
    if request.unlisted_since is None:
        request.unlisted_since = now
    return request.unlisted_reports >= MIN_UNLISTED_REPORTS and now - request.unlisted_since >= patience_s


def _requeue(worker: Worker, request: Request) -> RequeueOne:
    request.unlisted_reports, request.unlisted_since = 0, None
    return RequeueOne(request_id=request.request_id, owner=worker.worker_id, attempt=request.attempt)
