"""What the policy knows of each request and each worker; plain bookkeeping, no rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from scheduler_svc.policy.sharing import FleetPrefixes
from shared.bus import ChoiceState, RequestRecord
from shared.capacity import blocks_for, most_tokens
from shared.ids import EntryId, RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerHello, WorkerReport
from shared.prefix import unpack

EntryKey = tuple[int, int]
Party = tuple[int, str, str, str]
"""Who share one counter of served tokens: those of one class, model, tenant and user."""
_UNTOUCHED = ChoiceState()
LOOK_AHEAD_STEPS = 2
"""Ends so near count as free already: the freed slot must not wait for a report and a dispatch."""
MIN_HORIZON_STEPS = 4
MAX_HORIZON_STEPS = 32
LONGEST = 2**31
"""Tokens of a sequence that nobody asks for; all are shorter."""


def entry_key(entry_id: EntryId | str) -> EntryKey:
    """An inbox entry id as something that sorts; an empty id sorts first."""
    major, _, minor = entry_id.partition("-")
    return int(major or 0), int(minor or 0)


def rank_of(order: tuple[int, int]) -> int:
    """The standing order as one integer: earlier arrivals are lower.

    Args:
        order: (milliseconds, number within the millisecond). The result stays below 2**53, which Lua numbers hold.
    """
    return order[0] * 2048 + min(order[1], 2047)


class Phase(Enum):
    """Queued: waits for a place. Running: assigned to a worker. Unknown: a `Recheck` will tell."""

    QUEUED = "queued"
    RUNNING = "running"
    UNKNOWN = "unknown"


class OpenChoice(NamedTuple):
    """An unfinished choice of prompt `prompt`: `num_tokens` known (prompt and logged), `max_tokens` at most (prompt and
    output)."""

    num_tokens: int
    max_tokens: int
    prompt: int = 0


Claim = tuple[int, int]
"""(blocks, sequences) that an assigned request still will take of its worker beyond what it holds; negative blocks are
those that it gives back."""
NO_CLAIM: Claim = 0, 0


class Request:
    """One live request, at first as its submission leaves it.

    `entry` is where its RunRequest lies in its worker's inbox (None: dispatched by an earlier leader, or unconfirmed).
    `level` is its class, lower first: its priority, or what it has risen to by waiting (`queue.py`). `charged` tokens
    are counted to its tenant; once it was dispatched that is `num_served`, each prompt once and what is logged.
    Its `num_open` open choices have `num_known` tokens, and one of them `largest` at most; `num_counted` of the tokens
    that they come to have are counted to its party. Up to `plain_until` tokens its claim is as simple as can be.

    In this leader's seconds: `arrived_at`, until its first token is seen (None: it came before this leader);
    `deadline`; `due`, when its next token ought to be there; `blocked_from`, since when it is first in line and finds
    no room; `sent_at`, when it was dispatched, until its first token is seen.

    `held` is what the last report of its worker says of this attempt, None if it is not listed; `claimed` what it was
    counted with there last.

    `party` shares one counter of served tokens.

    `prefixes` are the names of each prompt's first blocks, none or one list a prompt; `num_shared` of its blocks were
    in use by others when it was assigned.

    `is_preempting` while a `Preempt` of ours is under way, at `preempt_entry` of the inbox; `is_staying`: with it the
    request stays with its worker. `preemptions` are those that its record counts, and `num_kept` that it stayed with
    its worker at, as far as this leader knows. `waits_from` is its worker's step count when a report first showed that
    none of its sequences runs, `waits_since` the time of that. `is_steady`: when last listed it ran, and there is
    nothing of it to follow but its lengths (`listing.py`).
    """

    __slots__ = (
        "arrived_at",
        "attempt",
        "blocked_from",
        "claimed",
        "crashes",
        "deadline",
        "due",
        "entry",
        "held",
        "is_preempting",
        "is_staying",
        "is_steady",
        "largest",
        "level",
        "lost_gateway",
        "num_counted",
        "num_kept",
        "num_known",
        "num_logged",
        "num_open",
        "num_served",
        "num_shared",
        "open_choices",
        "order",
        "orphan_since",
        "party",
        "phase",
        "plain_until",
        "preempt_entry",
        "preemptions",
        "prefixes",
        "queued_at",
        "rank",
        "request_id",
        "sent_at",
        "summary",
        "unlisted_reports",
        "unlisted_since",
        "waits_from",
        "waits_since",
        "was_listed",
        "worker_id",
    )

    def __init__(self, summary: SubmitRequest, order: EntryKey, now: float) -> None:
        self.summary = summary
        self.request_id = summary.request_id
        self.order = order
        self.rank = rank_of(order)
        has_names = len(summary.prefixes) == len(summary.prompt_lens)
        self.prefixes = tuple(map(unpack, summary.prefixes)) if has_names else ()
        self.num_shared = 0
        self.rise(summary.priority)
        self.queued_at = self.due = now
        self.arrived_at: float | None = now
        self.blocked_from: float | None = None
        self.sent_at: float | None = None
        self.phase = Phase.UNKNOWN
        self.attempt = 0
        self.deadline = now + summary.timeout_s
        self.worker_id: WorkerId | None = None
        self.orphan_since: float | None = None
        self.lost_gateway = False
        self.preemptions = self.num_kept = 0
        self.crashes = 0
        self.num_logged = self.num_served = self.num_known = self.num_counted = self.plain_until = 0
        self.leave_worker()
        self._count((_UNTOUCHED,) * summary.num_choices)

    @property
    def charged(self) -> int:
        """Tokens that are counted to its party."""
        return self.num_counted + self.num_served - self.num_known

    @property
    def standing(self) -> tuple[int, int]:
        """Its place in the standing order: the highest gives way first."""
        return self.level, self.rank

    def update(self, record: RequestRecord) -> None:
        """Take over what the record counts; phase and worker are the scheduler's to change."""
        self.attempt = record.attempt
        self.preemptions = record.preemptions + self.num_kept
        self.crashes = record.crashes
        self._count(record.choices)

    def _count(self, choices: Iterable[ChoiceState]) -> None:
        summary, charged = self.summary, self.charged
        open_choices, num_logged, num_known, largest = [], 0, 0, 0
        for number, state in enumerate(choices):
            num_tokens = state.num_tokens
            num_logged += num_tokens
            if state.is_open:
                prompt = number // summary.n
                length = summary.prompt_lens[prompt]
                open_choices.append(OpenChoice(length + num_tokens, length + summary.max_tokens, prompt))
                num_known += length + num_tokens
                largest = max(largest, length + summary.max_tokens)
        self.open_choices, self.num_open = tuple(open_choices), len(open_choices)
        self.num_logged = max(self.num_logged, num_logged)
        self.num_known, self.largest = num_known, largest
        self.num_served = sum(summary.prompt_lens) + self.num_logged
        self.set_charged(charged)

    def set_charged(self, charged: int) -> None:
        """So many tokens are counted to its party now."""
        self.num_counted = charged - self.num_served + self.num_known

    def rise(self, level: int) -> None:
        """Be of class `level` from now on."""
        summary = self.summary
        self.level = level
        self.party: Party = level, summary.fingerprint, summary.tenant, summary.user

    def keep(self) -> None:
        """Count that it gives way once more, which its record does not."""
        self.num_kept += 1
        self.preemptions += 1

    def leave_worker(self) -> None:
        """Forget where it ran."""
        self.worker_id = None
        self.held: HeldRequest | None = None
        self.entry: EntryKey | None = None
        self.was_listed = False
        self.waits_from: int | None = None
        self.waits_since: float | None = None
        self.unlisted_reports = 0
        self.unlisted_since: float | None = None
        self.claimed = NO_CLAIM
        self.is_preempting = self.is_staying = self.is_steady = False
        self.preempt_entry: EntryKey | None = None


class Load(NamedTuple):
    """A worker as the planner sees it.

    `free_blocks` after all that is assigned has grown by the headroom (may be negative); `num_seqs` assigned; both
    count what ends within the look-ahead as ended.
    """

    free_blocks: int
    num_seqs: int


class News:
    """What workers of one model tell whoever keeps them in order: who has `changed`, how many assigned requests there
    are of each class, and which prefixes are where."""

    __slots__ = ("changed", "levels", "prefixes")

    def __init__(self) -> None:
        self.changed: set[WorkerId] = set()
        self.levels: Counter[int] = Counter()
        self.prefixes = FleetPrefixes()


class Worker:
    """One worker; `report` is None until it has reported to this leader.

    `load` is what its report says less what requests have `claimed` since, but for those that are `stale`: they count
    with what they claimed before, and `admission.py` counts them again. `reported_at`: when this leader heard its last
    report; `applied`: the newest entry of its inbox that it had applied. `horizon`: steps that decisions look ahead,
    those of two report intervals within limits.
    `num_held_tokens` and `num_held_running` are sums over its requests that are listed.
    `longest`: tokens that one sequence may come to have alone; `num_resident` of them are in blocks at once (0: all).
    `is_plain`: a sequence holds just the blocks of its tokens, neither fewer nor some in reserve.

    Args:
        headroom: growth in tokens kept free for each sequence at admission; None: as the forecast says.
        news: told whenever what it holds has changed.
    """

    __slots__ = (
        "applied",
        "assigned",
        "headroom",
        "hello",
        "horizon",
        "is_plain",
        "load",
        "longest",
        "news",
        "num_held_running",
        "num_held_tokens",
        "num_resident",
        "report",
        "reported_at",
        "stale",
        "worker_id",
    )

    def __init__(self, hello: WorkerHello, headroom: int | None = None, news: News | None = None) -> None:
        self.hello = hello
        self.worker_id = hello.worker_id
        self.news = News() if news is None else news
        self.headroom = headroom
        self.report: WorkerReport | None = None
        self.reported_at: float | None = None
        self.applied: EntryKey = (0, 0)
        self.assigned: dict[RequestId, Request] = {}
        self.horizon = MIN_HORIZON_STEPS
        self.num_held_tokens = self.num_held_running = 0
        self.num_resident = hello.num_resident
        self.is_plain = not (hello.window or hello.reserved_tokens)
        self.longest = most_tokens(
            block_size=hello.block_size, num_blocks=hello.num_blocks, num_resident=self.num_resident, limit=LONGEST
        )
        self.load = Load(0, 0)
        self.stale: set[Request] = set()
        self.news.changed.add(self.worker_id)

    def touch(self, request: Request) -> None:
        """What `request`, which is assigned to it, takes of it may have changed."""
        self.stale.add(request)
        self.news.changed.add(self.worker_id)

    @property
    def num_running(self) -> int:
        """Sequences of its requests that run, as far as the last report tells."""
        return sum(request.held.num_running for request in self.assigned.values() if request.held is not None)

    @property
    def is_accepting(self) -> bool:
        """It has reported to this leader and does not drain."""
        return self.report is not None and not self.report.is_draining

    @property
    def is_leaving(self) -> bool:
        """It drains."""
        return self.report is not None and self.report.is_draining

    def take(self, report: WorkerReport) -> bool:
        """Take over what a report says of the worker as a whole; False if it is not newer than the last one, or says
        what cannot be."""
        last = self.report
        if (last is not None and report.seq <= last.seq) or not _is_possible(report, self.hello):
            return False
        for held in report.held:
            shared, others = held.num_shared_blocks, held.num_waiting | held.num_swapped_blocks
            if shared > held.num_blocks or (shared | held.num_tokens | held.num_running | others) < 0:
                return False  # what several are or-ed to is negative where one of them is
        if last is not None:
            num_steps = 2 * (report.num_steps - last.num_steps)
            self.horizon = min(MAX_HORIZON_STEPS, max(MIN_HORIZON_STEPS, num_steps))
        self.report, self.applied = report, entry_key(report.last_inbox_id)
        self.news.changed.add(self.worker_id)
        return True

    def assign(self, request: Request) -> None:
        """Count `request` as this worker's."""
        if request.request_id not in self.assigned and self.hello.has_prefix_cache:
            request.num_shared = self.num_shared(request)
            self.news.prefixes.use(self.worker_id, request.prefixes)
        request.phase = Phase.RUNNING
        request.worker_id = self.worker_id
        is_plain = self.is_plain and request.summary.num_choices == 1 and request.largest <= self.longest
        request.plain_until = request.largest if is_plain else 0
        if request.request_id not in self.assigned:
            self.news.levels[request.level] += 1
        self.assigned[request.request_id] = request
        self.touch(request)

    def drop(self, request: Request) -> None:
        """Count `request` no longer; a no-op if it is not this worker's."""
        if self.assigned.pop(request.request_id, None) is not None:
            if self.hello.has_prefix_cache:
                self.news.prefixes.release(self.worker_id, request.prefixes)
            free, num_seqs = self.load
            self.load = Load(free + request.claimed[0], num_seqs - request.claimed[1])
            request.num_shared = 0
            request.leave_worker()
            self.stale.discard(request)
            self.news.changed.add(self.worker_id)
            self.news.levels[request.level] -= 1
            if self.news.levels[request.level] == 0:
                del self.news.levels[request.level]

    def num_shared(self, request: Request) -> int:
        """Blocks that `request`, which is not assigned here, would share with those that are, one open choice for each
        prompt: it computes at least its last token. The other choices share with that one. None where a window frees
        blocks: which ones are still there is not known."""
        if not request.prefixes or not self.hello.has_prefix_cache or self.hello.window:
            return 0
        num_shared, size = 0, self.hello.block_size
        for choice in {choice.prompt: choice for choice in reversed(request.open_choices)}.values():
            depth = self.news.prefixes.num_in_use(self.worker_id, request.prefixes[choice.prompt])
            num_shared += min(depth, (choice.num_tokens - 1) // size)
        return num_shared

    def prompt_blocks(self, request: Request, prompt: int) -> int:
        """Blocks of a prompt that its choices have once between them for sure."""
        if self.hello.reserved_tokens or self.hello.window:
            return 0
        return (request.summary.prompt_lens[prompt] - 1) // self.hello.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds on this worker, which has computed most of them."""
        return blocks_for(num_tokens, self.hello.block_size, self.hello.window)


def _is_possible(report: WorkerReport, hello: WorkerHello) -> bool:
    """Whether its own numbers could be those of a worker with that hello; wrong ones would be believed for good."""
    major, _, minor = report.last_inbox_id.partition("-")
    return (
        0 <= report.free_blocks <= hello.num_blocks
        and 0 <= report.free_swap_blocks <= hello.num_swap_blocks
        and report.block_copy_s >= 0
        and report.token_s >= 0
        and report.num_steps >= 0
        and report.num_evictions >= 0
        and (major == "" or (major.isascii() and major.isdigit()))
        and (minor == "" or (minor.isascii() and minor.isdigit()))
    )
