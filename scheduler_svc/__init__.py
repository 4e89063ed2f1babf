"""The scheduler service: who is admitted, where, and who must give way."""
