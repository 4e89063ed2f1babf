"""`python -m quire.entrypoints.openai.api_server --model FOLDER ...`: `quire serve` under the name people copy."""

import sys

from quire.cli import run_command, serve

if __name__ == "__main__":
    sys.exit(run_command(serve, sys.argv[1:]))
