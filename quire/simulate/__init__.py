"""`quire simulate`: the scheduler's policy on made-up traffic and simulated workers, or on a log of what it decided."""
