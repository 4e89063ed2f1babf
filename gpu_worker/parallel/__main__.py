"""`python -m gpu_worker.parallel`: a rank of a worker, started by its first one (`ranks.py`), never by hand."""

from __future__ import annotations

import json
import sys

from gpu_worker.parallel.ranks import CONFIG_EXIT_CODE, Seat
from shared import logs, process
from shared.config import WorkerConfig, load
from shared.errors import ConfigError


def main() -> int:
    """Compute until the first rank has no more to do; the exit code: 0, 1 when a rank is lost, 2 for a setting."""
    process.pause_garbage_collector()
    import torch

    from gpu_worker.model.assembly import find_device, load_parts
    from gpu_worker.model.split import Split
    from gpu_worker.parallel.follower import follow
    from gpu_worker.parallel.team import Team

    config = load(WorkerConfig, sys.argv[1:], program="python -m gpu_worker.parallel")
    line = sys.stdin.readline()
    if not line:  # the first rank has gone before it had a place for this one
        return 0
    seat = Seat(**json.loads(line))
    level = config.process.log_level  # what is not an error the first rank says for all
    logs.set_up(f"gpu_worker.{seat.rank}", level if level == "debug" else "error")
    try:
        if seat.card is not None:
            torch.cuda.set_device(seat.card)
        is_cuda = find_device(config.engine.device).type == "cuda"
        team = Team(seat.rank, seat.size, seat.meeting, is_cuda=is_cuda)
        parts = load_parts(config, Split(seat.rank, seat.size, team))
        process.settle_memory()
        follow(team, parts)
    except ConfigError as error:
        print(f"gpu_worker: rank {seat.rank}: error: {error}", file=sys.stderr)
        return CONFIG_EXIT_CODE
    except RuntimeError:
        logs.get_log("ranks").error("rank.broken", exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    process.leave(main())
