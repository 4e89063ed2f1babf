"""The ranks of one worker (`--tensor-parallel-size`): processes that compute each step together."""
