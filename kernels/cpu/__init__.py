"""The CPU kernels, in C: built on first use by the machine's compiler, run as programs of ops by one call a step."""
