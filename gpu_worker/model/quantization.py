"""Which weights are quantized, and to what, when a float checkpoint is loaded with `--quantization`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_worker.quant.scheme import METHODS
from kernels.quantized_linear import QuantizedWeight, quantize_int4, quantize_int8
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What the projections of blocks (`body`) and the output projection (`outer`) become: "none", "int8" or "int4".

    With int4 the output projection is int8: it is read once a step like any other weight, but its errors fall straight
    on the logits. An embedding of its own stays as it is: a step reads a few rows of it.
    """

    body: str
    outer: str


QUANTIZATIONS = {
    "none": Quantization(body="none", outer="none"),
    "int8": Quantization(body="int8", outer="int8"),
    "int4": Quantization(body="int4", outer="int8"),
} | dict.fromkeys(METHODS, Quantization(body="none", outer="none"))
"""By `--quantization`; a checkpoint's own method leaves its floats as they are."""


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """`weight` [out, in] as "int8" or "int4".

    Raises:
        ConfigError: it holds what has no quantized form.
    """
    try:
        return quantize_int4(weight) if kind == "int4" else quantize_int8(weight)
    except ValueError as error:
        raise ConfigError(f"--quantization={kind}: {error}") from None
