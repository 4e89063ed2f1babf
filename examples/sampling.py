"""Parameters of each prompt, token ids, logprobs, metrics: `.venv/bin/python examples/sampling.py [MODEL_FOLDER]`."""

import sys

from quire import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "")
tokenizer = llm.get_tokenizer()

prompts = [
    "Hello, my name is",
    {"prompt": "The capital of France is", "lora_request": None},
    {"prompt_token_ids": tokenizer.encode("Once upon a time")},
]
params = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2),
    SamplingParams(temperature=1, seed=7, n=2, stop=["."], max_tokens=20),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.05, repetition_penalty=1.1, max_tokens=None, stop="\n"),
]

for output in llm.generate(prompts, params):
    for choice in output.outputs:
        ended = f"{len(choice.token_ids)} tokens, {choice.finish_reason}"
        print(f"{output.request_id}.{choice.index}: {ended}, {choice.text!r}")
        for position in (choice.logprobs or [])[:1]:
            print({token_id: (item.rank, item.decoded_token, item.logprob) for token_id, item in position.items()})

print(llm.get_default_sampling_params())
for metric in llm.get_metrics():
    if metric.name == "vllm:generation_tokens":
        print(metric)
