"""Starts and stops the containers of workers as the leader would like; for a cell that Docker Compose runs."""
