"""Fault tests: real processes, real kills, and the invariants that must hold after them."""
