"""Lists the warnings of torch, FSDP2 and torchao that never reach a user, each with its reason.

They are known by their text; everything else still shows. Two more are left out where they arise, because `parallelize`
is used without our commands too: torch's about `broadcast_buffers` (parallel/data/replicas.py) and those of a kernel's
compiler about itself (kernels/flash4.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

KNOWN_WARNINGS = {
    "Attempting to run cuBLAS, but there was no current CUDA context": "recomputed logits make a backward thread the "
    "first to use cuBLAS there; torch sets the context itself and says so",
    "FSDP2-wrapped module .* returned a view tensor": "nothing here writes into what a block returns",
    "Online softmax is disabled on the fly": "the compiler's choice of an algorithm; results are the same",
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled": "fp32 is computed "
    "in fp32 where a config says so",
    r"barrier\(\): using the device under current context": "every rank has chosen its device by then",
}
"""How the text of a warning begins, as a regular expression -> why nobody needs to read it."""

KNOWN_RECORDS = {
    ("torchao", "Failed to load "): "kernels of torchao for GPUs that are not here; none of them is used",
    ("torchao", "Skipping import of cpp extensions"): "the same on an older torch",
    ("torch.utils._pytree", "<enum "): "advice to the authors of torchao, which others import",
    ("torch._inductor.utils", "Not enough SMs to use max_autotune_gemm mode"): "the compiler takes its usual matmuls",
}
"""A logger, and how its record begins -> why nobody needs to read it."""


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Returns whether a log record is none of those that are known."""
    return not any(record.name == name and record.getMessage().startswith(text) for name, text in KNOWN_RECORDS)


@contextmanager
def known_warnings_left_out() -> Iterator[None]:
    """Leaves the known warnings out until the end of the context."""
    loggers = [logging.getLogger(name) for name in {name for name, _ in KNOWN_RECORDS}]
    with warnings.catch_warnings():
        for text in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=text)
        for logger in loggers:
            logger.addFilter(is_worth_reading)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(is_worth_reading)
