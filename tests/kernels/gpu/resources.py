"""Compile the Triton kernels ahead of time and print what they take of a multiprocessor, one JSON line each.

Needs no GPU, and a process that has not imported triton as an interpreter:

    python tests/kernels/gpu/resources.py            # what the tests look at (a minute)
    python tests/kernels/gpu/resources.py --sm 80    # for one of the cards
    python tests/kernels/gpu/resources.py --all      # all head sizes, block sizes, dtypes and groups

A kernel is compiled as a launch with aligned tensors would: pointers, long strides and sizes of weights divisible by
16, strides of 1 as constants.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import autotune
from kernels.gpu import (
    expert_matmul,
    fp8_matmul,
    int4_matmul,
    kv_copy,
    kv_write,
    lora_matmul,
    paged_attention,
    rms_norm,
    rotary,
    sampling,
    silu_mul,
    split_sum,
)
from kernels.gpu.kv_quantize import FP8, INT8, PLAIN
from kernels.launch import MIN_DOT, power_of_2
from kernels.lora_matmul import GROUP_ROWS

CACHES = {PLAIN: "", INT8: " int8", FP8: " fp8"}
"""As names have them, by kind."""
QUANTIZED = {("bf16", 64): (PLAIN, INT8), ("fp16", 128): (PLAIN, FP8)}
"""Of the shapes that the tests look at, those that they see with a quantized cache, too: what takes most registers."""
WINDOW = 4096
WINDOWED = {("bf16", 64), ("fp16", 128)}
"""Of the shapes that the tests look at, those that they see with a window, too."""
SOFTCAPPED = ((256, 16, 0), (256, 16, WINDOW), (128, 16, 0), (128, 32, WINDOW))
"""Head size, block size and window of the models that cap scores."""
ALIGNED = ("stride_", "num_columns", "in_features", "inner_features")
"""What numbers that are divisible by 16 begin with."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPORT = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL
)
# tiles of keys and of values that a loop keeps in shared memory
BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with its arguments' types (`*` pointers), constants and options."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)


def compile_variant(variant: Variant, capability: int) -> dict[str, object]:
    """The resources of `variant` on sm_`capability`."""
    target = GPUTarget("cuda", capability, 32)
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name.startswith(ALIGNED)]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "constexpr"}
    source = ASTSource(variant.kernel, signature, variant.constants, attrs)
    compiled = triton.compile(source, target=target, options=variant.options)
    report = _assemble(compiled.asm["ptx"], capability)
    buffers = [int(number) for number in BUFFERS.findall(compiled.asm["ttgir"])]
    return {
        "name": variant.name,
        "sm": capability,
        "shared_bytes": compiled.metadata.shared,
        "buffers": min(buffers, default=0),
        **variant.options,
        **report,
    }


def _assemble(ptx: str, capability: int) -> dict[str, int]:
    """What the assembler says of the one kernel in `ptx`."""
    architecture = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    found = REPORT.search(log)
    assert found, log
    stack, stores, loads, registers = map(int, found.groups())
    return {"registers": registers, "spill_bytes": stores + loads, "stack_bytes": stack}


def attention(
    dtype: str, head_size: int, block_size: int, group: int, capability: int, *, kind: int, window: int = 0,
    is_capped: bool = False,
) -> Iterator[Variant]:  # fmt: skip
    """Both kinds of the attention kernel, over a cache of `kind`, in layers with a window or (0) without, of scores
    that are softcapped or not."""
    pointers = dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), f"*{dtype}")
    if kind != PLAIN:
        pointers |= {"key_ptr": "*i8", "value_ptr": "*i8"}
    pointers |= {
        "key_scale_ptr": "*fp16",
        "value_scale_ptr": "*fp16",
        "partial_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    pointers |= {f"{name}_ptr": "*i32" for name in
                 ("query_starts", "context_lens", "table", "item_starts", "item_sequences")}  # fmt: skip
    decode = autotune.decode_tile(DTYPES[dtype], head_size, group, is_quantized=kind != PLAIN)
    prompt = autotune.prompt_tile(DTYPES[dtype], head_size, group, capability // 10, is_quantized=kind != PLAIN)
    seen = (" window" if window else "") + (" softcap" if is_capped else "")
    for name, tile in (("split", decode), ("prompt", prompt)):
        constants = {
            "GROUP": group, "HEAD_SIZE": head_size, "BLOCK_SIZE": block_size, "SPLIT": autotune.SPLIT_TOKENS,
            "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "BLOCK_D": power_of_2(head_size, MIN_DOT),
            "USE_SPLITS": name == "split", "stride_key_dim": 1, "stride_value_dim": 1, "stride_scale_slot": 1,
            "KIND": kind, "WINDOW": window, "USE_SOFTCAP": is_capped,
        }  # fmt: skip
        yield Variant(
            name=f"attention {name}{seen} {dtype}{CACHES[kind]} head {head_size} block {block_size} group {group}",
            kernel=paged_attention._paged_attention_kernel,
            types=pointers,
            constants=constants,
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )


def combination(dtype: str, head_size: int, group: int, window: int = 0) -> Variant:
    types = {"out_ptr": f"*{dtype}", "partial_ptr": "*fp32", "stats_ptr": "*fp32"}
    types |= {f"{name}_ptr": "*i32" for name in ("query_starts", "context_lens", "item_starts")}
    rows = autotune.decode_tile(DTYPES[dtype], head_size, group).rows
    constants = {
        "GROUP": group, "HEAD_SIZE": head_size, "SPLIT": autotune.SPLIT_TOKENS, "BLOCK_M": rows,
        "BLOCK_S": autotune.COMBINED_SPLITS, "BLOCK_D": power_of_2(head_size), "WINDOW": window,
    }  # fmt: skip
    return Variant(name=f"combination{' window' if window else ''} {dtype} head {head_size} group {group}",
                   kernel=paged_attention._combine_kernel, types=types, constants=constants)  # fmt: skip


def kv_writes(dtype: str, head_size: int) -> Iterator[Variant]:
    """Of every kind of cache."""
    for kind, cache in CACHES.items():
        types = {f"{name}_ptr": f"*{dtype}" for name in ("key", "value", "key_cache", "value_cache")}
        if kind != PLAIN:
            types |= {"key_cache_ptr": "*i8", "value_cache_ptr": "*i8"}
        types |= {"key_scale_ptr": "*fp16", "value_scale_ptr": "*fp16", "slots_ptr": "*i64"}
        constants = {
            "HEADS": 8, "HEAD_SIZE": head_size, "BLOCK_SIZE": 16, "BLOCK_H": 8, "BLOCK_D": power_of_2(head_size),
            "stride_key_dim": 1, "stride_value_dim": 1, "stride_scale_slot": 1, "KIND": kind,
        }  # fmt: skip
        yield Variant(name=f"kv write {dtype}{cache} head {head_size}", kernel=kv_write._kv_write_kernel, types=types,
                      options={"num_warps": 2}, constants=constants)  # fmt: skip


def rows(dtype: str, hidden: int, head_size: int) -> Iterator[Variant]:
    """Norm, gate, rotation, write and copy."""
    names = (
        "out",
        "x",
        "residual",
        "weight",
        "gate_up",
        "key",
        "value",
        "key_cache",
        "value_cache",
        "source",
        "target",
    )
    same = {f"{name}_ptr": f"*{dtype}" for name in names}
    same |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32",
             "source_ids_ptr": "*i64", "target_ids_ptr": "*i64"}  # fmt: skip
    for use_residual in (False, True):
        yield Variant(
            name=f"{'add and ' if use_residual else ''}norm {dtype} {hidden}", kernel=rms_norm._rms_norm_kernel,
            types=same,
            constants={"SIZE": hidden, "BLOCK": power_of_2(hidden), "USE_RESIDUAL": use_residual},
            options={"num_warps": autotune.row_warps(hidden)},
        )  # fmt: skip
    yield Variant(name=f"silu·mul {dtype}", kernel=silu_mul._silu_mul_kernel, types=same,
                  constants={"SIZE": 4 * hidden, "BLOCK": silu_mul.BLOCK})  # fmt: skip
    yield Variant(
        name=f"rotary {dtype} head {head_size}", kernel=rotary._rotary_kernel, types=same, options={"num_warps": 2},
        constants={"HALF": head_size // 2, "BLOCK_H": rotary.HEADS, "BLOCK_D": power_of_2(head_size // 2)},
    )  # fmt: skip
    yield from kv_writes(dtype, head_size)
    yield Variant(name=f"block copy {dtype}", kernel=kv_copy._kv_copy_kernel, types=same,
                  constants={"SIZE": 2 * 16 * 8 * head_size, "BLOCK": kv_copy.BLOCK})  # fmt: skip


def adapters(dtype: str, hidden: int, rank: int) -> Iterator[Variant]:
    """Both kernels, for a projection of three parts."""
    types = {f"{name}_ptr": f"*{dtype}" for name in ("x", "y", "a", "b")} | {"partial_ptr": "*fp32"}
    types |= {f"{name}_ptr": "*i32" for name in ("rows", "starts", "slots")}
    sizes = {"RANK": rank, "WIDTH": 3 * rank, "BLOCK_M": GROUP_ROWS, "BLOCK_R": power_of_2(rank, MIN_DOT)}
    yield Variant(
        name=f"adapter shrink {dtype} rank {rank}", kernel=lora_matmul._shrink_kernel, types=types,
        constants=sizes | {"IN": hidden, "SPLIT": lora_matmul.SPLIT, "BLOCK_K": lora_matmul.BLOCK_K},
    )  # fmt: skip
    yield Variant(
        name=f"adapter expand {dtype} rank {rank}", kernel=lora_matmul._expand_kernel, types=types,
        constants=sizes | {"END_0": hidden, "END_1": hidden * 5 // 4, "END_2": hidden * 3 // 2,
                           "SPLITS": -(-hidden // lora_matmul.SPLIT), "BLOCK_N": lora_matmul.BLOCK_N},
    )  # fmt: skip


def draws(vocab: int) -> Iterator[Variant]:
    """The sampling kernels."""
    types = {"best_ptr": "*fp32", "best_id_ptr": "*i32", "logits_ptr": "*fp32", "sum_ptr": "*fp64", "out_ptr": "*i64",
             "numbers_ptr": "*fp64"}  # fmt: skip
    tiles = {"VOCAB": vocab, "TILE": sampling.TILE}
    block_t = {"BLOCK_T": power_of_2(-(-vocab // sampling.TILE))}
    token = {"stride_token": 1}
    yield Variant(name="best of tile", kernel=sampling._best_of_tile_kernel, types=types, constants=tiles | token)
    yield Variant(name="best of row", kernel=sampling._best_of_row_kernel, types=types, constants=block_t,
                  options={"num_warps": 1})  # fmt: skip
    yield Variant(name="weigh tile", kernel=sampling._weigh_tile_kernel, types=types, constants=tiles | block_t | token)
    yield Variant(name="draw", kernel=sampling._draw_kernel, types=types, constants=tiles | block_t | token)
    yield Variant(
        name="uniform", kernel=sampling._uniform_kernel, constants={"BLOCK": sampling.UNIFORM_BLOCK},
        types={"out_ptr": "*fp64", "seeds_ptr": "*i64", "choices_ptr": "*i64", "positions_ptr": "*i64"},
    )  # fmt: skip


def quantized_products(dtype: str, group: int) -> Iterator[Variant]:
    """Products with quantized weights, for few rows and many, and the sum of splits."""
    types = {f"{name}_ptr": f"*{dtype}" for name in ("out", "x", "bias")} | {"partial_ptr": "*fp32"}
    types |= {"words_ptr": "*i32", "scales_ptr": "*fp16", "zeros_ptr": "*u8"}
    for num_rows in (16, 64, 128):
        tile = autotune.matmul_tile(num_rows)
        sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "USE_SPLITS": tile.is_split, "USE_BIAS": True}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        constants = {"GROUP": group, "BLOCKS": int4_matmul.SPLIT // 128, "USE_ZEROS": True}
        yield Variant(name=f"int4 product {dtype} {num_rows} rows group {group}", types=types, options=options,
                      kernel=int4_matmul._int4_matmul_kernel, constants=sizes | constants)  # fmt: skip
        constants = {"BLOCK_K": fp8_matmul.BLOCK_K, "SPLIT": fp8_matmul.SPLIT}
        yield Variant(name=f"fp8 product {dtype} {num_rows} rows", kernel=fp8_matmul._fp8_matmul_kernel,
                      types=types | {"weight_ptr": "*i8", "scales_ptr": "*fp32"}, options=options,
                      constants=sizes | constants)  # fmt: skip
    yield Variant(name=f"sum of splits {dtype}", kernel=split_sum._add_splits_kernel, types=types,
                  constants={"BLOCK": split_sum.BLOCK, "USE_BIAS": True})  # fmt: skip


def experts(dtype: str) -> Iterator[Variant]:
    """Grouped products for few rows an expert and many, and the sum of a row's choices."""
    types = {f"{name}_ptr": f"*{dtype}" for name in ("out", "x", "weight")} | {"shares_ptr": "*fp32"}
    types |= {f"{name}_ptr": "*i32" for name in ("pairs", "tile_experts", "tile_firsts", "tile_ends")}
    for num_pairs in (16, 1024):
        tile = autotune.expert_tile(num_pairs, 8)
        constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": expert_matmul.BLOCK_K}
        for part, own in (("gate_up", {"NUM_USED": 2}), ("down", {})):
            yield Variant(name=f"experts {part} {dtype} tile {tile.rows}", types=types, constants=constants | own,
                          kernel=getattr(expert_matmul, f"_{part}_kernel"),
                          options={"num_warps": tile.num_warps, "num_stages": tile.num_stages})  # fmt: skip
    yield Variant(name=f"experts sum {dtype}", kernel=expert_matmul._sum_kernel, types=types,
                  constants={"NUM_USED": 8, "BLOCK": expert_matmul.BLOCK_SUM})  # fmt: skip


def variants(capability: int, *, is_complete: bool) -> Iterator[Variant]:
    """What is compiled for sm_`capability`."""
    shapes: Any = itertools.product(DTYPES, (64, 128, 256), (8, 16, 32), (1, 4, 7, 8))
    if not is_complete:
        shapes = (("bf16", 64, 16, 7), ("fp16", 128, 8, 1), ("bf16", 128, 32, 4), ("bf16", 256, 16, 4))
    for dtype, head_size, block_size, group in shapes:
        for kind in CACHES if is_complete else QUANTIZED.get((dtype, head_size), (PLAIN,)):
            yield from attention(dtype, head_size, block_size, group, capability, kind=kind)
            if is_complete or (dtype, head_size) in WINDOWED:
                yield from attention(dtype, head_size, block_size, group, capability, kind=kind, window=WINDOW)
    for head_size, block_size, window in SOFTCAPPED:
        yield from attention("bf16", head_size, block_size, 2, capability, kind=PLAIN, window=window, is_capped=True)
    for dtype, head_size, hidden in (("bf16", 64, 896), ("fp16", 128, 4096)):
        yield combination(dtype, head_size, 8)
        yield combination(dtype, head_size, 8, WINDOW)
        yield from rows(dtype, hidden, head_size)
        for rank in (16, 64):
            yield from adapters(dtype, hidden, rank)
        if is_complete or dtype == "bf16":  # of fp16 they are the same size
            yield from experts(dtype)
        yield from quantized_products(dtype, 32 if dtype == "bf16" else 128)
    yield from adapters("fp32", 4096, 64)
    yield from draws(151_936)


def main() -> None:
    is_complete = "--all" in sys.argv[1:]
    wanted = [int(sm) for option, sm in itertools.pairwise(sys.argv) if option == "--sm"]
    for capability in wanted or (80, 90):
        for variant in variants(capability, is_complete=is_complete):
            print(json.dumps(compile_variant(variant, capability), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
