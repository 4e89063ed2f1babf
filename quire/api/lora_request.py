"""Which adapter a request is for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """As vLLM's, also by position. `lora_int_id` is a number that the caller chose, one for each adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
