"""How a checkpoint's weights are quantized, from `quantization_config` of its config.json, read strictly.

Linears that a checkpoint leaves in floats need no list of names here: the reader of a linear takes what tensors it
finds (`linears.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.model.config_reader import ConfigReader
from shared.errors import ConfigError, shorten

GROUPS = (32, 64, 128, -1)
"""Sizes of groups that are supported; −1: all of `in`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How linears are stored.

    Attributes:
        method: "awq", "gptq", "compressed-tensors" or "fp8", as config.json has it.
        kind: "int4", "int8" or "fp8".
        group: of int4: one of `GROUPS`.
        is_symmetric: there are no zero points.
        zero_offset: of gptq: what its zero points are short of.
        has_order: groups are of columns in an order that the checkpoint must hold.
    """

    method: str
    kind: str
    group: int = -1
    is_symmetric: bool = False
    zero_offset: int = 0
    has_order: bool = False


def read_scheme(reader: ConfigReader) -> Scheme | None:
    """What `reader`, a whole config.json, says; None: weights are floats.

    Raises:
        ConfigError: a bad value, or something this version does not support.
    """
    if reader.get("quantization_config") is None:
        return None
    own = reader.nested("quantization_config")
    method = own.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        own.fail("quant_method", f"is not supported; supported: {', '.join(METHODS)}")
    return read(own)


def refuse_other_quantization(wanted: str, scheme: Scheme | None, device: str) -> None:
    """Raise `ConfigError` where `--quantization` does not fit a checkpoint of `scheme`, or the device lacks kernels."""
    if scheme is None:
        if wanted in METHODS:
            raise ConfigError(f"--quantization={wanted}: the checkpoint's config.json has no quantization_config; "
                              "leave the flag out, or quantize at load with int8 or int4")  # fmt: skip
        return
    if wanted not in ("none", scheme.method):
        raise ConfigError(f"--quantization={wanted}: the checkpoint is quantized already, by {scheme.method}; leave "
                          "the flag out")  # fmt: skip
    if device != "cpu":
        raise ConfigError(f"--device={device}: the checkpoint is quantized ({scheme.method}, {scheme.kind}), which is "
                          "built for --device=cpu only")  # fmt: skip


def _read_awq(own: ConfigReader) -> Scheme:
    _only(own, "bits", 4)
    version = own.get("version") or "gemm"
    if str(version).lower() != "gemm":
        own.fail("version", "only gemm is supported")
    return Scheme(method="awq", kind="int4", group=_group(own), is_symmetric=not own.flag("zero_point", True))


def _read_gptq(own: ConfigReader) -> Scheme:
    _only(own, "bits", 4)
    if own.get("dynamic"):
        own.fail("dynamic", "settings of single modules are not supported")
    form = own.get("checkpoint_format") or own.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        own.fail("checkpoint_format", "only gptq and gptq_v2 are supported")
    offset, has_order = 1 if form == "gptq" else 0, own.flag("desc_act", False)
    return Scheme(method="gptq", kind="int4", group=_group(own), zero_offset=offset, has_order=has_order)


def _read_fp8(own: ConfigReader) -> Scheme:
    if own.get("weight_block_size") is not None:
        own.fail("weight_block_size", "scales of blocks are not supported, only those of tensors and channels")
    if own.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        own.fail("fmt", "only e4m3 is supported")
    return Scheme(method="fp8", kind="fp8", is_symmetric=True)


def _read_compressed(own: ConfigReader) -> Scheme:
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if own.get("format") not in formats:
        own.fail("format", f"only {', '.join(formats)} are supported")
    for key in ("kv_cache_scheme", "transform_config"):
        if own.get(key):
            own.fail(key, "is not supported")
    if own.nested("sparsity_config").get("format") not in (None, "dense"):
        own.fail("sparsity_config", "sparse weights are not supported")
    groups = own.nested("config_groups")
    if len(groups.raw) != 1:
        own.fail("config_groups", "must be one group; several are not supported")
    return _read_weights(groups.nested(*groups.raw).nested("weights"))


def _read_weights(weights: ConfigReader) -> Scheme:
    """The scheme that compressed-tensors' arguments of weights name."""
    bits, number, strategy = weights.get("num_bits"), weights.get("type") or "int", weights.get("strategy")
    is_symmetric = weights.flag("symmetric", True)
    if (number, bits) not in _COMPRESSED_KINDS:
        weights.fail("num_bits", f"of type {shorten(str(number))} is not supported; int of 4 or 8 and float of 8 are")
    kind = _COMPRESSED_KINDS[number, bits]
    strategies = ("group", "channel") if kind == "int4" else ("channel", "tensor")
    if strategy not in strategies:
        weights.fail("strategy", f"only {' and '.join(strategies)} are supported for {kind}")
    if kind != "int4" and not is_symmetric:
        weights.fail("symmetric", f"zero points are not supported for {kind}")
    group = _group(weights) if strategy == "group" else -1
    has_order = weights.get("actorder") in (True, "group", "dynamic")
    return Scheme(method="compressed-tensors", kind=kind, group=group, is_symmetric=is_symmetric, has_order=has_order)


_COMPRESSED_KINDS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
METHODS = {"awq": _read_awq, "gptq": _read_gptq, "fp8": _read_fp8, "compressed-tensors": _read_compressed}


def _only(own: ConfigReader, key: str, value: int) -> None:
    if own.get(key) != value:
        own.fail(key, f"only {value} is supported for {own.get('quant_method')}")


def _group(own: ConfigReader) -> int:
    group = own.get("group_size")
    if isinstance(group, bool) or group not in GROUPS:
        own.fail("group_size", f"must be one of {', '.join(map(str, GROUPS))}")
    return int(group)
