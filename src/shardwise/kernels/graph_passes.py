"""Changes the graphs of compiled blocks, forward and backward, after torch's own passes."""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from shardwise.kernels.choose_matmul import MeasureMatmuls
from shardwise.kernels.norm_gradient import GatherSums


class GraphPasses(CustomGraphPass):
    """Applies the passes that a run asks for, one after the other."""

    def __init__(self, *, measures_matmuls: bool, gathers_sums: bool):
        self.passes: list[MeasureMatmuls | GatherSums] = []
        if measures_matmuls:
            self.passes.append(MeasureMatmuls())
        if gathers_sums:
            self.passes.append(GatherSums())

    def __call__(self, graph: Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """Returns what tells graphs apart that torch keeps on disk."""
        return tuple(one.uuid() for one in self.passes)
