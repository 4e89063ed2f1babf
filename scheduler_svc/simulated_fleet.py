"""The workers of a simulation at work: they read inboxes, make steps, commit tokens and report.

Steps are made in runs. Whoever changes a record that a worker owns, or reads what a worker has done, does it between
steps: `sync` brings the worker to now, `settle` lets the step under way be the last of its run, so that the worker
notices at the end of that step, as a commit would.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial

from scheduler_svc import decisions as d
from scheduler_svc.agenda import Agenda
from scheduler_svc.simulated_cell import SimulatedCell, SimulatedRecord
from scheduler_svc.simulated_prefix_cache import SharedNames
from scheduler_svc.simulated_run import Limits, Run, Start, plan_run
from scheduler_svc.simulated_worker import InboxMessage, SimulatedSequence, SimulatedWorker
from scheduler_svc.simulation_trace import CostModel, SimulatedRequest, SimulatedWorkerSpec, SimulationResult, party_of
from shared.ids import EntryId, RequestId, WorkerId
from shared.messages import PreemptRequest, RunRequest, WorkerHello

FINGERPRINT = "model"
MAX_RECENT = 256
"""First tokens whose delay is remembered."""


class SimulatedFleet:
    """All workers.

    Args:
        requests: what each request will do, by id; read only.
        names: of what they share.
        tell: gives the policy an event.
        can_jump: False: each step is made by itself. The result is the same.
    """

    def __init__(
        self,
        cell: SimulatedCell,
        agenda: Agenda,
        *,
        cost: CostModel,
        result: SimulationResult,
        requests: dict[RequestId, SimulatedRequest],
        names: SharedNames,
        tell: Callable[[d.Event], None],
        can_jump: bool,
    ) -> None:
        self._cell = cell
        self._agenda = agenda
        self._cost = cost
        self._result = result
        self._requests = requests
        self._names = names
        self._tell = tell
        self._can_jump = can_jump
        self.recent_ttfts: deque[float] = deque(maxlen=MAX_RECENT)

    def start(self, index: int, spec: SimulatedWorkerSpec) -> None:
        """A worker says hello and reports."""
        hello = WorkerHello(
            worker_id=WorkerId(f"w{index}:{index}"),
            model="m",
            fingerprint=FINGERPRINT,
            dtype="float32",
            device="cpu",
            max_model_len=spec.num_blocks * spec.block_size,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_num_seqs=spec.max_num_seqs,
            pid=1,
            host="h",
            num_swap_blocks=spec.num_swap_blocks,
            preemption_mode=spec.preemption_mode,
            has_prefix_cache=spec.has_prefix_cache,
        )
        worker = SimulatedWorker(hello, index, self._cost, max_num_batched_tokens=spec.max_num_batched_tokens)
        self._cell.workers[hello.worker_id] = worker
        if spec.death_s is not None:
            self._agenda.at(spec.death_s, partial(self._kill, worker))
        self._report(worker)
        self._begin(worker)

    def deliver(self, worker_id: WorkerId, entry_id: EntryId, message: InboxMessage) -> None:
        """`message` arrives in the worker's inbox after a while."""
        worker = self._cell.workers.get(worker_id)
        if worker is None or not worker.is_alive:
            return
        arrival_s = self._agenda.now + self._cost.inbox_delay_s
        worker.inbox.append((arrival_s, entry_id, message))
        if worker.run is not None and worker.run.cut_at(arrival_s, self._agenda.now):
            self._plan_end(worker, worker.run)
        self._agenda.at(arrival_s, partial(self._wake, worker))

    def sync(self, worker_id: WorkerId | None) -> None:
        """Account for all steps that the worker has finished by now."""
        worker = None if worker_id is None else self._cell.workers.get(worker_id)
        if worker is not None:
            self._sync(worker)

    def arrival_s(self, request_id: RequestId) -> float:
        """When the request arrived."""
        return self._requests[request_id].arrival_s

    def sync_all(self) -> None:
        for worker in self._cell.workers.values():
            self._sync(worker)

    def settle(self, worker_id: WorkerId | None) -> None:
        """What the worker owns has changed: it notices at the end of its step."""
        worker = None if worker_id is None else self._cell.workers.get(worker_id)
        if worker is not None:
            self.settle_lost(worker)

    def settle_lost(self, worker: SimulatedWorker) -> None:
        """The same for one that may have left the cell; it has been synced."""
        if worker.run is not None and worker.run.cut_after(self._agenda.now):
            self._plan_end(worker, worker.run)

    def drain(self, worker: SimulatedWorker) -> None:
        """The worker takes no more; its next reports say so."""
        worker.is_draining = worker.has_changed = True
        if worker.run is None:
            self._report(worker)

    def leave(self, worker: SimulatedWorker) -> bool:
        """Whether a draining worker has nothing left; it is gone then."""
        if worker.has_work or worker.inbox:
            return False
        worker.is_alive = False
        worker.num_runs += 1
        del self._cell.workers[worker.hello.worker_id]
        return True

    def _sync(self, worker: SimulatedWorker) -> None:
        if worker.run is not None:
            num_steps = worker.run.steps_until(self._agenda.now)
            self._result.num_steps += num_steps
            worker.advance(num_steps, self._note_tokens)

    def _note_tokens(self, sequence: SimulatedSequence, count: int) -> None:
        record = self._cell.records[sequence.request_id]
        record.num_tokens[sequence.choice] += count
        self._result.num_tokens += count
        self._result.num_computed += count
        self._result.served[party_of(record.summary)] += count

    def _kill(self, worker: SimulatedWorker) -> None:
        self._sync(worker)
        worker.is_alive, worker.run = False, None
        worker.num_runs += 1

    # Reports and inboxes.

    def _report(self, worker: SimulatedWorker) -> None:
        event = d.Reported(report=worker.report(self._agenda.now))
        self._agenda.after(self._cost.report_delay_s, partial(self._tell, event))

    def _report_if_due(self, worker: SimulatedWorker) -> None:
        limits, now = self._limits(worker), self._agenda.now
        has_grown = now >= limits.growth_s and worker.free_blocks <= limits.low_blocks
        if worker.has_changed or now >= limits.calm_s or has_grown:
            self._report(worker)

    def _limits(self, worker: SimulatedWorker) -> Limits:
        cost, free = self._cost, worker.reported_free
        return Limits(
            calm_s=worker.reported_at_s + (cost.calm_report_s if worker.is_calm else cost.busy_report_s),
            growth_s=worker.reported_at_s + cost.busy_report_s,
            low_blocks=-(-7 * free // 8) - 1,
        )

    def _report_idle(self, worker: SimulatedWorker, num_runs: int) -> None:
        if worker.is_alive and worker.num_runs == num_runs:
            self._report(worker)
            self._plan_idle_report(worker)

    def _plan_idle_report(self, worker: SimulatedWorker) -> None:
        period_s = self._cost.busy_report_s if worker.has_work else self._cost.idle_report_s
        self._agenda.after(period_s, partial(self._report_idle, worker, worker.num_runs))

    def _wake(self, worker: SimulatedWorker) -> None:
        if worker.is_alive and worker.run is None:
            self._apply_inbox(worker)
            self._report_if_due(worker)
            self._begin(worker)

    def _apply_inbox(self, worker: SimulatedWorker) -> None:
        while worker.inbox and worker.inbox[0][0] <= self._agenda.now:
            _, entry_id, message = worker.inbox.popleft()
            worker.mark_applied(entry_id)
            match message:
                case RunRequest():
                    self._take(worker, message)
                case PreemptRequest(request_id=request_id):
                    if worker.holds(request_id) and not worker.is_void(message):
                        self._preempt(worker, message)
                case _:
                    worker.drop(message.request_id)

    def _preempt(self, worker: SimulatedWorker, message: PreemptRequest) -> None:
        if message.keeps:
            worker.keep(message.request_id)
            return
        worker.drop(message.request_id)
        owner = worker.hello.worker_id
        self._cell.queue_again(message.request_id, owner, message.attempt, preempted=1, crashed=0)

    def _take(self, worker: SimulatedWorker, message: RunRequest) -> None:
        request_id = message.request_id
        if not self._cell.is_owner(worker.hello.worker_id, request_id, message.attempt):
            return
        record, request = self._cell.records[request_id], self._requests[request_id]
        prefix = () if worker.cache is None else self._names.of(request, worker.hello.block_size)
        for choice in message.choices:
            sequence = SimulatedSequence(
                request_id=request_id,
                attempt=message.attempt,
                choice=choice,
                order=(message.priority, message.rank, choice),
                num_prompt=request.prompt_len,
                num_known=request.prompt_len + record.num_tokens[choice],
                end=request.prompt_len + min(request.output_len, request.max_tokens),
                prefix=prefix,
            )
            worker.add(sequence)

    # Steps.

    def _begin(self, worker: SimulatedWorker) -> None:
        """Start the next run of steps, or wait for work."""
        worker.num_runs += 1
        for sequence in worker.admit():
            self._result.start_s.setdefault(sequence.request_id, self._agenda.now)
            self._result.num_queried += sequence.num_known
            self._result.num_found += sequence.num_found * worker.hello.block_size
        worker.run = self._equal_steps(worker) or self._one_step(worker)
        if worker.run is None:
            self._plan_idle_report(worker)
            return
        if worker.inbox:
            worker.run.cut_at(worker.inbox[0][0], self._agenda.now)
        self._agenda.at_step_end(
            worker.run.end_s, worker.index, worker.num_runs, partial(self._end_run, worker, worker.num_runs)
        )

    def _plan_end(self, worker: SimulatedWorker, run: Run) -> None:
        """`run` was cut: it ends earlier than was planned."""
        worker.num_runs += 1
        end = partial(self._end_run, worker, worker.num_runs)
        self._agenda.at_step_end(run.end_s, worker.index, worker.num_runs, end)

    def _equal_steps(self, worker: SimulatedWorker) -> Run | None:
        running = worker.running
        if not self._can_jump or not running or len(running) > worker.max_num_batched_tokens:
            return None
        if worker.copied != (0, 0) or not all(sequence.is_decoding for sequence in running):
            return None
        start = Start(
            now_s=self._agenda.now,
            step_s=self._cost.step_s + self._cost.token_s * len(running),
            free_blocks=worker.free_blocks,
            block_size=worker.hello.block_size,
        )
        max_steps = min(worker.num_steps_aside or sys.maxsize, *(s.end - s.num_known for s in running))
        run = plan_run([s.num_known for s in running], max_steps, start, self._limits(worker))
        if run is not None:
            worker.chunks = worker.plan()
        return run

    def _one_step(self, worker: SimulatedWorker) -> Run | None:
        before = worker.num_evictions
        worker.chunks = worker.plan()
        self._result.num_evictions += worker.num_evictions - before
        if not worker.chunks:
            return None
        num_tokens = sum(length for _, length in worker.chunks)
        step_s = self._cost.step_s + self._cost.token_s * num_tokens
        num_out, num_in = worker.take_copied()
        self._result.num_swapped_out += num_out
        self._result.num_swapped_in += num_in
        return Run([self._agenda.now + (step_s + (num_out + num_in) * self._cost.block_copy_s)])

    def _end_run(self, worker: SimulatedWorker, num_runs: int) -> None:
        if worker.num_runs != num_runs:
            return
        self._sync(worker)
        worker.run = None
        worker.num_steps += 1
        self._result.num_steps += 1
        for sequence, length in worker.chunks:
            sequence.num_computed += length
            self._result.num_computed += length
            if sequence.num_computed == sequence.num_known:
                self._commit(worker, sequence)
        self._apply_inbox(worker)
        self._report_if_due(worker)
        self._begin(worker)

    def _commit(self, worker: SimulatedWorker, sequence: SimulatedSequence) -> None:
        request_id = sequence.request_id
        if not self._cell.is_owner(worker.hello.worker_id, request_id, sequence.attempt):
            worker.drop(request_id)
            return
        record = self._cell.records[request_id]
        self._note_commit(record, sequence)
        sequence.num_known += 1
        sequence.is_decoding = True
        is_last = sequence.num_known >= sequence.end
        if is_last:
            worker.finish(sequence)
        if self._cell.commit(request_id, sequence.choice, is_last=is_last):
            self.note_end(request_id, "finished")
            ended = d.Ended(request_ids=(request_id,), completion_tokens=(sum(record.num_tokens),))
            self._agenda.after(self._cost.report_delay_s, partial(self._tell, ended))

    def _note_commit(self, record: SimulatedRecord, sequence: SimulatedSequence) -> None:
        is_first = record.num_tokens[sequence.choice] == 0
        self._result.num_tokens += 1
        self._result.served[party_of(record.summary)] += 1 + is_first * record.summary.prompt_len(sequence.choice)
        if sequence.request_id not in self._result.first_token_s:
            self._result.first_token_s[sequence.request_id] = self._agenda.now
            self.recent_ttfts.append(self._agenda.now - self._requests[sequence.request_id].arrival_s)

    def note_end(self, request_id: RequestId, reason: str) -> None:
        """Set down that a request has ended."""
        assert request_id not in self._result.ended, "one terminal event each"
        self._result.ended[request_id] = reason
        self._result.end_s[request_id] = self._agenda.now
