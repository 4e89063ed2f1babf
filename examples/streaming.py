"""Text as it comes, and a request that is ended early: `.venv/bin/python examples/streaming.py [MODEL_FOLDER]`."""

import asyncio
import sys

from quire import AsyncLLM, RequestOutputKind, SamplingParams


async def main() -> None:
    async with AsyncLLM(model=sys.argv[1] if len(sys.argv) > 1 else "") as llm:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("Once upon a time", params, request_id="story"):
            print(output.outputs[0].text, end="", flush=True)
        print()
        endless = SamplingParams(max_tokens=1000, ignore_eos=True)
        async for output in llm.generate("And then", endless, request_id="endless"):
            if len(output.outputs[0].token_ids) >= 10:
                await llm.abort("endless")
        print(f"ended after {len(output.outputs[0].token_ids)} tokens: {output.outputs[0].finish_reason}")


asyncio.run(main())
