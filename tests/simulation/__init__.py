"""Property tests of the policy in simulated cells."""
