"""LoRA adapters: reading them, keeping them in memory, and which of them lie in the slots that a step computes with."""
