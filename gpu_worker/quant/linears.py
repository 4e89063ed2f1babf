"""One linear's weight from a checkpoint, whatever it is stored as: the formats, byte by byte.

Eight numbers of 4 bits lie in an int32, the first in its lowest bits. Of [out, in], with `groups` along `in`:

* **awq** (AutoAWQ, gemm): qweight [in, out / 8] and qzeros [groups, out / 8], packed along `out` in the order
  `AWQ_ORDER`; scales [groups, out].
* **gptq** (AutoGPTQ, GPTQModel): qweight [in / 8, out], packed along `in`; qzeros [groups, out / 8], less 1 in files of
  version 1; scales [groups, out]; g_idx [in], the group of each column.
* **compressed-tensors** (llm-compressor): weight_packed [out, in / 8], weight_scale [out, groups], and with zero points
  weight_zero_point [out / 8, groups], packed along `out`; int8: weight [out, in], or weight_packed [out, in / 4] of
  n + 128, and weight_scale [out, 1] or [1].
* **fp8**: weight [out, in] of float8 e4m3, weight_scale [out, 1], [1] or a scalar.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpu_worker.model.loader import Checkpoint
from gpu_worker.quant.scheme import Scheme
from kernels.grouped_weight import GroupedWeight, Weight, make_grouped
from kernels.quantized_linear import QuantizedWeight
from shared.errors import ConfigError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each of an int32's numbers belongs to."""
WORDS, INDICES = (torch.int32,), (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
IGNORED = (".input_scale",)
"""Endings of names that quantized checkpoints hold for others: activations are quantized by their own size here."""


def read_weight(scheme: Scheme | None, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Weight:
    """The weight of linear `name`; a float tensor where the checkpoint has one.

    Raises:
        ConfigError: tensors are missing, have other shapes, or are not what `scheme` says.
    """
    if scheme is not None:
        if checkpoint.has(f"{name}.qweight"):
            return _read_grouped(scheme, checkpoint, name, shape)
        if checkpoint.has(f"{name}.weight_packed"):
            return _read_packed(scheme, checkpoint, name, shape)
        if checkpoint.has(f"{name}.weight_scale"):
            return _read_scaled(scheme, checkpoint, name, shape)
    return checkpoint.take(f"{name}.weight", shape)


def unpack(packed: Tensor, bits: int = 4) -> Tensor:
    """The numbers of int32s [rows, n] along rows, uint8 [rows, n · 32 / bits]."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _read_grouped(scheme: Scheme, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> GroupedWeight:
    """awq and gptq."""
    out, width = shape
    group, groups = _groups(scheme, name, width)
    scales = _take(checkpoint, f"{name}.scales", (groups, out), FLOATS).T
    is_awq = scheme.method == "awq"
    qweight = _take(checkpoint, f"{name}.qweight", (width, out // 8) if is_awq else (width // 8, out), WORDS)
    zeros = None
    if checkpoint.has(f"{name}.qzeros") or not scheme.is_symmetric:
        packed = unpack(_take(checkpoint, f"{name}.qzeros", (groups, out // 8), WORDS))
        zeros = (_in_order(packed) if is_awq else (packed + scheme.zero_offset) & 15).T
    if is_awq:
        return _make(name, _in_order(unpack(qweight)).T, scales, zeros, group)
    return _sorted(scheme, checkpoint, f"{name}.g_idx", _make(name, unpack(qweight.T), scales, zeros, group))


def _read_packed(scheme: Scheme, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Weight:
    """compressed-tensors in int32s."""
    out, width = shape
    told = _take(checkpoint, f"{name}.weight_shape", (2,), INDICES).tolist()
    if told != [out, width]:
        raise ConfigError(f"{name}.weight_shape says {told}; the model's config asks for {[out, width]}")
    bits = 8 if scheme.kind == "int8" else 4
    packed_shape = (out, -(-width * bits // 32))
    numbers = unpack(_take(checkpoint, f"{name}.weight_packed", packed_shape, WORDS), bits)[:, :width]
    if scheme.kind == "int8":
        return QuantizedWeight(values=(numbers ^ 128).view(torch.int8), scales=_scales(checkpoint, name, out))
    group, groups = _groups(scheme, name, width)
    zeros = None
    if not scheme.is_symmetric:
        packed = _take(checkpoint, f"{name}.weight_zero_point", (-(-out // 8), groups), WORDS)
        zeros = unpack(packed.T).T[:out]
    scales = _take(checkpoint, f"{name}.weight_scale", (out, groups), FLOATS)
    return _sorted(scheme, checkpoint, f"{name}.weight_g_idx", _make(name, numbers, scales, zeros, group))


def _read_scaled(scheme: Scheme, checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """int8 and fp8, a number a byte."""
    values = checkpoint.take_stored(f"{name}.weight", shape)
    expected = torch.int8 if scheme.kind == "int8" else torch.float8_e4m3fn
    if values.dtype != expected:
        raise ConfigError(f"{name}.weight is {values.dtype}; a checkpoint of {scheme.kind} has {expected}")
    if scheme.kind == "fp8" and bool(((values.view(torch.uint8) & 127) == 127).any()):
        raise ConfigError(f"{name}.weight holds NaN")
    return QuantizedWeight(values=values, scales=_scales(checkpoint, name, shape[0]))


def _scales(checkpoint: Checkpoint, name: str, out: int) -> Tensor:
    """One scale for each output, float32 [out]."""
    scales = checkpoint.take_stored(f"{name}.weight_scale").float().flatten()
    if len(scales) not in (1, out) or not bool(scales.isfinite().all()):
        raise ConfigError(f"{name}.weight_scale has {len(scales)} numbers; one finite one or one for each of {out} "
                          "outputs is supported")  # fmt: skip
    return scales.expand(out).contiguous()


def _groups(scheme: Scheme, name: str, width: int) -> tuple[int, int]:
    """Size and number of groups along `width`."""
    group = width if scheme.group == -1 else scheme.group
    if width % group or width % 8:
        raise ConfigError(f"{name}: its width {width} is no multiple of group_size = {group}, or of 8")
    return group, width // group


def _make(name: str, numbers: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> GroupedWeight:
    try:
        return make_grouped(numbers, scales, zeros, group)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _in_order(numbers: Tensor) -> Tensor:
    """awq's numbers [rows, n] as their outputs lie."""
    return numbers.view(len(numbers), -1, 8)[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)


def _take(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A tensor as it is stored, of one of `dtypes`."""
    tensor = checkpoint.take_stored(name, shape)
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {tensor.dtype}; must be {' or '.join(map(str, dtypes))}")
    return tensor


def _sorted(scheme: Scheme, checkpoint: Checkpoint, name: str, weight: GroupedWeight) -> GroupedWeight:
    """`weight`, whose columns lie as those of x, with columns in the order of the groups that tensor `name` says."""
    if not checkpoint.has(name) and not scheme.has_order:
        return weight
    width = weight.shape[1]
    columns = _take(checkpoint, name, (width,), INDICES).long()
    plain = torch.arange(width) // weight.group
    if torch.equal(columns, plain):
        return weight
    order = columns.argsort(stable=True)
    if not torch.equal(columns[order], plain):
        raise ConfigError(f"{name} does not give each group {weight.group} columns")
    numbers = weight.numbers()[:, order].view(len(weight.nibbles), -1, 2)
    return replace(weight, nibbles=numbers[..., 0] | numbers[..., 1] << 4, order=order)
