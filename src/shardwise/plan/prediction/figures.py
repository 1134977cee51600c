"""What follows from a prediction: tokens per second, MFU, the link that it waits for; days, money and energy of a whole
training. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.units import format_seconds
from shardwise.plan.prediction.collectives import PARTS_OF_AXES, placement
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.prediction import Prediction

DAY = 86400.0


def binding_link(plan: Plan, prediction: Prediction, cluster: ClusterSpec) -> tuple[str, float] | None:
    """Returns the link that most of the exposed communication waits for, and its seconds; None: nothing waits."""
    waits: dict[str, float] = {}
    links = {axis.name: axis.link.name for axis in placement(cluster, plan)}
    for part, axis in PARTS_OF_AXES.items():
        if axis in links and prediction.step.get(part, 0.0) > 0:
            waits[links[axis]] = waits.get(links[axis], 0.0) + prediction.step[part]
    return max(waits.items(), key=lambda item: item[1]) if waits else None


def mfu(spec: ModelSpec, job: Job, plan: Plan, prediction: Prediction, cluster: ClusterSpec) -> float:
    """Returns the share of the peak that useful model FLOPs reach, in the format that the matmuls run in; what is
    computed again does not count."""
    work, flops = spec.flops_per_token(job.seq_len) * job.tokens_per_step, cluster.device.flops
    devices = plan.world * (plan.threads_per_rank if cluster.device.kind == "cpu" else 1)  # a core is a device
    return work / (prediction.step_s * devices * flops.get(PRECISIONS[plan.precision].matmul, max(flops.values())))


@dataclass(frozen=True)
class Whole:
    """The time, cost and energy of a training from its first token to its last. Boards only: no hosts, no cooling."""

    seconds: float
    gpu_hours: float
    cost: float | None
    kwh: float | None

    @property
    def days(self) -> float:
        """The length of the training in days."""
        return self.seconds / DAY


def whole_training(job: Job, plan: Plan, prediction: Prediction, cluster: ClusterSpec) -> Whole | None:
    """Returns the time, cost and energy of a training; None where the job has no number of tokens."""
    if job.tokens is None:
        return None
    steps = -(-job.tokens // job.tokens_per_step)
    seconds = steps * prediction.step_s
    hours = plan.world * seconds / 3600
    price = job.price if job.price is not None else cluster.price
    watts = cluster.device.watts
    return Whole(seconds, hours, price * hours if price is not None else None, hours * watts / 1000 if watts else None)


def step_text(seconds: float) -> str:
    """Returns the seconds of a step as people compare them: `36.2 ms`, `8.31 s`, `10.4 s`, `12:31`."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.1f} s" if 9.995 <= seconds < 600 else format_seconds(seconds)
