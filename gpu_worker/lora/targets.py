"""The projections of a model that an adapter may change, and what PEFT calls them."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.model.config import CheckpointConfig

Key = tuple[int, str]
"""Layer and projection: "qkv", "output", "gate_up" or "down"."""


@dataclass(frozen=True, slots=True)
class Target:
    """A projection: `in_features`, and the outputs of each of the parts that it was fused of."""

    in_features: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """What an adapter has factors for: parts [first, end) of a projection, which share their A."""

    projection: str
    first: int
    end: int


MODULES = {
    "self_attn.q_proj": Module("qkv", 0, 1),
    "self_attn.k_proj": Module("qkv", 1, 2),
    "self_attn.v_proj": Module("qkv", 2, 3),
    "self_attn.o_proj": Module("output", 0, 1),
    "mlp.gate_proj": Module("gate_up", 0, 1),
    "mlp.up_proj": Module("gate_up", 1, 2),
    "mlp.down_proj": Module("down", 0, 1),
}
FUSED_MODULES = {
    "self_attn.qkv_proj": Module("qkv", 0, 3),
    "self_attn.o_proj": Module("output", 0, 1),
    "mlp.gate_up_proj": Module("gate_up", 0, 2),
    "mlp.down_proj": Module("down", 0, 1),
}
"""Of checkpoints that hold them as one."""


def find_targets(config: CheckpointConfig) -> dict[Key, Target]:
    """All of a model's projections that can have adapters; experts can't."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    targets: dict[Key, Target] = {}
    for layer in range(config.num_layers):
        targets[layer, "qkv"] = Target(hidden, (q_size, kv_size, kv_size))
        targets[layer, "output"] = Target(q_size, (hidden,))
        if not config.experts or config.experts[layer] is None:
            targets[layer, "gate_up"] = Target(hidden, (inner, inner))
            targets[layer, "down"] = Target(inner, (hidden,))
    return targets


def modules_of(config: CheckpointConfig) -> dict[str, Module]:
    """By their names below `layers.<number>.` in the checkpoint."""
    return FUSED_MODULES if config.is_fused else MODULES
