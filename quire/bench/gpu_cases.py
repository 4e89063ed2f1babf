"""What `quire bench gpu` times: each kernel at the sizes of an 8B model, with the bytes and operations it cannot do
without (docs/kernels.md has the formulas), and a piece of its result beside the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import sampling
from kernels.expert_matmul import expert_mlp, expert_mlp_reference
from kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference
from kernels.int4_matmul import PACKED_COLUMNS, PER_WORD, Int4Weight, int4_matmul, int4_matmul_reference
from kernels.kv_copy import kv_copy
from kernels.kv_write import WriteSlots, kv_write
from kernels.paged_attention import PagedBatch, paged_attention, paged_attention_reference
from kernels.rms_norm import add_rms_norm, rms_norm_reference
from kernels.rotary import make_cos_sin, rotary, rotary_reference, take_turns
from kernels.silu_mul import silu_mul, silu_mul_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of one layer, and where its tensors lie."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocab: int = 128256
    experts: int = 8
    experts_used: int = 2
    weight_group: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One kernel at one size.

    Attributes:
        run: one call, which may change what it is given.
        check: (expected, actual) of a call or a part of it.
        moved_bytes, operations: the least it has to read and write, and to compute in matrix products.
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], tuple[Tensor, Tensor]]
    moved_bytes: int
    operations: int = 0


def attention_case(
    name: str, chunks: list[tuple[int, int]], sizes: ModelSizes, *, softcap: float | None = None
) -> KernelCase:
    """Paged attention of chunks (context, rows), their blocks shuffled, scores softcapped or not."""
    device, block_size = torch.device(sizes.device), sizes.block_size
    counts = [-(-context // block_size) for context, _ in chunks]
    ids = torch.split(torch.randperm(sum(counts), device=device, dtype=torch.int32), counts)
    tables = torch.zeros((len(chunks), max(counts)), dtype=torch.int32, device=device)
    for table, own in zip(tables, ids, strict=True):
        table[: len(own)] = own
    blocks = _random(sizes, sum(counts), 2, block_size, sizes.kv_heads, sizes.head_size)
    query = _random(sizes, sum(rows for _, rows in chunks), sizes.heads, sizes.head_size)
    starts = torch.tensor([0, *(rows for _, rows in chunks)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    contexts = torch.tensor([context for context, _ in chunks], dtype=torch.int32)
    batch = PagedBatch(starts.to(device), contexts.to(device), tables, block_size)
    scale = sizes.head_size**-0.5

    def run() -> Tensor:
        return paged_attention(query, blocks[:, 0], blocks[:, 1], batch, scale, softcap=softcap)

    def check() -> tuple[Tensor, Tensor]:
        context, last = chunks[-1][0], query[-1:]
        alone = PagedBatch(torch.tensor([0, 1]), torch.tensor([context]), tables[-1:], block_size)
        keys, values = blocks[:, 0], blocks[:, 1]
        return paged_attention_reference(last, keys, values, alone, scale, softcap=softcap), run()[-1:]

    seen = sum(rows * context - rows * (rows - 1) // 2 for context, rows in chunks)
    keys = sum(context for context, _ in chunks) * sizes.kv_heads * sizes.head_size * 2
    return KernelCase(
        name=name,
        run=run,
        check=check,
        moved_bytes=(keys + 2 * query.numel()) * sizes.dtype.itemsize,
        operations=4 * sizes.heads * sizes.head_size * seen,
    )


def row_cases(rows: int, sizes: ModelSizes) -> Iterator[KernelCase]:
    """Norm, gate and rotation of `rows` rows."""
    width = sizes.dtype.itemsize
    x, residual, weight = (
        _random(sizes, *shape) for shape in ((rows, sizes.hidden), (rows, sizes.hidden), (sizes.hidden,))
    )
    total = x + residual
    yield KernelCase(
        name=f"add and norm, {rows} rows",
        run=lambda: add_rms_norm(x, residual, weight, 1e-5),
        check=lambda: (rms_norm_reference(total, weight, 1e-5), add_rms_norm(x, total - x, weight, 1e-5)),
        moved_bytes=4 * x.numel() * width,
    )
    gate_up = _random(sizes, rows, 2 * sizes.ffn)
    yield KernelCase(
        name=f"silu·mul, {rows} rows",
        run=lambda: silu_mul(gate_up),
        check=lambda: (silu_mul_reference(gate_up), silu_mul(gate_up)),
        moved_bytes=3 * rows * sizes.ffn * width,
    )
    rotated = _random(sizes, rows, sizes.heads + sizes.kv_heads, sizes.head_size)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, sizes.head_size, 2, device=sizes.device) / sizes.head_size)
    table, positions = make_cos_sin(frequencies, rows), torch.arange(rows, device=sizes.device)
    turns = take_turns(table, positions)

    def check_rotary() -> tuple[Tensor, Tensor]:
        expected, actual = rotary_reference(rotated, positions, table), rotated.clone()
        rotary(actual, turns)
        return expected, actual

    yield KernelCase(
        name=f"rotary, {rows} rows",
        run=lambda: rotary(rotated, turns),
        check=check_rotary,
        moved_bytes=2 * rotated.numel() * width + rows * sizes.head_size * 4,
    )


def cache_cases(rows: int, sizes: ModelSizes) -> Iterator[KernelCase]:
    """Write `rows` tokens into the cache; copy as many blocks."""
    blocks = _random(sizes, 2 * rows, 2, sizes.block_size, sizes.kv_heads, sizes.head_size)
    key, value = (_random(sizes, rows, sizes.kv_heads, sizes.head_size) for _ in range(2))
    at = torch.randperm(blocks.shape[0] * sizes.block_size, device=sizes.device)[:rows]
    slots = WriteSlots(at, sizes.block_size)

    def write() -> None:
        kv_write(key, value, blocks[:, 0], blocks[:, 1], slots)

    def check_write() -> tuple[Tensor, Tensor]:
        write()
        return value, blocks[slots.index[0], 1, slots.index[1]]

    yield KernelCase(
        name=f"kv write, {rows} rows", run=write, check=check_write, moved_bytes=4 * key.numel() * sizes.dtype.itemsize
    )
    ids = torch.randperm(blocks.shape[0], device=sizes.device)

    def copy() -> None:
        kv_copy(blocks, blocks, ids[:rows], ids[rows:])

    def check_copy() -> tuple[Tensor, Tensor]:
        copy()
        return blocks[ids[:rows]], blocks[ids[rows:]]

    moved = 2 * rows * blocks[0].numel() * sizes.dtype.itemsize
    yield KernelCase(name=f"block copy, {rows} blocks", run=copy, check=check_copy, moved_bytes=moved)


def sampling_cases(rows: int, sizes: ModelSizes) -> Iterator[KernelCase]:
    """Greedy choice and the draw of `rows` rows; both have to read the logits once."""
    logits = torch.randn(rows, sizes.vocab, device=sizes.device)
    numbers = torch.rand(rows, dtype=torch.float64, device=sizes.device)
    once = logits.numel() * 4
    yield KernelCase(
        name=f"greedy, {rows} rows",
        run=lambda: sampling.greedy(logits),
        check=lambda: (sampling.greedy_reference(logits), sampling.greedy(logits)),
        moved_bytes=once,
    )
    yield KernelCase(
        name=f"draw, {rows} rows",
        run=lambda: sampling.draw(logits, numbers),
        check=lambda: (sampling.draw_reference(logits[:1], numbers[:1]).to(logits.device),
                       sampling.draw(logits, numbers)[:1]),
        moved_bytes=once,
    )  # fmt: skip


def product_cases(rows: int, sizes: ModelSizes) -> Iterator[KernelCase]:
    """Gate and up in one product with a quantized weight: 4 bits in groups with zero points, and fp8."""
    out_features, in_features, device = 2 * sizes.ffn, sizes.hidden, sizes.device
    x, group = _random(sizes, rows, in_features), sizes.weight_group
    groups = -(-in_features // group)
    num_words = -(-in_features // PACKED_COLUMNS) * (PACKED_COLUMNS // PER_WORD)
    weight = Int4Weight(
        words=torch.randint(-(2**31), 2**31, (num_words, out_features), device=device, dtype=torch.int32),
        scales=(torch.rand(groups, out_features, device=device) / in_features**0.5 / 8).half(),
        zeros=torch.randint(0, 16, (groups, out_features), device=device, dtype=torch.uint8),
        in_features=in_features,
        group=group,
    )
    assert weight.zeros is not None
    moved, operations = x.numel() + rows * out_features, 2 * rows * in_features * out_features
    kept = out_features * in_features // 2 + 2 * weight.scales.numel() + weight.zeros.numel()
    yield KernelCase(
        name=f"4-bit product, {rows} rows",
        run=lambda: int4_matmul(x, weight),
        check=lambda: (int4_matmul_reference(x, weight), int4_matmul(x, weight)),
        moved_bytes=kept + moved * sizes.dtype.itemsize,
        operations=operations,
    )
    numbers = torch.randn(out_features, in_features, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((out_features,), in_features**-0.5, device=device)
    yield KernelCase(
        name=f"fp8 product, {rows} rows",
        run=lambda: fp8_matmul(x, numbers, scales),
        check=lambda: (fp8_matmul_reference(x, numbers, scales), fp8_matmul(x, numbers, scales)),
        moved_bytes=numbers.numel() + 4 * out_features + moved * sizes.dtype.itemsize,
        operations=operations,
    )


def expert_case(rows: int, sizes: ModelSizes) -> KernelCase:
    """A feed-forward layer of experts, all of which have rows."""
    count, used = sizes.experts, sizes.experts_used
    gate_up = _random(sizes, count, 2 * sizes.ffn, sizes.hidden).div_(sizes.hidden**0.5)
    down = _random(sizes, count, sizes.hidden, sizes.ffn).div_(sizes.ffn**0.5)
    x, shares = _random(sizes, rows, sizes.hidden), torch.rand(rows, used, device=sizes.device)
    chosen = torch.arange(rows * used, device=sizes.device).view(rows, used) % count
    num_met = min(count, rows * used)
    return KernelCase(
        name=f"experts, {rows} rows, {used} of {count}",
        run=lambda: expert_mlp(x, shares, chosen, gate_up, down),
        check=lambda: (
            expert_mlp_reference(x, shares, chosen, gate_up, down), expert_mlp(x, shares, chosen, gate_up, down)
        ),
        moved_bytes=(3 * num_met * sizes.hidden * sizes.ffn + 2 * x.numel()) * sizes.dtype.itemsize,
        operations=6 * rows * used * sizes.hidden * sizes.ffn,
    )  # fmt: skip


def all_cases(sizes: ModelSizes) -> Iterator[KernelCase]:
    """Everything that is timed, made one at a time, so that only one case's tensors are there."""
    for name, chunks in (
        ("decode attention, 32 x 4096", [(4096, 1)] * 32),
        ("decode attention, 1 x 4096", [(4096, 1)]),
        ("decode attention, 1 x 32768", [(32768, 1)]),
        ("decode attention, 128 x 512", [(512, 1)] * 128),
        ("prompt attention, 1 x 2048", [(2048, 2048)]),
        ("prompt attention, 1 x 8192", [(8192, 8192)]),
        ("mixed attention, 32 x 2048 and a chunk of 512 at 4096", [(2048, 1)] * 32 + [(4096, 512)]),
    ):
        yield attention_case(name, chunks, sizes)
    yield attention_case("decode attention, 32 x 4096, softcapped", [(4096, 1)] * 32, sizes, softcap=50.0)
    for rows in (32, 4096):
        yield from row_cases(rows, sizes)
        yield from cache_cases(rows, sizes)
    yield from sampling_cases(32, sizes)
    for rows in (1, 16, 64, 4096):
        yield from product_cases(rows, sizes)
    for rows in (4, 32, 4096):
        yield expert_case(rows, sizes)


def _random(sizes: ModelSizes, *shape: int) -> Tensor:
    return torch.randn(shape, device=sizes.device, dtype=sizes.dtype)
