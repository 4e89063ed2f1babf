"""The Python API: `LLM` and `AsyncLLM` over services of their own or a running deployment."""
