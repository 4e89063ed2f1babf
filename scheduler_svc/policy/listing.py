"""What a report says about the requests that are assigned to its worker, and what its silence about one means.

Most of what a report lists has grown by some tokens and nothing else: those requests are *steady*, and all that is
looked at are their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.decisions import Decision, Recheck, RequeueOne
from scheduler_svc.policy import admission
from scheduler_svc.policy.state import LOOK_AHEAD_STEPS, NO_CLAIM, EntryKey, Load, Party, Request, Worker
from shared.messages import HeldRequest

GONE_S = 0.5
"""How long a worker that has applied a RunRequest may not list it before it is held to have forgotten it; the record
says sooner whether it has ended or was given back."""
MIN_UNLISTED_REPORTS = 2


@dataclass(slots=True, kw_only=True)
class Reading:
    """What is new in a report: tokens `served` and not charged yet, by party; requests whose `first_tokens`
    since their dispatch it shows; whether any `is_waiting`; and what to do about those that it does not list."""

    served: dict[Party, int] = field(default_factory=dict)
    first_tokens: list[Request] = field(default_factory=list)
    is_waiting: bool = False
    decisions: list[Decision] = field(default_factory=list)


def read(worker: Worker, now: float, *, lease_s: float) -> Reading:
    """Take over what the last report of `worker` says of each request: what it holds, claims and was served (charged to
    it, and not to its party yet). `Recheck` for those that have just vanished, `RequeueOne` for the forgotten.

    Args:
        lease_s: patience for a request of which it is not known whether the worker has read its RunRequest.
    """
    report, assigned, reading = worker.report, worker.assigned, Reading()
    assert report is not None
    served, listed, num_others = reading.served, set(), 0
    free, num_seqs, num_tokens, num_running = report.free_blocks, 0, 0, 0
    room, size = admission.headroom(worker), worker.hello.block_size
    least = max(room, LOOK_AHEAD_STEPS)
    for held in report.held:
        request = assigned.get(held.request_id)
        if request is None or request.attempt != held.attempt:
            continue
        listed.add(request)
        request.held, tokens = held, held.num_tokens
        num_tokens += tokens
        num_new = tokens - request.num_counted
        if request.is_steady and held.num_running and tokens + least <= request.plain_until:
            # What `claim` says of these; nearly all are like this.
            blocks = -(-(tokens + room) // size) - held.num_blocks
            if blocks < 0:  # noqa: PLR1730 - a call of max costs as much as all the rest
                blocks = 0
            request.claimed = blocks, 1
            free -= blocks
        else:
            _follow(worker, request, held, reading, now)
            request.claimed = blocks, seqs = admission.claim(worker, request, room)
            free -= blocks
            num_seqs += seqs
            num_running += held.num_running
            num_others += 1
            if held.num_running + held.num_waiting != request.num_open:
                continue  # some of its choices have ended since
        if num_new > 0:
            request.num_counted = tokens
            served[request.party] = served.get(request.party, 0) + num_new
    num_in_place = len(listed) - num_others
    worker.load = Load(free, num_seqs + num_in_place)
    worker.num_held_tokens, worker.num_held_running = num_tokens, num_running + num_in_place
    worker.stale.clear()
    if len(listed) < len(assigned):
        unlisted = [request for request in assigned.values() if request not in listed]
        reading.decisions = _miss(worker, unlisted, now, lease_s)
    return reading


def _follow(worker: Worker, request: Request, held: HeldRequest, reading: Reading, now: float) -> None:
    """Note what a report that lists `request` says of it beside its lengths."""
    assert worker.report is not None
    request.was_listed = True
    request.unlisted_reports, request.unlisted_since = 0, None
    if request.preempt_entry is not None and request.preempt_entry <= worker.applied:
        # The worker has read our Preempt and still holds the request: it found it void, or was to keep it.
        request.is_preempting, request.is_staying, request.preempt_entry = False, False, None
    if held.num_running > 0:
        request.waits_from = request.waits_since = None
    else:
        reading.is_waiting = True
        if request.waits_from is None:
            request.waits_from, request.waits_since = worker.report.num_steps, now
    is_whole = held.num_running + held.num_waiting == request.num_open
    if request.sent_at is not None and held.num_tokens > request.num_known and is_whole:
        reading.first_tokens.append(request)
    request.is_steady = held.num_running > 0 and request.preempt_entry is None and request.sent_at is None


def _miss(worker: Worker, unlisted: list[Request], now: float, lease_s: float) -> list[Decision]:
    gone: list[Request] = []
    found: list[Decision] = []
    for request in unlisted:
        request.held, request.is_steady, request.claimed = None, False, NO_CLAIM
        worker.stale.add(request)
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
