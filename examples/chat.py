"""Conversations, one and several: `.venv/bin/python examples/chat.py [MODEL_FOLDER]`."""

import sys

from quire import LLM, SamplingParams

sampling_params = SamplingParams(temperature=0, max_tokens=32)
conversation = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
other = [{"role": "user", "content": "Name a prime number."}]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else "") as llm:
    for output in llm.chat(conversation, sampling_params):
        print(f"Prompt: {output.prompt!r}\nAnswer: {output.outputs[0].text!r}")
    for output in llm.chat([conversation, other], sampling_params, use_tqdm=False):
        print(f"Answer: {output.outputs[0].text!r}")
