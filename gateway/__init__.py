"""The HTTP gateway: OpenAI's API in, streamed text out. Text lives only here."""
