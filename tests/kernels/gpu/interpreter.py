"""Triton's interpreter, with bfloat16 set right.

The interpreter of triton 3.7.1 keeps bfloat16 as 16-bit integers; it cuts bits off where hardware rounds to the nearest
even number, and its dot product multiplies the integers. Kernels are not written around that: `correct_bfloat16` gives
the interpreter hardware's arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def widen(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bits of `values` (float32) rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def correct_bfloat16() -> None:
    """Change the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "has_bfloat16", False):
        return
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def as_float(x: Any) -> Any:
        return handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def cast_rounding(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return handle(narrow(cast(self, as_float(src), tl.float32).data), tl.bfloat16)
        return cast(self, as_float(src), dst_type)

    def convert_rounding(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_rounding(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def dot_of_floats(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return dot(self, as_float(a), as_float(b), d, *options)

    builder.cast_impl, builder.create_dot = cast_rounding, dot_of_floats
    builder.create_fp_to_fp, builder.has_bfloat16 = convert_rounding, True
