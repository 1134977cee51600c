"""Defines `Prediction`: what the planner says of a job before it runs, in bytes and seconds. What runs and reports
knows only this noun. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageMemory:
    """The memory of one rank along the pipeline, in bytes."""

    parts: dict[str, int]
    moment: str  # when the peak is, in words

    @property
    def peak(self) -> int:
        """The bytes of all parts together."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, object]:
        return {"peak": self.peak, "moment": self.moment, "parts": self.parts}


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a step: memory and time."""

    memory: dict[str, int]  # bytes per rank by category
    step: dict[str, float]  # seconds by part
    elsewhere: dict[str, int] = field(default_factory=dict)  # offloaded bytes per rank: host, disk
    likely: tuple[float, float] = (1.0, 1.0)  # factors on the step between which 8 of 10 measured ones lay
    outside: tuple[str, ...] = ()  # what of the prediction was never compared with measurements
    stages: tuple[StageMemory, ...] = ()  # memory of each rank along the pipeline; `memory` is that of the fullest

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.step.values())

    @property
    def low(self) -> float:
        """The seconds that one step of ten goes below."""
        return self.step_s * self.likely[0]

    @property
    def high(self) -> float:
        """The seconds that one step of ten goes above."""
        return self.step_s * self.likely[1]

    def to_dict(self) -> dict[str, object]:
        return {
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "elsewhere": self.elsewhere,
            "stages": [stage.to_dict() for stage in self.stages],
            "step_s": self.step_s,
            "step": self.step,
            "likely": list(self.likely),
            "outside": list(self.outside),
        }
