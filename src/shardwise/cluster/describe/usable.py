"""Says whether the torch that is installed can use the GPUs that the driver knows, without loading torch, which takes
seconds.

Invariant: a GPU that is here and cannot be used has a reason in words, and never just goes missing.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is installed."""

    version: str
    cuda: str | None  # the CUDA it was built with


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Returns what torch's version.py says; None if torch is not installed. `folder` is that of the package."""
    if folder is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        folder = Path(found.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return TorchBuild(version[1], cuda[1] if cuda else None) if version else None


def why_unusable(build: TorchBuild | None, supports: tuple[int, int], driver: str = "") -> str:
    """Returns why this torch cannot use this driver's GPUs; an empty text if it can. `supports` is the newest CUDA that
    the driver runs, `driver` its version.

    Within a major version of CUDA older drivers run newer builds (NVIDIA's minor version compatibility).
    """
    if build is None:
        return ""  # who needs torch will say that it is missing
    if build.cuda is None:
        return f"torch {build.version} is built without CUDA; a CUDA build of torch would use it"
    major = int(build.cuda.partition(".")[0])
    if major <= supports[0]:
        return ""
    name = f"driver {driver}" if driver else "the driver"
    return (
        f"{name} runs CUDA up to {supports[0]}.{supports[1]} and torch {build.version} needs {major}.0; "
        f"a newer driver or a torch built for CUDA {supports[0]} would use it"
    )
