"""ctypes' view of quire.h and ops.h: the structs that programs are made of. Change both."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Dtype(IntEnum):
    """enum dtype."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    FP8 = 4
    INT4_ZEROS = 5


class Epilogue(IntEnum):
    """enum epilogue."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3


class OpKind(IntEnum):
    """enum op_kind."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTARY_KV = 3
    ATTENTION_PLAN = 4
    ATTENTION = 5
    ATTENTION_MERGE = 6
    QUANTIZE = 7
    ARGMAX = 8
    ARGMAX_MERGE = 9
    CHOOSE = 10
    GATHER = 11
    LORA_SHRINK = 12
    LORA_EXPAND = 13
    GATE = 14
    ROUTE = 15
    GROUP = 16
    GATHER_PAIRS = 17
    EXPERTS = 18
    COMBINE = 19


class Step(ctypes.Structure):
    """struct step."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_sequences", c_int64),
        ("num_wanted", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("wanted_rows", c_void_p),
        ("query_starts", c_void_p),
        ("wanted_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_groups", c_int64),
        ("num_wanted_groups", c_int64),
        ("group_rows", c_void_p),
        ("wanted_group_rows", c_void_p),
        ("group_starts", c_void_p),
        ("wanted_group_starts", c_void_p),
        ("group_slots", c_void_p),
        ("wanted_group_slots", c_void_p),
    )


class Op(ctypes.Structure):
    """struct op."""

    _fields_ = (
        ("kind", c_int32),
        ("num_calls", c_int32),
        ("is_of_wanted", c_int64),
        ("nanoseconds", c_int64),
        ("args", c_void_p),
    )


class Weight(ctypes.Structure):
    """struct weight."""

    _fields_ = (
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
    )


class EmbedArgs(ctypes.Structure):
    """struct embed_args."""

    _fields_ = (("table", Weight), ("out", c_void_p), ("scale", c_float), ("reserved", c_int32))


class NormArgs(ctypes.Structure):
    """struct norm_args."""

    _fields_ = (
        ("in_", c_void_p),
        ("scale", c_void_p),
        ("out", c_void_p),
        ("out_scales", c_void_p),
        ("hidden", c_int64),
        ("out_stride", c_int64),
        ("out_dtype", c_int32),
        ("eps", c_float),
        ("is_added", c_int32),
        ("reserved", c_int32),
    )


class LinearArgs(ctypes.Structure):
    """struct linear_args."""

    _fields_ = (
        ("weight", Weight),
        ("x", c_void_p),
        ("x_scales", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("epilogue", c_int32),
        ("out_dtype", c_int32),
    )


class RotaryKvArgs(ctypes.Structure):
    """struct rotary_kv_args."""

    _fields_ = (
        ("qkv", c_void_p),
        ("cos_sin", c_void_p),
        ("query", c_void_p),
        ("cache", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("cache_dtype", c_int32),
        ("query_scale", c_float),
        ("eps", c_float),
        ("reserved", c_int32),
    )


class AttentionArgs(ctypes.Structure):
    """struct attention_args."""

    _fields_ = (
        ("query", c_void_p),
        ("cache", c_void_p),
        ("plan", c_void_p),
        ("partial", c_void_p),
        ("out", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("out_stride", c_int64),
        ("max_rows", c_int64),
        ("max_partials", c_int64),
        ("window", c_int64),
        ("cache_dtype", c_int32),
        ("out_dtype", c_int32),
    )


class QuantizeArgs(ctypes.Structure):
    """struct quantize_args."""

    _fields_ = (
        ("in_", c_void_p),
        ("out", c_void_p),
        ("out_scales", c_void_p),
        ("order", c_void_p),
        ("width", c_int64),
        ("in_stride", c_int64),
        ("out_stride", c_int64),
        ("in_dtype", c_int32),
        ("per_row", c_int32),
    )


class GatherArgs(ctypes.Structure):
    """struct gather_args."""

    _fields_ = (("in_", c_void_p), ("out", c_void_p), ("row_bytes", c_int64))


class LoraFactors(ctypes.Structure):
    """struct lora_weight."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("rank", c_int64))


class LoraArgs(ctypes.Structure):
    """struct lora_args."""

    _fields_ = (
        ("slots", c_void_p),
        ("x", c_void_p),
        ("x_scales", c_void_p),
        ("shrunk", c_void_p),
        ("y", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("shrunk_stride", c_int64),
        ("num_parts", c_int64),
        ("second_part", c_int64),
        ("third_part", c_int64),
        ("is_interleaved", c_int32),
        ("dtype", c_int32),
        ("x_dtype", c_int32),
        ("reserved", c_int32),
    )


class GateArgs(ctypes.Structure):
    """struct gate_args."""

    _fields_ = (
        ("in_", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("in_stride", c_int64),
        ("out_stride", c_int64),
        ("out_dtype", c_int32),
        ("epilogue", c_int32),
    )


class ArgmaxArgs(ctypes.Structure):
    """struct argmax_args."""

    _fields_ = (
        ("logits", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
        ("best", c_void_p),
        ("best_ids", c_void_p),
        ("out", c_void_p),
    )


class ChooseArgs(ctypes.Structure):
    """struct choose_args."""

    _fields_ = (
        ("logits", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
        ("temperatures", c_void_p),
        ("min_p", c_void_p),
        ("top_p", c_void_p),
        ("top_k", c_void_p),
        ("seeds", c_void_p),
        ("choices", c_void_p),
        ("positions", c_void_p),
        ("out", c_void_p),
    )


class RouteArgs(ctypes.Structure):
    """struct route_args."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("num_experts", c_int64),
        ("num_used", c_int64),
        ("chosen", c_void_p),
        ("shares", c_void_p),
        ("place_of", c_void_p),
        ("row_of", c_void_p),
        ("starts", c_void_p),
        ("active", c_void_p),
        ("is_normalized", c_int32),
        ("reserved", c_int32),
    )


class GatherPairsArgs(ctypes.Structure):
    """struct gather_pairs_args."""

    _fields_ = (
        ("in_", c_void_p),
        ("in_scales", c_void_p),
        ("out", c_void_p),
        ("out_scales", c_void_p),
        ("row_of", c_void_p),
        ("row_bytes", c_int64),
        ("num_used", c_int64),
    )


class ExpertsArgs(ctypes.Structure):
    """struct experts_args."""

    _fields_ = (("linear", LinearArgs), ("weights", c_void_p), ("starts", c_void_p), ("active", c_void_p))


class CombineArgs(ctypes.Structure):
    """struct combine_args."""

    _fields_ = (
        ("in_", c_void_p),
        ("shares", c_void_p),
        ("place_of", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("num_used", c_int64),
    )


ARGUMENTS: dict[OpKind, type[ctypes.Structure]] = {
    OpKind.EMBED: EmbedArgs,
    OpKind.NORM: NormArgs,
    OpKind.LINEAR: LinearArgs,
    OpKind.ROTARY_KV: RotaryKvArgs,
    OpKind.ATTENTION_PLAN: AttentionArgs,
    OpKind.ATTENTION: AttentionArgs,
    OpKind.ATTENTION_MERGE: AttentionArgs,
    OpKind.QUANTIZE: QuantizeArgs,
    OpKind.ARGMAX: ArgmaxArgs,
    OpKind.ARGMAX_MERGE: ArgmaxArgs,
    OpKind.CHOOSE: ChooseArgs,
    OpKind.GATHER: GatherArgs,
    OpKind.LORA_SHRINK: LoraArgs,
    OpKind.LORA_EXPAND: LoraArgs,
    OpKind.GATE: GateArgs,
    OpKind.ROUTE: RouteArgs,
    OpKind.GROUP: RouteArgs,
    OpKind.GATHER_PAIRS: GatherPairsArgs,
    OpKind.EXPERTS: ExpertsArgs,
    OpKind.COMBINE: CombineArgs,
}
