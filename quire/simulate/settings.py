"""What can be set of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.policy.fleet import TOKENS_PER_SEQUENCE
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.service import policy_config
from scheduler_svc.simulated_autoscaler import Autoscaling
from scheduler_svc.simulation_trace import CostModel, SimulatedWorkerSpec
from shared.config import ScalingConfig, SchedulerConfig, SchedulingConfig
from shared.flags import setting
from shared.preemption import PREEMPTION_MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficConfig:
    """Traffic."""

    requests: int = setting(1000, "requests that arrive", minimum=1, maximum=10_000_000)
    seed: int = setting(0, "of all that is drawn; the same seed gives the same run", minimum=0)
    load: float = setting(0.9, "arrivals as a share of what all workers can do at best", minimum=0.001, maximum=1000)
    rate: float | None = setting(None, "requests a second, in place of --load", minimum=1e-6, maximum=1e6)
    arrivals: str = setting("poisson", "how they come: one by one at random, as many as --burst at a time, or "
                            "more and fewer (a fifth to nine fifths) over --day-s",
                            choices=("poisson", "bursts", "daily"))  # fmt: skip
    burst: int = setting(50, "requests that arrive together, with --arrivals bursts", minimum=1)
    day_s: float = setting(3600.0, "length of a day, with --arrivals daily", minimum=1, maximum=31_536_000)
    prompt_len: int = setting(128, "mean tokens of a prompt", minimum=1, maximum=1_000_000)
    output_len: int = setting(128, "mean tokens of an output", minimum=1, maximum=1_000_000)
    spread: float = setting(0.8, "of both lengths: sigma of a log-normal distribution; 0: all are equal", minimum=0,
                            maximum=3)  # fmt: skip
    max_tokens: int = setting(1024, "that each request asks for; outputs end before", minimum=1, maximum=1_000_000)
    tenants: tuple[str, ...] = setting(("t",), "tenants that send, NAME or NAME:SHARE of the requests (see "
                                       "--tenant-weights for what they get)", may_be_empty=False)  # fmt: skip
    classes: tuple[str, ...] = setting(("0",), "priorities of requests, lower first: PRIORITY or PRIORITY:SHARE",
                                       may_be_empty=False)  # fmt: skip
    shared_prefixes: str = setting("", "N:TOKENS: each prompt begins with one of N prefixes of so many tokens, in "
                                   "front of its own --prompt-len; --load does not count them")  # fmt: skip
    prefix_skew: float = setting(0.0, "prefix i comes 1 / i^SKEW times as often as the first, as by Zipf; 0: all come "
                                 "equally often", minimum=0, maximum=10)  # fmt: skip
    request_timeout_s: float = setting(600.0, "deadline of a request", minimum=0.1, maximum=31_536_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """Workers.

    The costs fit a 0.5B model in bfloat16 on two cores: a step took 27.9 ms with 8 rows, 71.3 with 32 and 222 with 128
    (docs/performance.md).
    """

    workers: int = setting(4, "workers, at the beginning", minimum=1, maximum=100_000)
    start_s: float = setting(20.0, "what a worker takes from the wish to its first report, with --autoscale", minimum=0,
                             maximum=86_400)  # fmt: skip
    num_blocks: int = setting(1024, "KV blocks of each", minimum=1)
    block_size: int = setting(16, "tokens in a KV block", minimum=1, maximum=256)
    max_num_seqs: int = setting(16, "most sequences in one step", minimum=1, maximum=4096)
    max_num_batched_tokens: int = setting(512, "most tokens in one step", minimum=1)
    step_ms: float = setting(15.0, "cost of a step by itself", minimum=0.001)
    token_ms: float = setting(1.6, "cost of each of its tokens", minimum=0)
    swap_blocks: int = setting(0, "blocks that fit into the host memory of each; 0: who gives way is computed again",
                               minimum=0)  # fmt: skip
    copy_ratio: float = setting(0.1, "cost of copying a block out and back in, over that of computing its tokens",
                                minimum=0, maximum=1e6)  # fmt: skip
    preemption_mode: str = setting("auto", "what becomes of who gives way: copied to host memory while there is room, "
                                   "computed again, or the cheaper of the two", choices=PREEMPTION_MODES)  # fmt: skip
    enable_prefix_caching: bool = setting(True, "find what was computed of prefixes before, with --shared-prefixes")
    message_ms: float = setting(2.0, "how long a report or a command is under way", minimum=0, maximum=10_000)

    def spec(self, *, has_prefixes: bool = False) -> SimulatedWorkerSpec:
        """Each worker; `has_prefixes`: there is something to find in its prefix cache."""
        return SimulatedWorkerSpec(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_swap_blocks=self.swap_blocks,
            preemption_mode=self.preemption_mode,
            has_prefix_cache=self.enable_prefix_caching and has_prefixes,
        )

    def autoscaling(self, config: AutoscaleConfig | None, spec: SimulatedWorkerSpec) -> Autoscaling | None:
        """How workers, all as `spec`, come and go; None: they don't."""
        return None if config is None else Autoscaling(config=config, spec=spec, start_s=self.start_s)

    def cost(self) -> CostModel:
        """What its steps and messages take."""
        message_s = self.message_ms / 1000
        return CostModel(
            step_s=self.step_ms / 1000,
            token_s=self.token_ms / 1000,
            block_copy_s=self.copy_ratio * self.block_size * self.token_ms / 1000 / 2,
            report_delay_s=message_s,
            inbox_delay_s=message_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """All settings of `quire simulate`."""

    replay: str = setting("", "feed this decision log to a fresh policy instead and compare; flags of the scheduler "
                          "that are not the default replace the settings in the log")  # fmt: skip
    json: str = setting("", "also write all figures to this file")
    plot: str = setting("", "also write a plot of queue, KV cache and tenants over time to this folder")
    tokens_per_sequence: float = setting(float(TOKENS_PER_SEQUENCE), "with --shared-prefixes, tokens of a prefix that "
                                         "make up for one sequence more on a worker; 0: go where the prefix is, 1e9: "
                                         "where fewest run", minimum=0, maximum=1e9)  # fmt: skip
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    fleet: WorkersConfig = field(default_factory=WorkersConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)

    def policy(self) -> PolicyConfig:
        """The scheduler's."""
        policy = policy_config(SchedulerConfig(scheduling=self.scheduling, scaling=self.scaling))
        return replace(policy, tokens_per_sequence=self.tokens_per_sequence)
