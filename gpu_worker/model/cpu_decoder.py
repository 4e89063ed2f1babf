"""The Llama family's decoder as one program of CPU kernels: a step is two calls into C, to start it and to take part.

The same arithmetic as `llama.py` with fewer roundings: the residual and the sums of linears stay float32, only what a
linear or the cache reads is rounded to the model's precision (or quantized, for quantized weights). In float32 nothing
is rounded, so the tokens are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.lora.cpu_slots import CpuSlots
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.cpu_experts import ExpertBuffers, add_expert_layer, make_expert_buffers
from gpu_worker.model.cpu_rows import LinearInput, LinearRows, make_input
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.packed_weights import PackedLayer, PackedMlp, PackedModel, PackedProjection
from kernels.cpu.arena import make_buffer
from kernels.cpu.attention import (
    AttentionBuffers,
    AttentionShape,
    HeadNorms,
    add_attention,
    add_attention_plan,
    add_rotary_kv,
    make_buffers,
    with_own_plan,
)
from kernels.cpu.kv_cache import KvShape
from kernels.cpu.linear import PackedWeight, add_linear
from kernels.cpu.lora import add_gate, add_lora
from kernels.cpu.ops import Epilogue, Step
from kernels.cpu.program import Pool, Program, address, sum_profiles
from kernels.cpu.rows import add_argmax, add_embed, add_gather, add_norm

_GATES = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}


@dataclass(frozen=True, slots=True)
class _Flow:
    """What goes on from op to op: `hidden` [rows, hidden] float32, the residual, and what attention works in, by the
    layer's window: the same buffers but for the plan."""

    hidden: Tensor
    attention: dict[int | None, AttentionBuffers]

    @property
    def any_attention(self) -> AttentionBuffers:
        """Of any window, where the plan does not matter."""
        return next(iter(self.attention.values()))


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What flows through the ops; capacity: the largest step.

    Attributes:
        all, wanted: of all rows, and of those whose logits are wanted.
        normed: normed hidden states. mixed, gated: results of attention and of the gate.
        qkv: [rows, queries, keys and values] float32.
        addend: [rows, hidden] float32: what is normed before it is added to the residual.
        logits: [wanted, vocab] float32. best: [wanted] int64.
        shrunk, sums: of adapters: A · x, and gate and up before the gate, float32; None: there are none.
        experts: of layers that have some; None: none has.
    """

    all: _Flow
    wanted: _Flow
    normed: LinearInput
    mixed: LinearInput
    gated: LinearInput
    qkv: Tensor
    addend: Tensor
    logits: Tensor
    best: Tensor
    shrunk: Tensor | None
    sums: Tensor | None
    experts: ExpertBuffers | None


@dataclass(frozen=True, slots=True)
class _Addend:
    """A projection whose results are added to the residual, through a norm if the model has one there."""

    name: str
    projection: PackedProjection
    norm: Tensor | None


_AddLora = Callable[[str, LinearRows, Tensor], None]
"""Appends a projection's adapters: its name, what it reads, and what it gives."""


class CpuDecoder:
    """A decoder on the CPU kernels. One thread uses it, with any of a few sets of inputs and always the same cache.

    Args:
        cos_sin: of each of the model's ropes, [positions, head_size] float32, from `rotary_table`.
        kv: the cache's blocks.
        dtype: of what linears read: float32 or bfloat16.
    """

    def __init__(
        self, config: CheckpointConfig, weights: PackedModel, pool: Pool, *, cos_sin: Sequence[Tensor],
        kv: KvShape, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._config, self._weights, self._pool, self._dtype = config, weights, pool, dtype
        self._cos_sin = cos_sin
        self._shape = AttentionShape(heads=config.num_heads, kv=kv)
        self._shapes = {window: replace(self._shape, window=window) for window in dict.fromkeys(config.windows)}
        self._steps: dict[StepInputs, Step] = {}
        self._logits_programs: dict[bool, Program] = {}
        self._best_programs: dict[tuple[int, bool], Program] = {}
        self._adapters: CpuSlots | None = None

    def adapt(self, adapters: CpuSlots) -> None:
        """From now on add what the adapters in these slots give; before the first step."""
        self._adapters = adapters

    def start_logits(self, inputs: StepInputs, cache: KvCache) -> Callable[[], Tensor]:
        """Begin a step that writes its KV into `cache`. The result waits for it: raw logits [wanted rows, vocab]
        float32, valid until the next step."""
        self._start(self._program(inputs, cache), inputs)
        count = len(inputs.wanted_rows)

        def wait() -> Tensor:
            self._pool.wait()
            return self._buffers.logits[:count]

        return wait

    def start_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> Callable[[], list[int]]:
        """Begin a step that writes its KV into `cache`. The result waits for it: the likeliest of the first
        `vocab_size` ids for each wanted row, the lowest on a tie."""
        key = vocab_size, inputs.num_groups > 0
        if key not in self._best_programs:
            program = self._program(inputs, cache).copy()
            add_argmax(program, self._buffers.logits, vocab_size, self._buffers.best)
            self._best_programs[key] = program
        self._start(self._best_programs[key], inputs)
        count = len(inputs.wanted_rows)

        def wait() -> list[int]:
            self._pool.wait()
            best: list[int] = self._buffers.best[:count].tolist()
            return best

        return wait

    def read_hidden(self, rows: list[int]) -> Tensor:
        """Normed hidden states [rows, hidden] float32 of these of the wanted rows of the step that is over: from the
        residual, so nothing is rounded."""
        hidden = self._buffers.wanted.hidden[rows, : self._config.hidden_size]
        return F.rms_norm(hidden, (self._config.hidden_size,), self._weights.norm, self._config.rms_norm_eps)

    def profile(self) -> dict[str, float]:
        """Seconds by kind of op, over all steps."""
        programs = [*self._logits_programs.values(), *self._best_programs.values()]
        return sum_profiles(program.profile() for program in programs)

    def _start(self, program: Program, inputs: StepInputs) -> None:
        if inputs not in self._steps:
            self._steps[inputs] = _bind(inputs)
        step, batch = self._steps[inputs], inputs.batch
        step.num_rows = len(inputs.token_ids)
        step.num_sequences = len(batch.context_lens)
        step.num_wanted = len(inputs.wanted_rows)
        step.num_groups, step.num_wanted_groups = inputs.num_groups, inputs.num_wanted_groups
        self._pool.start(program, step)

    def _program(self, inputs: StepInputs, cache: KvCache) -> Program:
        """A step's ops up to its logits; those of adapters are there where some row has one."""
        if not self._logits_programs:
            self._buffers = self._make_buffers(inputs)
        adapters = self._adapters if inputs.num_groups else None
        if (adapters is not None) not in self._logits_programs:
            self._logits_programs[adapters is not None] = self._build(cache, adapters)
        return self._logits_programs[adapters is not None]

    def _make_buffers(self, inputs: StepInputs) -> _Buffers:
        config, capacity = self._config, inputs.capacity
        rows, wanted = capacity.max_tokens, capacity.max_wanted
        adapters = self._adapters
        return _Buffers(
            all=self._make_flow(rows, capacity),
            wanted=self._make_flow(wanted, capacity),
            normed=make_input(rows, config.hidden_size, self._dtype),
            mixed=make_input(rows, config.num_heads * config.head_size, self._dtype),
            gated=make_input(rows, config.intermediate_size, self._dtype),
            qkv=make_buffer(rows, self._shape.qkv_width, dtype=torch.float32),
            addend=make_buffer(rows if config.has_post_norms else 0, config.hidden_size, dtype=torch.float32),
            logits=make_buffer(wanted, config.vocab_size, dtype=torch.float32),
            best=torch.empty(wanted, dtype=torch.int64),
            shrunk=None if adapters is None else make_buffer(rows, adapters.shrunk_width, dtype=torch.float32),
            sums=self._make_sums(rows),
            experts=self._make_experts(rows),
        )

    def _make_sums(self, num_rows: int) -> Tensor | None:
        """For gate and up of dense layers, where adapters are added before the gate."""
        shapes = {} if self._adapters is None else self._adapters.shapes
        widths = [shape.out_features for (_, name), shape in shapes.items() if name == "gate_up"]
        return make_buffer(num_rows, widths[0], dtype=torch.float32) if widths else None

    def _make_experts(self, num_rows: int) -> ExpertBuffers | None:
        kinds = {experts for experts in self._config.experts if experts is not None}
        assert len(kinds) <= 1, "all layers' experts are alike"
        config = self._config
        return make_expert_buffers(kinds.pop(), num_rows, config.hidden_size, self._dtype) if kinds else None

    def _make_flow(self, num_rows: int, capacity: StepCapacity) -> _Flow:
        buffers = make_buffers(self._shape, num_rows, capacity.max_blocks * capacity.block_size)
        attention = {window: with_own_plan(buffers) for window in self._shapes}
        return _Flow(make_buffer(num_rows, self._config.hidden_size, dtype=torch.float32), attention)

    def _build(self, cache: KvCache, adapters: CpuSlots | None) -> Program:
        program, buffers, weights = Program(), self._buffers, self._weights
        scale = torch.tensor(self._config.embedding_scale, dtype=self._dtype).item()
        add_embed(program, weights.embedding, buffers.all.hidden, scale=scale)
        self._add_plans(program, buffers.all)
        for index, layer in enumerate(weights.layers):
            adapt = self._adapting(program, adapters, index)
            self._add_queries(program, index, cache.blocks(index), adapt)
            rows = buffers.all
            if layer is weights.layers[-1]:
                rows = self._add_gather(program)
            self._add_attention(program, index, cache.blocks(index), rows, adapt)
            self._add_feed_forward(program, layer, rows.hidden, adapt)
        normed = self._add_norm(program, weights.norm, buffers.wanted.hidden, weights.head)
        add_linear(program, normed.values, weights.head, buffers.logits, x_scales=normed.scales, label="head")
        return program

    def _add_queries(self, program: Program, index: int, blocks: Tensor, adapt: _AddLora | None) -> None:
        """Queries of all rows, and their keys and values into the cache."""
        buffers, shape, layer = self._buffers, self._shape, self._weights.layers[index]
        normed = self._add_norm(program, layer.input_norm, buffers.all.hidden, layer.qkv.weight)
        _add_projection(program, normed, layer.qkv, buffers.qkv, label="qkv")
        if adapt is not None:
            adapt("qkv", normed, buffers.qkv)
        head_norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            head_norms = HeadNorms(layer.query_norm, layer.key_norm, self._config.rms_norm_eps)
        add_rotary_kv(
            program, shape, buffers.all.any_attention, buffers.qkv,
            cos_sin=self._cos_sin[self._config.rope_ids[index]], cache=blocks, scale=self._config.query_scale,
            head_norms=head_norms,
        )  # fmt: skip

    def _add_gather(self, program: Program) -> _Flow:
        """From here on only the wanted rows are computed: of the others the last layer's keys and values are all that
        anybody will read."""
        rows, wanted = self._buffers.all, self._buffers.wanted
        add_gather(program, rows.hidden, wanted.hidden)
        add_gather(program, rows.any_attention.query, wanted.any_attention.query)
        program.is_of_wanted = True
        self._add_plans(program, wanted)
        return wanted

    def _add_plans(self, program: Program, rows: _Flow) -> None:
        for window, shape in self._shapes.items():
            add_attention_plan(program, shape, rows.attention[window])

    def _add_attention(
        self, program: Program, index: int, blocks: Tensor, rows: _Flow, adapt: _AddLora | None
    ) -> None:  # fmt: skip
        buffers, window, layer = self._buffers, self._config.windows[index], self._weights.layers[index]
        shape = self._shapes[window]
        width = shape.heads * shape.kv.head_size
        add_attention(program, shape, rows.attention[window], blocks, buffers.mixed.floats[:, :width])
        mixed = buffers.mixed.add_quantize(program, layer.output.weight)
        output = _Addend("output", layer.output, layer.post_attention_norm)
        self._add_to_residual(program, output, mixed, rows.hidden, adapt)

    def _add_feed_forward(self, program: Program, layer: PackedLayer, hidden: Tensor, adapt: _AddLora | None) -> None:
        mlp, normed, experts = layer.mlp, self._buffers.normed, self._buffers.experts
        if isinstance(mlp, PackedMlp):
            self._add_mlp(program, layer, mlp, hidden, adapt)
            return
        assert experts is not None
        add_norm(program, hidden, layer.mlp_norm, normed.floats, self._config.rms_norm_eps)
        add_expert_layer(program, experts, mlp, normed, hidden, gate=_GATES[self._config.gate])

    def _add_mlp(
        self, program: Program, layer: PackedLayer, mlp: PackedMlp, hidden: Tensor, adapt: _AddLora | None
    ) -> None:
        """The dense feed-forward layer; with adapters the gate waits for them."""
        gated, gate, sums = self._buffers.gated, _GATES[self._config.gate], self._buffers.sums
        normed = self._add_norm(program, layer.mlp_norm, hidden, mlp.gate_up.weight)
        if adapt is None or sums is None:
            _add_projection(program, normed, mlp.gate_up, gated.floats, epilogue=gate, label="gate_up")
        else:
            _add_projection(program, normed, mlp.gate_up, sums, label="gate_up")
            adapt("gate_up", normed, sums)
            add_gate(program, sums, gated.width, gated.floats, gate)
        rows = gated.add_quantize(program, mlp.down.weight)
        self._add_to_residual(program, _Addend("down", mlp.down, layer.post_mlp_norm), rows, hidden, adapt)

    def _adapting(self, program: Program, adapters: CpuSlots | None, layer: int) -> _AddLora | None:
        """Lets the adapters of a projection of `layer`, which reads `x`, add to its `y`."""
        shrunk = self._buffers.shrunk
        if adapters is None or shrunk is None:
            return None

        def adapt(name: str, x: LinearRows, y: Tensor) -> None:
            shape, slots = adapters.shapes[layer, name], adapters.slots[layer, name]
            values, scales = (x.values, x.scales) if x.in_order is None else (x.in_order, None)
            add_lora(program, values, shape, slots, y, shrunk=shrunk, dtype=adapters.dtype, x_scales=scales)

        return adapt

    def _add_to_residual(
        self, program: Program, addend: _Addend, x: LinearRows, hidden: Tensor, adapt: _AddLora | None
    ) -> None:
        """Add to `hidden` what the projection and its adapters give, or the norm of that where the model has one."""
        norm = addend.norm
        y, epilogue = (hidden, Epilogue.ADD) if norm is None else (self._buffers.addend, Epilogue.STORE)
        _add_projection(program, x, addend.projection, y, epilogue=epilogue, label=addend.name)
        if adapt is not None:
            adapt(addend.name, x, y)
        if norm is not None:
            add_norm(program, y, norm, hidden, self._config.rms_norm_eps, is_added=True)

    def _add_norm(self, program: Program, scale: Tensor, hidden: Tensor, weight: PackedWeight) -> LinearRows:
        """The norm of `hidden` as `weight` reads it."""
        normed, eps = self._buffers.normed, self._config.rms_norm_eps
        if weight.order is None:
            rows = normed.rows(weight)
            add_norm(program, hidden, scale, rows.values, eps, out_scales=rows.scales)
            return rows
        add_norm(program, hidden, scale, normed.floats, eps)
        return normed.add_quantize(program, weight)


def _bind(inputs: StepInputs) -> Step:
    """A step that points to the buffers of `inputs`, which stay where they are."""
    step, whole = Step(), inputs.whole
    for name, tensor in whole.items():
        setattr(step, name, address(tensor))
    step.table_stride = whole["block_tables"].stride(0)
    return step


def _add_projection(
    program: Program, x: LinearRows, projection: PackedProjection, y: Tensor, *, epilogue: Epilogue = Epilogue.STORE,
    label: str,
) -> None:  # fmt: skip
    add_linear(
        program, x.values, projection.weight, y, bias=projection.bias, x_scales=x.scales, epilogue=epilogue, label=label
    )
