"""A policy with a manual clock, and short ways to tell it things."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from shared.bus import ChoiceState, RequestRecord, RequestState, WorkerPulse
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerHello, WorkerReport

GATEWAY = GatewayId("g:1")


def make_record(name: str, order: int = 1, **changes: Any) -> RequestRecord:
    """A queued record; `prompt_len`, `n`, `max_tokens`, `fingerprint`, `timeout_s`, `priority`, `tenant` and `user`
    change its summary."""
    summary = SubmitRequest(
        request_id=RequestId(name),
        tenant=changes.pop("tenant", "t"),
        model="m",
        fingerprint=changes.pop("fingerprint", "f"),
        prompt_lens=(changes.pop("prompt_len", 16),),
        n=changes.pop("n", 1),
        max_tokens=changes.pop("max_tokens", 16),
        timeout_s=changes.pop("timeout_s", 600.0),
        priority=changes.pop("priority", 0),
        user=changes.pop("user", ""),
    )
    record = RequestRecord(
        summary=summary,
        state=RequestState.QUEUED,
        order=(order, 0),
        attempt=0,
        owner=None,
        listeners=((GATEWAY, ConnectionId("c")),),
        orphan_ttl_s=0.0,
        preemptions=0,
        crashes=0,
        choices=tuple(ChoiceState() for _ in range(summary.num_choices)),
    )
    return replace(record, **changes)


def running(record: RequestRecord, worker: str, attempt: int = 1) -> RequestRecord:
    """The same request as its worker owns it."""
    return replace(record, state=RequestState.RUNNING, owner=WorkerId(worker), attempt=attempt)


def make_hello(name: str, **changes: Any) -> WorkerHello:
    """A worker of 16 blocks of 16 tokens and 4 slots."""
    hello = WorkerHello(
        worker_id=WorkerId(name),
        model="m",
        fingerprint="f",
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        block_size=16,
        num_blocks=16,
        max_num_seqs=4,
        pid=1,
        host="h",
    )
    return replace(hello, **changes)


def held(name: str, *, blocks: int, tokens: int, attempt: int = 1, seqs: int = 1) -> HeldRequest:
    """A running request in a report."""
    return HeldRequest(
        request_id=RequestId(name),
        attempt=attempt,
        num_blocks=blocks,
        num_tokens=tokens,
        num_running=seqs,
        num_waiting=0,
    )


@dataclass
class PolicyCell:
    """Keeps pulses and report numbers, confirms dispatches and preemptions as the bus would."""

    config: PolicyConfig = field(default_factory=PolicyConfig)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.policy = Policy(self.config)
        self._pulses: dict[str, WorkerPulse] = {}
        self._seqs: dict[str, int] = {}
        self._entries = 0
        self._attempts: dict[RequestId, int] = {}

    def feed(self, event: d.Event) -> list[d.Decision]:
        """The policy's decisions, each dispatch and preemption confirmed."""
        decisions = self.policy.on_event(event, self.now)
        for decision in list(decisions):
            self._entries += 1
            entry_id = EntryId(f"1-{self._entries}")
            if isinstance(decision, d.Dispatch):
                attempt = self._attempts[decision.request_id] = self._attempts[decision.request_id] + 1
                done = d.DispatchDone(request_id=decision.request_id, attempt=attempt, entry_id=entry_id)
                decisions += self.policy.on_event(done, self.now)
            elif isinstance(decision, d.Preempt):
                sent = d.PreemptSent(request_id=decision.request_id, entry_id=entry_id)
                decisions += self.policy.on_event(sent, self.now)
        return decisions

    @property
    def last_entry(self) -> str:
        """The newest inbox entry of any worker."""
        return f"1-{self._entries}"

    def observe(self, *records: RequestRecord) -> list[d.Decision]:
        for record in records:
            known = self._attempts.get(record.summary.request_id, 0)
            self._attempts[record.summary.request_id] = max(known, record.attempt)
        return self.feed(d.Observed(records=records))

    def submit(self, *records: RequestRecord) -> list[d.Decision]:
        """The wake-ups of these requests, whatever became of them since."""
        for record in records:
            self._attempts.setdefault(record.summary.request_id, record.attempt)
        return self.feed(d.Submitted(requests=tuple((record.summary, record.order) for record in records)))

    def see_workers(self, *hellos: WorkerHello, **pulse: Any) -> list[d.Decision]:
        """Exactly these workers, each beat raised; `pulse` changes what is shown of all."""
        seen = []
        for hello in hellos:
            known = self._pulses.get(hello.worker_id)
            beat = 0 if known is None else known.beat + 1
            shown = {"beat": beat, "num_steps": beat, "has_work": False} | pulse
            seen.append(WorkerPulse(hello=hello, **shown))
            self._pulses[hello.worker_id] = seen[-1]
        return self.feed(d.WorkersSeen(pulses=tuple(seen)))

    def report(self, name: str, *, free: int = 16, applied: str = "", **changes: Any) -> list[d.Decision]:
        """A report of worker `name`, one number up."""
        self._seqs[name] = self._seqs.get(name, 0) + 1
        report = WorkerReport(
            worker_id=WorkerId(name),
            seq=self._seqs[name],
            last_inbox_id=applied,
            free_blocks=free,
            num_blocks=16,
            num_steps=self._seqs[name],
        )
        return self.feed(d.Reported(report=replace(report, **changes)))

    def join(self, *names: str, **changes: Any) -> list[d.Decision]:
        """Workers appear and report themselves empty."""
        hellos = [make_hello(name, **changes) for name in names]
        decisions = self.see_workers(*hellos)
        for hello in hellos:
            decisions += self.report(hello.worker_id, free=hello.num_blocks, num_blocks=hello.num_blocks)
        return decisions


def dispatched(decisions: list[d.Decision]) -> list[tuple[str, str]]:
    """(request, worker) of each dispatch, in order."""
    return [(x.request_id, x.worker_id) for x in decisions if isinstance(x, d.Dispatch)]
