"""Module paths that people's start scripts already hold."""
