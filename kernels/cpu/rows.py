"""Adds to a program what works row by row: embedding, norms, quantizing, the wanted rows, the likeliest token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.linear import PackedWeight
from kernels.cpu.ops import ArgmaxArgs, Dtype, EmbedArgs, GatherArgs, NormArgs, OpKind, QuantizeArgs
from kernels.cpu.program import Program, address
from kernels.quantized_linear import GROUP

ARGMAX_TILE = 16384
"""Logits that one tile searches; as in ops.h."""
_LINE = 64
_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.int8: Dtype.INT8}


def quantized_bytes(width: int) -> int:
    """Bytes of a quantized row of `width` numbers: what its buffer's stride has to be at least (ops.h)."""
    return -(-width // _LINE) * _LINE + -(-4 * (1 + -(-width // GROUP)) // _LINE) * _LINE


def add_embed(program: Program, table: PackedWeight, out: Tensor, *, scale: float = 1.0) -> None:
    """Append out[row] = scale · table[token id of the row].

    Args:
        table: [vocab, hidden], packed.
        out: [rows, hidden] float32.
    """
    program.add(OpKind.EMBED, EmbedArgs(table=table.struct(), out=address(out), scale=scale), table, out)


def add_norm(
    program: Program, x: Tensor, scale: Tensor, out: Tensor, eps: float, *, out_scales: Tensor | None = None,
    is_added: bool = False, label: str = "norm",
) -> None:  # fmt: skip
    """Append the RMS norm of each row.

    Args:
        x: [rows, hidden] float32.
        scale: [hidden] float32.
        out: [rows, at least hidden] float32, bfloat16, or int8 quantized rows (`quantized_bytes`) with `out_scales`
            [rows].
        eps: added to the mean square.
        is_added: add it to `out`, float32, in place of overwriting that.
    """
    assert not is_added or out.dtype == torch.float32
    args = NormArgs(
        in_=address(x),
        scale=address(scale),
        out=address(out),
        out_scales=address(out_scales),
        hidden=x.shape[1],
        out_stride=out.stride(0),
        out_dtype=_DTYPES[out.dtype],
        eps=eps,
        is_added=is_added,
    )
    program.add(OpKind.NORM, args, x, scale, out, out_scales, label=label)


def add_quantize(
    program: Program, x: Tensor, width: int, out: Tensor, out_scales: Tensor, *, order: Tensor | None = None,
    per_row: int = 1,
) -> None:  # fmt: skip
    """Append the quantization of the first `width` columns of each row.

    Args:
        x: [rows, at least width] float32 or bfloat16.
        out: [rows, `quantized_bytes(width)`] int8.
        out_scales: [rows] float32.
        order: int32 [width]: column i of `out` is column order[i] of `x`; None: i.
        per_row: rows here for each row of the step.
    """
    args = QuantizeArgs(
        in_=address(x),
        out=address(out),
        out_scales=address(out_scales),
        order=address(order),
        width=width,
        in_stride=x.stride(0),
        out_stride=out.stride(0),
        in_dtype=_DTYPES[x.dtype],
        per_row=per_row,
    )
    program.add(OpKind.QUANTIZE, args, x, out, out_scales, order)


def add_gather(program: Program, x: Tensor, out: Tensor) -> None:
    """Append out[i] = x[wanted row i].

    Args:
        x: [rows, …]. out: [wanted, …] of the same dtype and width. Both dense.
    """
    assert (x.shape[1:], x.dtype) == (out.shape[1:], out.dtype)
    assert x.is_contiguous()
    assert out.is_contiguous()
    row_bytes = x.stride(0) * x.element_size()
    program.add(OpKind.GATHER, GatherArgs(in_=address(x), out=address(out), row_bytes=row_bytes), x, out)


def add_argmax(program: Program, logits: Tensor, width: int, out: Tensor) -> None:
    """Append the index of the largest of the first `width` logits of each wanted row, the lowest on a tie.

    Args:
        logits: [wanted, at least width] float32.
        out: [wanted] int64.
    """
    tiles = -(-width // ARGMAX_TILE)
    best = torch.empty((len(out), tiles))
    best_ids = torch.empty((len(out), tiles), dtype=torch.int64)
    args = ArgmaxArgs(
        logits=address(logits),
        width=width,
        stride=logits.stride(0),
        best=address(best),
        best_ids=address(best_ids),
        out=address(out),
    )
    for kind in (OpKind.ARGMAX, OpKind.ARGMAX_MERGE):
        program.add(kind, args, logits, best, best_ids, out, label="argmax")
