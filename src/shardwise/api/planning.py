"""`shardwise.plan`: the ranked layouts of `shardwise plan`, as objects. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from shardwise.api.settings import for_programs, model_words, words_of
from shardwise.errors import UserError
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config
from shardwise.terminal import counted, type_of

if TYPE_CHECKING:
    from shardwise.plan.answer.answer import Answer, Row


@dataclass(frozen=True)
class PlannedLayout:
    """One row of the ranking: a layout with what is predicted of it."""

    _answer: Answer
    _row: Row

    def __repr__(self) -> str:
        gib = self.memory_bytes / 2**30
        return f"<{self.layout}: {self.step_s:.3g} s per step, {gib:.1f} GiB on {counted(self.plan.world, 'device')}>"

    @property
    def layout(self) -> str:
        """The layout string, such as `dp=8 zero=2`."""
        return self._row.layout

    @property
    def plan(self) -> Plan:
        """What a run would execute."""
        return self._row.candidate.plan

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return self._row.step_s

    @property
    def memory_bytes(self) -> int:
        """Predicted bytes of the fullest device."""
        return self._row.candidate.prediction.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second, of all devices."""
        return self._row.tokens_per_s

    @property
    def mfu(self) -> float:
        """Predicted share of the devices' peak that useful arithmetic reaches."""
        return self._row.mfu

    @property
    def days(self) -> float | None:
        """Days of the whole training; None where nobody said how many tokens it has."""
        return self._row.whole.days if self._row.whole else None

    @property
    def cost(self) -> float | None:
        """Money for the whole training; None without a price and a number of tokens."""
        return self._row.whole.cost if self._row.whole else None

    @property
    def config(self) -> Config:
        """The complete config, for `shardwise.train` and `shardwise.verify`."""
        from shardwise.plan.answer.plan_files import config_of

        return config_of(self._answer.question, self.plan)

    def write(self, path: str | Path) -> Path:
        """Writes the config file that `shardwise train` takes, with predictions and assumptions as comments."""
        from shardwise.files import write_atomically
        from shardwise.plan.answer.answer import file_of
        from shardwise.plan.answer.plan_files import is_ours

        target = Path(path)
        if target.exists() and not is_ours(target):
            raise UserError(f"{target} is there already", why="a file of yours is not overwritten", fix="another path")
        write_atomically(target, file_of(self._answer.question, self._row, "a row of shardwise.plan", []))
        return target


class Plans(Sequence[PlannedLayout]):
    """Layouts that fit, the best first: the fastest, unless a plainer one is hardly slower."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._rows = [PlannedLayout(answer, row) for row in answer.rows]

    @overload
    def __getitem__(self, index: int) -> PlannedLayout: ...

    @overload
    def __getitem__(self, index: slice) -> list[PlannedLayout]: ...

    def __getitem__(self, index: int | slice) -> PlannedLayout | list[PlannedLayout]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return "\n".join(f"{number}  {row!r}" for number, row in enumerate(self, 1))

    @property
    def assumptions(self) -> list[str]:
        """Everything that was assumed, with where it is from."""
        return [f"{one.what}: {one.value} ({one.origin})" for one in self._answer.question.assumptions]

    @property
    def advice(self) -> list[str]:
        """When something else is the better answer: fewer devices, an adapter, no cluster."""
        return [f"{one.what}: {one.why}" for one in self._answer.advice]

    def why_not(self, layout: str) -> str:
        """Returns why a layout, or a part of one, is not the first row."""
        from shardwise.plan.answer.why import why_not, why_not_lines

        with for_programs():
            lines = why_not_lines(why_not(self._answer, layout), self._answer.rows[0])
        return "\n".join(f"{label:<9}{text}" for label, text in lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `shardwise plan --json` prints."""
        from shardwise.plan.answer.answer import to_json

        return to_json(self._answer, [])


def plan(
    model: ModelSpec | str,
    cluster: ClusterSpec | str | Path = "this",
    constraints: Mapping[str, Any] | None = None,
    *,
    seq: int | str | None = None,
    batch: int | str | None = None,
    tokens: int | str | None = None,
    price: float | None = None,
    top: int = 5,
    within_s: float | None = None,
    budget: float | None = None,
    fewest_gpus: bool = False,
) -> Plans:
    """Returns the fastest layouts that fit. `constraints` are config keys that must have a value, such as
    {"parallel.tp": 4}; `seq` and `batch` are in tokens, `within_s` in seconds, `price` per device and hour."""
    from shardwise.plan.answer.answer import answer
    from shardwise.plan.answer.question import ask

    with for_programs():
        if top < 1:
            raise UserError(f"top = {top} shows nothing", why="it is the number of layouts", fix="top=5")
        if not isinstance(cluster, str | Path | ClusterSpec):
            why = "it is a name such as 8xh100, a cluster file, or a ClusterSpec"
            raise UserError(f"cluster is {type_of(cluster)}", why=why, fix='cluster="8xh100"')
        cluster = str(cluster) if isinstance(cluster, Path) else cluster
        words = words_of({} if constraints is None else constraints)
        name = model.name if isinstance(model, ModelSpec) else str(model)
        if isinstance(model, ModelSpec):
            words = [*model_words(model)[1:], *words]
        texts = [None if value is None else str(value) for value in (seq, batch, tokens, price)]
        question = ask(name, cluster, seq=texts[0], batch=texts[1], tokens=texts[2], price=texts[3], words=words)
        if (within_s or budget) and not question.job.tokens:
            raise UserError("within_s and budget need tokens", why="days and costs follow from them", fix='tokens="1T"')
        if budget is not None and question.price is None:
            raise UserError("budget needs a price", why="the cluster has none per GPU-hour", fix="price=2.50")
        return Plans(answer(question, top, within=within_s, budget=budget, fewest=fewest_gpus))
