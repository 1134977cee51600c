"""Says what to type for parts that need a library of their own: the package's extras. No torch."""

from __future__ import annotations

FLASH4_INSTALL = "pip install 'shardwise[flash]'"
LOWBIT_INSTALL = "pip install 'shardwise[lowbit]'"
TASKS_INSTALL = "pip install 'shardwise[tasks]'"
