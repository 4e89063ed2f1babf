"""One suite that both buses pass, and what only Redis can show."""
