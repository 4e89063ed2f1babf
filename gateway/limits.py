"""Bounds on what one HTTP request may hold; README lists them. Beyond each the answer is a 400 (413 for the body).

They are checked on the parsed JSON before anything is tokenized or stored, so that a hostile body costs its own parsing
only.
"""

from __future__ import annotations

MAX_N = 128
MAX_PROMPTS = 256
MAX_CHOICES = 256
MAX_MESSAGES = 2048
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_USER_CHARS = 512
MAX_CACHE_SALT_CHARS = 256
MAX_PRIORITY = 2**31
"""How far from 0 a priority may be, either way."""
MAX_IDEMPOTENCY_KEY_CHARS = 256

MIN_REPETITION_PENALTY = 0.01
"""A logit of 100 divided by it stays a number; by the least double it is none, and every token would be as good."""

MAX_VALUES = 500_000
"""Fields, lists and objects in a body, the dearest to parse: one call parses all, and meanwhile no stream moves."""
MAX_FIELDS = 256
MAX_DEPTH = 128
"""Levels of lists and objects in a body; half of what orjson can write again, for hashing and error messages."""

MAX_UNKNOWN_FIELDS = 32
MAX_UNKNOWN_DEPTH = 32

FREE_BODY_BYTES = 64 * 1024
MAX_LARGE_BODIES = 8
"""Bodies of the largest size that a gateway holds at once (`body_budget.py`); beyond it the answer is 503."""

MAX_PROMPT_BYTES = 4 * 1024 * 1024
"""Text longer than this is never tokenized, whatever the model's context is."""

MAX_TEXT_JOBS = 512
"""Tokenizing jobs that may wait for a thread; beyond it the gateway answers 503."""

TEMPLATE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
SUBMIT_PATIENCE_S = 5.0

SILENCE_S = 1.0
"""A stream that hears nothing for this long looks at the log: the last publication may be the lost one."""

MAX_BUFFERED_BYTES = 256 * 1024
"""Log bytes kept for one slow client; beyond it they are dropped, and read from the log when the client reads on."""

MAX_HEADER_BYTES = 8190
MAX_HEADERS = 128
