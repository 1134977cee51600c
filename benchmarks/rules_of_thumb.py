"""Rules that people repeat, run through the planner: benchmarks/results/rules_of_thumb.md.

    python benchmarks/rules_of_thumb.py            writes the page anew

Each rule is one question with two or more answers that `predict` and `search` give; the word at its top follows from
their figures. A test fails when the page is not what the planner says today.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.search import search
from shardwise.plan.prediction.predict import predict
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction
from shardwise.spec.presets import preset
from shardwise.spec.split import balanced_split, estimated_costs, even_split

PAGE = Path(__file__).resolve().parent / "results" / "rules_of_thumb.md"
SAME = 0.02
"""Steps closer than this are called equal: less than two runs of one job differ by."""


@dataclass(frozen=True)
class Row:
    words: str
    plan: Plan
    found: Prediction


@dataclass(frozen=True)
class Case:
    """One model on one cluster with one batch."""

    model: str
    cluster: str
    seq: int
    batch: int  # sequences

    @property
    def job(self) -> Job:
        return Job(self.seq, self.batch)

    def row(self, words: str, **changes: Any) -> Row:
        """A layout said in full; dp takes what is left. The pipeline is split evenly unless `words` differ."""
        spec, cluster = preset(self.model), read_cluster(self.cluster)
        tp, pp, cp = (changes.get(name, 1) for name in ("tp", "pp", "cp"))
        fields: dict[str, Any] = {
            "micro_batch": 1,
            "dp": cluster.world // (tp * pp * cp),
            "recompute": "full",
            "sequence": tp > 1,
        }
        if pp > 1:
            fields["split"] = even_split(spec.num_layers, pp)
        plan = Plan(
            device="cuda",
            precision="bf16",
            seq_len=self.seq,
            global_batch=self.batch,
            num_steps=1,
            threads_per_rank=1,
            reason="a rule of thumb",
            **fields | changes,
        )
        return Row(words, plan, predict(spec, cluster, self.job, plan))

    def best(self, words: str, **constraints: Any) -> Row:
        """The fastest that fits on the cards and obeys."""
        asked = {"memory.offload": "none"} | {name.replace("__", "."): value for name, value in constraints.items()}
        job = replace(self.job, constraints=asked)
        found = search(preset(self.model), read_cluster(self.cluster), job, 1)
        return Row(words, found[0].plan, found[0].prediction)

    def __str__(self) -> str:
        rows = f"{self.batch} sequence{'s' * (self.batch > 1)}"
        return f"{self.model} on {self.cluster}, {rows} of {self.seq:,} tokens a step"


def short(plan: Plan) -> str:
    """The layout, without a long list of layers."""
    return re.sub(r"split=[\d,]{20,}", "split=...", plan.layout)


def slower(row: Row, than: Row) -> float:
    return row.found.step_s / than.found.step_s - 1


def percent(share: float) -> str:
    return f"{share * 100:+.0f} %"


@dataclass(frozen=True)
class Finding:
    rule: str
    word: str  # confirmed | refuted | half true
    text: str
    tables: tuple[tuple[str, tuple[Row, ...]], ...]


def inside_the_node() -> Finding:
    case = Case("llama3-70b", "4x8xh100", 8192, 128)
    rack = Case("llama3-70b", "8x4xgb200", 8192, 128)
    tables = [[one.row(f"tp={tp}", tp=tp, zero=3) for tp in (4, 8, 16, 32)] for one in (case, rack)]
    cost, rack_cost = (slower(rows[2], rows[1]) for rows in tables)
    border = (
        "Most of that is the border"
        if rack_cost < cost / 2
        else "Much of that is not the border, but thinner matrices and more collectives"
    )
    return Finding(
        "Tensor parallelism stays inside the node: tp <= 8",
        "confirmed" if cost > SAME else "refuted",
        f"From tp=8 to tp=16 the group spans two nodes, and a step takes {percent(cost)}. {border}: in a rack whose "
        "NVLink joins 72 cards, where tp=16"
        f" stays on the fast link, it takes {percent(rack_cost)}.",
        ((str(case), tuple(tables[0])), (str(rack), tuple(tables[1]))),
    )


def dividing_layers() -> Finding:
    case = Case("llama3-8b", "1x8xh100", 4096, 64)
    spec = preset(case.model)
    uneven = balanced_split(*estimated_costs(spec, case.seq), 8)
    rows = (
        case.row("4 layers on every stage", pp=8, recompute="none"),
        case.row(f"split={','.join(map(str, uneven))}", pp=8, split=uneven, recompute="none"),
    )
    gain = slower(rows[0], rows[1])
    return Finding(
        "The number of stages divides the number of layers",
        "refuted" if gain > SAME else "confirmed",
        "The last stage has the head besides its layers, which for a vocabulary of 128,256 is the work of several "
        "layers. Equal numbers of layers take"
        f" {percent(gain)} against the split that balances the work. Any number of stages up to the number of layers "
        "runs.",
        ((str(case), rows),),
    )


def sequence_parallelism() -> Finding:
    tables, gains = [], []
    for seq in (2048, 8192, 32768):
        case = Case("llama3-70b", "4x8xh100", seq, 2**20 // seq)
        rows = tuple(
            case.row(words, tp=8, zero=3, sequence=on) for words, on in (("without", False), ("with sp", True))
        )
        tables.append((str(case), rows))
        gains.append((slower(rows[1], rows[0]), 1 - rows[1].found.memory_bytes / rows[0].found.memory_bytes))
    (time, saved), (_, saved_long) = gains[0], gains[-1]
    always = time <= SAME and saved > 0
    return Finding(
        "Sequence parallelism pays past 8K tokens",
        "refuted" if always else "confirmed",
        f"It sends the same bytes as the all-reduces it replaces, and frees memory at every length: {saved * 100:.0f} "
        "% of all memory at 2,048 tokens"
        f" ({percent(time)} time), {saved_long * 100:.0f} % at 32,768. "
        + (
            "With tensor parallelism there is no length below which to leave it out."
            if always
            else "At short lengths its two smaller collectives cost more than that is worth, unless memory is short."
        ),
        tuple(tables),
    )


def stages_below_a_billion() -> Finding:
    case = Case("qwen3-0.6b", "1x8xh100", 4096, 256)
    rows = tuple(case.row(f"zero={stage}", zero=stage, micro_batch=4, recompute="none") for stage in range(4))
    best = min(rows, key=lambda row: row.found.step_s)
    cost = slower(rows[2], best)
    return Finding(
        "Below 1B parameters: ZeRO-2",
        "confirmed" if cost <= SAME else "refuted",
        f"The states of such a model fit on every card, so there is nothing that must be shared out. {best.words} is "
        f"the fastest, ZeRO-2 takes {percent(cost)}:"
        " it reduces gradients after every micro-batch, and what it frees goes unused.",
        ((str(case), rows),),
    )


def stage_three_up_to_ten_billion() -> Finding:
    tables, costs = [], []
    for cluster in ("1x8xh100", "8x8xh100"):
        case = Case("llama3-8b", cluster, 8192, 512)
        rows = (
            case.best("ZeRO-3, no tensor parallelism, no pipeline", parallel__zero=3, parallel__tp=1, parallel__pp=1),
            case.best("anything"),
        )
        tables.append((str(case), rows))
        costs.append(slower(*rows))
    return Finding(
        "1B to 10B parameters: ZeRO-3",
        "confirmed" if max(costs) <= SAME else "refuted" if min(costs) > SAME else "half true",
        f"Against the fastest layout it takes {percent(costs[0])} on one node and {percent(costs[1])} on eight.",
        tuple(tables),
    )


def eight_by_four() -> Finding:
    case = Case("llama3-70b", "8x8xh100", 8192, 512)
    rows = (case.best("tp=8 pp=4", parallel__tp=8, parallel__pp=4), case.best("anything"))
    cost = slower(*rows)
    return Finding(
        "10B to 70B parameters: TP 8 x PP 4",
        "confirmed" if cost <= SAME else "refuted",
        f"The fastest layout with these two degrees takes {percent(cost)} against the fastest of all.",
        ((str(case), rows),),
    )


def offloading() -> Finding:
    tables, costs = [], []
    for case in (Case("llama3.2-1b", "1x1xh100", 8192, 1), Case("llama3-8b", "1x8xh100", 8192, 512)):
        rows = tuple(
            case.row(f"offload {what}", zero=3 if case.batch > 1 else 0, offload=what)
            for what in ("none", "optimizer", "all")
        )
        tables.append((str(case), rows))
        costs.append([row.found.step_s / rows[0].found.step_s for row in rows[1:]])
    (small, small_all), (large, large_all) = costs
    among = [3 <= cost <= 10 for cost in (small, small_all, large, large_all)]
    return Finding(
        "Offloading makes a step 3 to 10 times slower",
        "confirmed" if all(among) else "half true" if any(among) else "refuted",
        "The update in CPU memory is paid once a step, so it depends on how much else a step does: with the optimizer "
        "there, one sequence on one card takes"
        f" {small:.1f} times as long, and 64 on each of eight {large:.1f} times. Weights travel with every "
        f"micro-batch: {small_all:.1f} and {large_all:.1f} times.",
        tuple(tables),
    )


RULES: tuple[Callable[[], Finding], ...] = (
    inside_the_node,
    dividing_layers,
    sequence_parallelism,
    stages_below_a_billion,
    stage_three_up_to_ten_billion,
    eight_by_four,
    offloading,
)


def page() -> str:
    found = [rule() for rule in RULES]
    lines = [
        "# Rules of thumb, run through the planner",
        "",
        "<!-- Made by `python benchmarks/rules_of_thumb.py`; a test fails when it is out of date. -->",
        "",
        "Rules that people repeat, each asked as a question. Figures are predictions for our own runtime, as far off "
        "as [accuracy.md](accuracy.md) says; steps",
        f"within {SAME * 100:.0f} % of each other are called equal. Layouts that are said in full use full "
        "recomputation and micro-batches of one unless they say otherwise.",
        "",
        "| rule | |",
        "|---|---|",
        *(f"| {one.rule} | **{one.word}** |" for one in found),
    ]
    for one in found:
        lines += ["", f"## {one.rule}", "", f"**{one.word.capitalize()}.** {one.text}"]
        for title, rows in one.tables:
            lines += ["", f"{title}:", "", "| | layout | step | memory |", "|---|---|---|---|"]
            lines += [
                f"| {row.words} | `{short(row.plan)}`, micro-batch {row.plan.micro_batch} | {row.found.step_s:.3g} s | "
                f"{row.found.memory_bytes / 2**30:.1f} GiB |"
                for row in rows
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
