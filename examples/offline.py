"""Prompts in, texts out: `.venv/bin/python examples/offline.py [MODEL_FOLDER]`."""

import sys

from quire import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model=sys.argv[1] if len(sys.argv) > 1 else "",
    block_size=16,
    gpu_memory_utilization=0.90,
    max_model_len=4096,
    tensor_parallel_size=1,
    kv_cache_dtype="fp16",
    swap_space=4,
    scheduler_delay_factor=0.0,
    enable_chunked_prefill=True,
    max_num_batched_tokens=2048,
    enforce_eager=False,
    dtype="float16",
    disable_log_stats=False,
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
