"""The pure scheduling policy: events in, decisions out; no I/O, no clock, no randomness."""
