"""When a sequence ends by itself: a stop token, its own limit, or the end of the context."""

from __future__ import annotations

from gpu_worker.engine.sequence import Sequence


def max_known(sequence: Sequence, max_model_len: int) -> int:
    """Most tokens, prompt and output, that `sequence` can come to."""
    return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, max_model_len)


def finish_reason(sequence: Sequence, max_model_len: int) -> str:
    """Why `sequence` ends with its last token: "stop", "length", or "" when it goes on.

    A stop token ends it from output token `min_tokens + 1` on; before that the sampler bans them. A stop token at the
    limit is a "stop".
    """
    sampling = sequence.sampling
    if sequence.num_output > sampling.min_tokens and sequence.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if sequence.num_known >= max_known(sequence, max_model_len) else ""
