"""What of a model each rank of a worker holds and computes (`--tensor-parallel-size`).

Design note. Ranks compute the same rows at the same time, each with its part of the weights:

* attention: each has its heads' queries and their keys and values, in its own cache. Where there are fewer key heads
  than ranks, several hold the same one. The output projection has the heads' columns, so its results are addends;
* feed-forward layers, experts too: each has its part of the inner numbers, so what `down` gives are addends;
* the vocabulary: a rank looks up its own ids (zeros for the others', so that these are addends, too) and computes their
  logits, which the first rank puts side by side.

All else is the same everywhere: norms, routers, residuals. Addends are added up in the order of the ranks, so that a
row's bits depend on that row only (`parallel/group.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from shared.config import EngineConfig
from shared.errors import ConfigError


class Exchange(Protocol):
    """What ranks give each other; each call is made by all of them."""

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in its dtype; `x` may be overwritten."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """On the first rank the `x` of all, [rows, size] each, side by side; on the others their own."""
        ...

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """`own` of `whole` rows or columns of a weight."""

    whole: int
    own: range


@dataclass(frozen=True, slots=True)
class Split:
    """Rank `rank` of `size`. Without an `exchange` it is the only one."""

    rank: int = 0
    size: int = 1
    exchange: Exchange | None = None

    def share(self, whole: int) -> Share:
        """This rank's equal part."""
        part = whole // self.size
        return Share(whole, range(self.rank * part, (self.rank + 1) * part))

    def kv_share(self, config: CheckpointConfig) -> Share:
        """This rank's rows of a key or value projection."""
        heads, size = config.num_kv_heads, config.head_size
        first = self.rank * heads // self.size
        return Share(heads * size, range(first * size, (first + max(1, heads // self.size)) * size))

    def vocabulary_share(self, whole: int) -> Share:
        """This rank's ids: as many as the others have, fewer at the end."""
        part = -(-whole // self.size)
        return Share(whole, range(self.rank * part, min(whole, (self.rank + 1) * part)))

    def own(self, config: CheckpointConfig) -> CheckpointConfig:
        """`config` with the sizes of this rank's layers; the vocabulary is the whole one."""
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
            experts=tuple(e if e is None else replace(e, size=e.size // self.size) for e in config.experts),
        )

    @property
    def add_up(self) -> Callable[[Tensor], Tensor] | None:
        """`Exchange.add_up`; None: there is nothing to add."""
        return None if self.exchange is None else self.exchange.add_up

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return number if self.exchange is None else self.exchange.least(number)


WHOLE = Split()
"""One rank, which has all."""


class Vocabulary:
    """Embeddings and logits of `size` ids, of which each rank has its share."""

    def __init__(self, size: int, split: Split = WHOLE) -> None:
        self._size, self._exchange = size, split.exchange
        self._own, self._part = split.vocabulary_share(size).own, -(-size // split.size)

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """[rows] → [rows, hidden], which the caller may change. `table`: this rank's rows of the embedding."""
        if self._exchange is None:
            return F.embedding(ids, table)
        own = ids - self._own.start
        is_elsewhere = (own < 0) | (own >= len(self._own))
        rows = F.embedding(own.masked_fill(is_elsewhere, 0), table)
        return self._exchange.add_up(rows.masked_fill_(is_elsewhere[:, None], 0))

    def join(self, logits: Tensor) -> Tensor:
        """[rows, own ids] → [rows, ids] on the first rank; on the others nothing of use."""
        if self._exchange is None:
            return logits
        return self._exchange.join(F.pad(logits, (0, self._part - len(self._own))))[:, : self._size]


def check_ranks(config: CheckpointConfig, engine: EngineConfig) -> None:
    """Raise `ConfigError` unless several ranks can compute the model with what these settings ask for."""
    flag = f"--tensor-parallel-size={engine.tensor_parallel_size}"
    if config.scheme is not None:
        raise ConfigError(f"{flag}: the checkpoint is quantized ({config.scheme.method}, {config.scheme.kind}), which "
                          "only one rank computes; leave the flag out, or take one of floats, with int8 or int4 at "
                          "load if need be")  # fmt: skip
    if config.is_foreign:
        raise ConfigError(f"{flag}: transformers computes {config.architecture} (--model-impl), in one rank only; "
                          "leave the flag out, or take one of quire's own model families")  # fmt: skip
    if engine.enable_lora:
        raise ConfigError(f"{flag}: adapters (--enable-lora) are for one rank only; leave one of the two flags out")
    check_split(config, engine.tensor_parallel_size)


def check_split(config: CheckpointConfig, size: int) -> None:
    """Raise `ConfigError` unless the model can be divided among `size` ranks."""
    problem = _find_problem(config, size)
    if problem:
        fitting = [str(n) for n in range(1, config.num_heads + 1) if not _find_problem(config, n)]
        raise ConfigError(
            f"--tensor-parallel-size={size}: {config.architecture} has {problem}; sizes that fit: {', '.join(fitting)}"
        )


def _find_problem(config: CheckpointConfig, size: int) -> str:
    """What of `config` is not divided by `size`; empty: all is."""
    kv_heads = config.num_kv_heads
    if config.num_heads % size:
        return f"{config.num_heads} attention heads, which do not divide among {size} ranks"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key heads, which neither divide among {size} ranks nor divide them"
    inner = {config.intermediate_size if e is None else e.size for e in config.experts or (None,)}
    if any(n % size for n in inner):
        return f"feed-forward layers of {' and '.join(map(str, sorted(inner)))}, which do not divide by {size}"
    if not Split(size - 1, size).vocabulary_share(config.vocab_size).own:
        return f"{config.vocab_size} token ids, too few for {size} ranks"
    return ""
