"""What a scheduler writes down of its decisions, and that it serves on whatever becomes of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import BadDecisionLog, decode_head, decode_steps, encode_head, encode_step
from scheduler_svc.decision_log import DecisionLog
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from shared.bus import Bus, WorkerPulse
from shared.ids import GatewayId, RequestId
from shared.messages import WorkerReport
from tests.scheduler_svc.cell import held, make_hello, make_record, running
from tests.scheduler_svc.service_cell import service_cell
from tests.waiting import wait_until_async

EVENTS: list[d.Event] = [
    d.Observed(records=(make_record("a"), running(make_record("b", n=2, prompt_len=7), "w:1", attempt=3))),
    d.Submitted(requests=((make_record("c").summary, (12345, 6)),)),
    d.Ended(request_ids=(RequestId("a"), RequestId("b")), completion_tokens=(1, 2)),
    d.WorkersSeen(pulses=(WorkerPulse(hello=make_hello("w:1"), beat=1, num_steps=2, has_work=True),)),
    d.GatewaysSeen(beats={GatewayId("g:1"): 7}),
    d.GatewayRemoved(orphans=(RequestId("a"),)),
    d.Reported(
        report=WorkerReport(
            worker_id=make_hello("w:1").worker_id,
            seq=1,
            last_inbox_id="5-0",
            free_blocks=3,
            num_blocks=16,
            num_steps=9,
            held=(held("a", blocks=2, tokens=20),),
        )
    ),
    d.Tick(),
]


def test_what_is_written_is_read_as_it_was() -> None:
    """Events, decisions, times and settings should come back equal, floats to the last bit."""
    config = PolicyConfig(max_preemptions=3, tenant_weights={"a": 0.1}, admission_headroom=None)
    assert decode_head(encode_head(config)) == config
    decisions: list[d.Decision] = [
        d.Dispatch(request_id=RequestId("a"), worker_id=make_hello("w:1").worker_id, rank=2**52 + 1, priority=-1),
        d.Recheck(request_ids=(RequestId("a"), RequestId("b"))),
        d.Reject(request_id=RequestId("c"), message="zu groß\n"),
    ]
    times = [0.1 + 0.2 * i for i in range(len(EVENTS))]
    lines = [encode_step(now, event, decisions) for now, event in zip(times, EVENTS, strict=True)]
    read = list(decode_steps(lines))
    assert [step.now for step in read] == times
    assert [step.event for step in read] == EVENTS
    assert all(step.decisions == decisions for step in read)


@pytest.mark.parametrize("line", [b"", b"{}\n", b"[1]\n", b"\xff\n", b'{"log": "quire decisions", "version": 2}\n'])
def test_what_is_no_log_is_refused(line: bytes) -> None:
    """A file of something else, or of another version, should be refused by name, not with a traceback."""
    with pytest.raises(BadDecisionLog, match="line 1: not a decision log"):
        decode_head(line)


def test_a_broken_line_is_named_and_a_cut_one_left_out() -> None:
    """The last line may be cut off by a full disk; any other that is broken should be named."""
    whole = encode_step(1.0, d.Tick(), [])
    assert len(list(decode_steps([whole, whole[:-5]]))) == 1
    with pytest.raises(BadDecisionLog, match="line 3: "):
        list(decode_steps([whole, whole[:20] + b"\n", whole]))
    with pytest.raises(BadDecisionLog, match="line 2: "):
        list(decode_steps([whole.replace(b"Tick", b"Tock")]))


def read(path: Path) -> list[d.Event]:
    with path.open("rb") as file:
        decode_head(file.readline())
        return [step.event for step in decode_steps(file)]


def test_each_term_begins_a_file_and_the_last_is_kept(tmp_path: Path) -> None:
    """A new leader should write a file of its own; the one before should stay as FILE.1, older ones go."""
    log = DecisionLog(tmp_path / "log", 1_000_000)
    for count in (1, 2, 3):
        log.begin(PolicyConfig())
        for _ in range(count):
            log.note(1.0, d.Tick(), [])
    log.close()
    assert read(tmp_path / "log") == [d.Tick()] * 3
    assert read(tmp_path / "log.1") == [d.Tick()] * 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_ends_at_its_size(tmp_path: Path) -> None:
    """What fits should be there from the beginning and whole; the next term should be written again."""
    log = DecisionLog(tmp_path / "log", 2000)
    log.begin(PolicyConfig())
    for _ in range(1000):
        log.note(1.0, d.Tick(), [])
    log.begin(PolicyConfig())
    log.note(1.0, d.Tick(), [])
    log.close()
    assert (tmp_path / "log.1").stat().st_size <= 2000
    assert 10 < len(read(tmp_path / "log.1")) < 1000
    assert read(tmp_path / "log") == [d.Tick()]


FULL = """
import resource, sys
from pathlib import Path
from scheduler_svc import decisions as d
from scheduler_svc.decision_log import DecisionLog
from scheduler_svc.policy.scheduler import PolicyConfig

log = DecisionLog(Path(sys.argv[1]), 10**9)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # a write beyond is refused, as by a full disk
log.begin(PolicyConfig())
for _ in range(9000):
    log.note(1.0, d.Tick(), [])
log.close()
print("went on", log._thread.is_alive())
"""


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    """Writes that the disk refuses should be let go of: neither noting nor closing should raise or hang, and what was
    written before should be there."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "went on False\n"
    assert 10 < len(read(tmp_path / "log")) < 100


def test_a_folder_that_is_gone_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    """Should the file not even be made, nothing should come of it but the missing file."""
    log = DecisionLog(tmp_path / "gone" / "log", 10**9)
    log.begin(PolicyConfig())
    log.note(1.0, d.Tick(), [])
    log.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_served_cell_can_be_replayed(bus: Bus, tmp_path: Path) -> None:
    """With requests, preemption-free ends, a cancel and a worker that dies, a fresh policy should decide the very same
    when it is fed what the service wrote down."""
    path = tmp_path / "log"
    async with service_cell(bus, decision_log=str(path), worker_lease_s=0.6) as cell:
        scheduler, stop, _ = cell.start_scheduler()
        worker, _ = cell.start_worker("a:1")
        ids = [await cell.submit() for _ in range(12)]
        await cell.wait_for_attempt(worker, ids[0], 1)
        await worker.finish(ids[0])
        await bus.end(ids[1], "cancelled")
        mortal, task = cell.start_worker("b:1")

        async def has_work() -> bool:
            return bool(mortal.held)

        await wait_until_async(has_work, description="the second worker has work")
        await cell.kill(task)

        async def has_finished_all() -> bool:
            for request_id in list(worker.held):
                await worker.finish(request_id)
            return not await bus.list_live()

        await wait_until_async(has_finished_all, description="the first worker finishes all")
        stop.set()
        await scheduler
    count, kinds = 0, set()
    with path.open("rb") as file:
        policy = Policy(decode_head(file.readline()))
        for step in decode_steps(file):
            assert step.decisions == policy.on_event(step.event, step.now)
            kinds |= {type(decision) for decision in step.decisions}
            count += 1
    assert count > 20
    assert {d.Dispatch, d.Requeue} <= kinds
