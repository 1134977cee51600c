"""`python -m shardwise …` is the `shardwise …` command; `torchrun … -m shardwise train` uses it."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
