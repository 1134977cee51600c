"""The clock on one GPU: spans are the stream's time, not the host's, they add up, and measuring never waits for the
device."""

from __future__ import annotations

import time

import pytest
import torch

from shardwise.run.clock import KINDS, Clock

pytestmark = pytest.mark.cuda

CYCLES = 400_000_000  # of the GPU's clock: some tenths of a second


def test_spans_are_the_streams_time_and_nothing_synchronises() -> None:
    clock = Clock(torch.device("cuda", 0))
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    clock.begin()
    began = time.perf_counter()
    with clock.span("compute", "forward", 0, 0) as forward:
        torch.cuda._sleep(CYCLES)
        with clock.span("comm_exposed", "all-reduce", group="tp", num_bytes=1) as wait:
            torch.cuda._sleep(2 * CYCLES)
    queued_s = time.perf_counter() - began
    torch.cuda.synchronize()
    parts = clock.finish()
    assert queued_s < wait.duration_s / 2, "the host waited for the device"
    assert forward.duration_s == pytest.approx(1.5 * wait.duration_s, rel=0.1)
    assert wait.start_s == pytest.approx(wait.duration_s / 2, rel=0.1)
    assert parts["compute_s"] == pytest.approx(parts["comm_exposed_s"] / 2, rel=0.1)
    assert sum(parts[f"{kind}_s"] for kind in (*KINDS, "other")) == pytest.approx(parts["step_s"], rel=1e-9)
