"""The learning-rate schedule: the rate is a pure function of the step, so resuming needs no scheduler state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.spec.schema import OptimizerConfig


@dataclass(frozen=True)
class LearningRate:
    """The rate has a linear warm-up from 0, then the shape named by `schedule`, ending at `min_lr` x peak on the last
    step."""

    peak: float
    num_steps: int
    shape: str
    warmup_steps: int
    final_share: float
    decay_share: float

    def __call__(self, step: int) -> float:
        """Returns the learning rate of a step; the first one is 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        start = self.warmup_steps
        if self.shape == "wsd":  # warm up, stay, decay: only the last `decay_share` of the run goes down
            start = max(start, self.num_steps - max(1, round(self.decay_share * self.num_steps)))
        done = min(1.0, max(0.0, (step - start) / max(1, self.num_steps - start)))
        if self.shape == "constant":
            share = 1.0
        elif self.shape == "cosine":
            share = self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * done))
        else:
            share = 1 + (self.final_share - 1) * done
        return self.peak * share


def learning_rate(optimizer: OptimizerConfig, num_steps: int, global_batch: int) -> LearningRate:
    """Returns the schedule that a config asks for, over `num_steps` steps of `global_batch` sequences."""
    warmup = optimizer.warmup if optimizer.warmup >= 1 else optimizer.warmup * num_steps
    return LearningRate(
        peak=optimizer.peak_lr * batch_scale(optimizer, global_batch),
        num_steps=num_steps,
        shape=optimizer.schedule,
        warmup_steps=min(round(warmup), num_steps),
        final_share=optimizer.min_lr,
        decay_share=optimizer.decay,
    )


def batch_scale(optimizer: OptimizerConfig, global_batch: int) -> float:
    """Returns the factor by which `lr_scaling` changes the learning rate for this batch. Linear: Goyal et al. 2017;
    sqrt: Krizhevsky 2014."""
    ratio = global_batch / (optimizer.reference_batch or global_batch)
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]
