"""Acts techniques out on a few local processes: `shardwise explain WORD --demo`.

A demo is one file with WORLD, `act` (runs on every rank, returns what it saw) and `make_story` (turns what all ranks
saw into a story), and one line here. Invariant: no torch in this file, so that a page can say whether its word has a
demo.
"""

from __future__ import annotations

DEMOS = {
    "data-parallel": "data_parallel",
    "zero": "zero",
    "tensor": "tensor",
    "sequence": "sequence",
    "pipeline": "pipeline",
    "context": "context",
    "experts": "experts",
}
"""The file of this folder that acts a word out."""
