"""`python -m quire`, the same as the `quire` command."""

import sys

from quire.cli import main

sys.exit(main())
