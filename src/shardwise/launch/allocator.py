"""Sets how torch's GPU allocator keeps memory (`speed.allocator`): it reads an environment variable once, as torch is
loaded.

Segments that grow do not break up when sizes change from step to step, so that less memory is kept free and unused.
Invariant: what the user has set in the environment stays.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the variable's name today, and the older one
EXPANDABLE = "expandable_segments:True"


def set_allocator(choice: str, environment: MutableMapping[str, str]) -> None:
    """Sets the variable; to be called before torch is imported, here or by ranks that inherit this environment."""
    wanted = choice == "expandable" or (choice == "auto" and sys.platform == "linux")  # torch has them on Linux only
    if wanted and not any(name in environment for name in VARIABLES):
        environment[VARIABLES[0]] = EXPANDABLE
