"""A server that runs, by this API and by OpenAI's client: `.venv/bin/python examples/running_server.py [URL]`.

Start one with `quire serve`; the second half is there where OpenAI's package is installed.
"""

import sys

from quire import LLM, SamplingParams

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

llm = LLM(base_url=url)
(output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
print(f"quire:  {output.outputs[0].text!r}")

try:
    from openai import OpenAI
except ImportError:
    sys.exit("for OpenAI's client: pip install openai")

client = OpenAI(base_url=f"{url}/v1", api_key="any")
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
)
print(f"openai: {''.join(chunk.choices[0].text for chunk in stream)!r}")
