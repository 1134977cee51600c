"""`Run` and `Trained`: what came out of a training, to look at, sample from, evaluate and export. No torch at module
level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.settings import for_programs
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.run.rundir import RunDir, find_run, is_run
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config
from shardwise.terminal import type_of

if TYPE_CHECKING:
    from shardwise.data.corpus import Corpus
    from shardwise.data.tokenizer import Tokenizer
    from shardwise.model.decoder import Decoder
    from shardwise.run.weights import StoredWeights


class Trained:
    """Weights on a disk."""

    def __init__(self, name: str, runs: str = "runs"):
        self._where, self._runs = name, runs
        self._model: Decoder | None = None

    @property
    def name(self) -> str:
        """How they are called."""
        return self.weights.name

    @property
    def weights(self) -> StoredWeights:
        """Where they lie: of a run, in its newest checkpoint."""
        from shardwise.run.weights import find_weights

        return find_weights(self._where, self._runs)

    @property
    def spec(self) -> ModelSpec:
        """The shapes of the model."""
        return self.weights.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to them."""
        return self.weights.tokenizer()

    def model(self) -> Decoder:
        """Returns the whole model with these weights in fp32, on the best device here. It is read once."""
        from shardwise.run.device import best_device

        if self._model is None:
            self._model = self.weights.load(best_device())
        return self._model

    def generate(
        self, prompt: str, max_tokens: int = 100, *, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
    ) -> str:
        """Returns the model's continuation of a text, without the text."""
        from shardwise.run.generate import Sampling, generate

        with for_programs():
            if not isinstance(prompt, str) or max_tokens < 1:
                what = f"prompt is {type_of(prompt)}" if not isinstance(prompt, str) else f"max_tokens = {max_tokens}"
                raise UserError(what, why="a text is continued by one token or more", fix='generate("def ", 100)')
            sampling, tokenizer, vocab = Sampling(temperature, top_p, seed), self.tokenizer, self.spec.vocab
            ids = tokenizer.encode(prompt)
            if not ids:
                raise UserError("prompt is empty", why="the model continues at least one token", fix='prompt="def "')
            if max(ids) >= vocab:
                raise UserError(
                    f"prompt has the token id {max(ids)}",
                    why=f"the model has the ids 0 to {vocab - 1}, and the run's tokenizer is {tokenizer.name}",
                    fix="rows of your own have no text: model() computes logits from their ids",
                )
            stop = frozenset({tokenizer.separator})
            return tokenizer.decode(list(generate(self.model(), ids, max_tokens, sampling, stop)))

    def evaluate(self, source: str | Path | Sequence[str | Path] | Any, seq_len: int | None = None) -> float:
        """Returns the mean loss in nats per token on the text of `source`, or on rows of token ids as `eval_data` of
        `shardwise.train` has them."""
        from shardwise.data.own_rows import held_rows
        from shardwise.run.device import best_device
        from shardwise.run.evaluate import evaluate, plain_sums

        with for_programs():
            weights = self.weights
            config = weights.config or load_config(None).config
            length = seq_len or config.train.seq_len
            held: Any  # text or rows, which are asked for batches in one way
            if texts := _texts(source):
                held = self._corpus_of(texts, config, length).train
            else:
                held = held_rows(source, seq_len=length, vocab=weights.spec.vocab, padding=0)
            batch = min(8, held.num_sequences)
            found = evaluate(
                plain_sums(self.model()),
                held,
                global_batch=batch,
                rows=range(batch),
                micro_batch=batch,
                device=best_device(),
            )
        assert found is not None, "training rows are never empty"
        return found

    def _corpus_of(self, texts: tuple[str, ...], config: Config, seq_len: int) -> Corpus:
        from shardwise.data.corpus import open_corpus
        from shardwise.run.build import CACHE

        weights, asked = self.weights, texts if len(texts) > 1 else texts[0]
        return open_corpus(
            replace(config.data, source=asked, validation_fraction=0.0, mix=None, streaming=False),
            seq_len=seq_len,
            seed=0,
            vocab=weights.spec.vocab,
            model_dir=weights.tokenizer_dir,
            cache_dir=(weights.run.path.parent if weights.run else Path(config.run.dir)) / CACHE,
            progress=False,
            can_mask=weights.can_mask,
        )

    def export(self, out: str | Path, *, merge_lora: bool = False, dtype: str | None = None) -> Path:
        """Writes a Hugging Face directory that does not exist yet, and returns its path: the model, or of a run with
        adapters the adapters, unless they are merged."""
        from shardwise.cli.export import DTYPES, export

        with for_programs():
            if dtype not in (None, *DTYPES):
                raise UserError(
                    f"dtype = {dtype!r} is not written", why=f"it is {', '.join(DTYPES)}", fix='dtype="bf16"'
                )
            export(self.weights, Path(out), merge_lora=merge_lora, dtype=dtype)
        return Path(out)


def _texts(source: Any) -> tuple[str, ...]:
    """Returns the names of text that a source is made of; none where it has rows."""
    if isinstance(source, str | Path):
        return (str(source),)
    is_names = isinstance(source, list | tuple) and all(isinstance(one, str | Path) for one in source)
    return tuple(map(str, source)) if is_names else ()


class Run(Trained):
    """A training run, while it trains or afterwards."""

    def __init__(self, directory: RunDir):
        super().__init__(str(directory.path), str(directory.path.parent))
        self.directory = directory

    def __repr__(self) -> str:
        return f"<Run {self.directory.path}: {self.state}, {len(self.steps)} steps>"

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed` or `unfinished`."""
        return self.directory.state()

    @property
    def config(self) -> Config:
        """The config as it ran, with every `auto` filled."""
        return load_config(self.directory.config).config

    @property
    def plan(self) -> Plan:
        """The layout as it ran."""
        return Plan.from_dict(self.directory.read_plan())

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The line of every step, as metrics.jsonl has it, in order."""
        return list(self.directory.steps().values())

    @property
    def losses(self) -> list[float]:
        """The training loss of every step, in nats per token."""
        return [line["loss"] for line in self.steps]

    @property
    def eval_losses(self) -> dict[int, float]:
        """The held-out loss by step, in nats per token."""
        return {line["step"]: line["eval_loss"] for line in self.directory.lines() if "eval_loss" in line}

    @property
    def proof(self) -> Mapping[str, Any] | None:
        """What repeating the first steps in one process found; None where nothing was repeated."""
        return (self.directory.last_event() or {}).get("proof")

    def stop(self) -> None:
        """Asks a running run to stop after the step at hand, with a checkpoint."""
        self.directory.stop_request.touch()

    def resume(self, changes: Mapping[str, Any] | None = None, **parts: Any) -> Run:
        """Goes on with the run and returns it; the arguments are those of `shardwise.api.training.resume`."""
        from shardwise.api.training import resume

        return resume(self, changes, **parts)


def load_trained(name: str, runs: str) -> Trained:
    """Returns a `Run` where the name means one, else the weights that it means."""
    path = Path(name)
    if name == "last" or is_run(path) or is_run(Path(runs) / name):
        return Run(find_run(name, runs))
    if name and not path.exists() and "/" not in name:
        here = sorted((one.name for one in Path(runs).glob("*") if is_run(one)), reverse=True)
        some = ", ".join([*here[:5], *(["..."] if len(here) > 5 else [])]) or "no run"
        raise UserError(
            f"there is no run and no model `{name}`",
            why=f"no directory has this name, and {runs} has {some}",
            fix='the path of a run, a checkpoint or a Hugging Face directory, or "last"',
        )
    found = Trained(name, runs)
    _ = found.weights  # refused here, not at the first use
    return found
