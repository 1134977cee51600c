"""Every mistake in a config is three lines: what, why, fix. The texts themselves are part of the promise."""

import pytest

from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError


def refusal(path=None, *words):
    with pytest.raises(UserError) as caught:
        load_config(path, words)
    assert caught.value.code == Exit.USER_MISTAKE
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


@pytest.fixture
def refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(text, *words):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "run.toml").write_bytes(data)
        return refusal("run.toml", *words)

    return check


def test_the_example_of_the_style_guide(refused):
    error = refused("[model]\n\n[train]\nstpes = 10\n")
    first, why, fix = str(error).splitlines()
    assert first.split("  ")[0] == "error: unknown key `train.stpes`"
    assert first.endswith("run.toml:4")
    assert why.startswith("  why  [train] has: steps, tokens, epochs, global_batch,")
    assert fix == "  fix  did you mean `steps`?"


# text of run.toml, words of the command line -> what, part of why, part of fix, where
CASES = {
    "wrong type": (
        '[train]\nsteps = "many"',
        [],
        '`train.steps` must be a whole number, got "many"',
        "optimizer steps",
        "train.steps = 100",
        "run.toml:2",
    ),
    "a fraction of a step": (
        "[train]\nsteps = 1.5",
        [],
        "`train.steps` must be a whole number, got 1.5",
        "optimizer steps",
        "train.steps",
        "run.toml:2",
    ),
    "bool is not a number": (
        "[train]\nsteps = true",
        [],
        "`train.steps` must be a whole number, got true",
        "",
        "",
        "run.toml:2",
    ),
    "number is not a text": (
        "[run]\ndir = 3",
        [],
        "`run.dir` must be text in quotes, got 3",
        "",
        'run.dir = "runs"',
        "run.toml:2",
    ),
    "table is not a value": ("[train.steps]\na = 1", [], "`train.steps` must be a whole number", "", "", "run.toml:1"),
    "number or auto": (
        '[train]\nmicro_batch = "big"',
        [],
        '`train.micro_batch` must be a whole number or "auto", got "big"',
        "",
        "",
        "run.toml:2",
    ),
    "wrong length": (
        "[optimizer]\nbetas = [0.9]",
        [],
        "`optimizer.betas` must be a list of 2 numbers, got [0.9]",
        "",
        "[0.9, 0.95]",
        "run.toml:2",
    ),
    "not finite": (
        "[optimizer]\nlr = nan",
        [],
        '`optimizer.lr` must be a number or "auto", got nan',
        "",
        "",
        "run.toml:2",
    ),
    "unit": (
        '[memory]\nlimit = "6 potatoes"',
        [],
        '`memory.limit` cannot be read from "6 potatoes"',
        'a size such as 6GiB, 512MiB or 25MB or "auto"',
        '"6GiB"',
        "run.toml:2",
    ),
    "range": (
        "[train]\nsteps = 0",
        [],
        "`train.steps = 0` is out of range",
        "at least 1",
        "train.steps = 100",
        "run.toml:2",
    ),
    "range above": (
        "[optimizer]\nlr = 0",
        [],
        "`optimizer.lr = 0.0` is out of range",
        "above 0",
        "0.0003",
        "run.toml:2",
    ),
    "range both": (
        "",
        ["data.validation_fraction=0.9"],
        "`data.validation_fraction = 0.9` is out of range",
        "at least 0 and at most 0.5",
        "",
        "command line",
    ),
    "choice": (
        "",
        ["optimizer.name=adamx"],
        '`optimizer.name` has no value "adamx"',
        "it takes: adamw, adam,",
        "did you mean `adam",
        "command line",
    ),
    "choice in list": (
        "",
        ["run.loggers=jsonl,tensorbord"],
        '`run.loggers` has no value "tensorbord"',
        "jsonl, tensorboard",
        "did you mean `tensorboard`?",
        "command line",
    ),
    "not yet, key": (
        "[run]\nreplan = true",
        [],
        "`run.replan = true` is not available yet",
        "what works today: false",
        "leave it out",
        "run.toml:2",
    ),
    "not yet, degree": (
        "[checkpoint]\npeers = 2",
        [],
        "`checkpoint.peers = 2` is not available yet",
        "what works today: 0",
        "leave it out",
        "run.toml:2",
    ),
    "not yet, value": (
        '[parallel]\nstrategy = "local-steps"',
        [],
        '`parallel.strategy = "local-steps"` is not available yet',
        "what works today:",
        "leave it out",
        "run.toml:2",
    ),
    "not yet, unset": (
        "",
        ["comm.secondary_shard=8"],
        "`comm.secondary_shard = 8` is not available yet",
        "leaving it out",
        "leave it out",
        "command line",
    ),
    "profile, backwards": (
        "",
        ["run.profile=13:10"],
        '`run.profile` cannot be read from "13:10"',
        "the last one is not before the first",
        '"10:13"',
        "command line",
    ),
    "profile, one number": (
        '[run]\nprofile = "ten"',
        [],
        '`run.profile` cannot be read from "ten"',
        "a first and a last step such as 10:13",
        '"10:13"',
        "run.toml:2",
    ),
    "late and skip": (
        "",
        ["speed.results=late", "run.on_nan=skip"],
        "`speed.results = late` does not go with `run.on_nan = skip`",
        "before its update",
        "speed.results=auto",
        "command line",
    ),
    "late and fp16": (
        "",
        ["speed.results=late", "memory.precision=fp16-true"],
        "`speed.results = late` does not go with `memory.precision = fp16-true`",
        "overflowed",
        "speed.results=auto",
        "command line",
    ),
    "unknown section": (
        "[trian]\nsteps = 1",
        [],
        "unknown section `[trian]`",
        "the sections are: model, data, train,",
        "did you mean `[train]`?",
        "run.toml:1",
    ),
    "foreign section": (
        "[training]\nsteps = 1",
        [],
        "unknown section `[training]`",
        "",
        "here it is called `[train]`",
        "run.toml:1",
    ),
    "no section": (
        "steps = 1",
        [],
        "`steps` stands in no section",
        "every key belongs to one of: model,",
        "write `train.steps = 1`",
        "run.toml:1",
    ),
    "section as key": (
        "train = 5",
        [],
        "`train` is a section, not a key",
        "steps, tokens",
        "open it with `[train]`",
        "run.toml:1",
    ),
    "wrong section": (
        "[train]\nlr = 0.1",
        [],
        "unknown key `train.lr`",
        "`lr` belongs to [optimizer]",
        "write `optimizer.lr = 0.1`",
        "run.toml:2",
    ),
    "foreign name": (
        "[train]\nmax_steps = 9",
        [],
        "unknown key `train.max_steps`",
        "Hugging Face Trainer; here it is `train.steps`",
        "write `train.steps = 9`",
        "run.toml:2",
    ),
    "foreign name, other value": (
        "",
        ["train.gradient_accumulation_steps=4"],
        "unknown key `train.gradient_accumulation_steps`",
        "global_batch / (dp x micro_batch)",
        "set `train.global_batch` instead",
        "command line",
    ),
    "foreign name, top": (
        "learning_rate = 0.1",
        [],
        "unknown key `learning_rate`",
        "here it is `optimizer.lr`",
        "write `optimizer.lr = 0.1`",
        "run.toml:1",
    ),
    "foreign name, nothing to set": (
        "",
        ["train.overlap_comm=true"],
        "unknown key `train.overlap_comm`",
        "DeepSpeed",
        "leave it out",
        "command line",
    ),
    "foreign, dashes": (
        "[train]\ntrain-iters = 5",
        [],
        "unknown key `train.train-iters`",
        "Megatron-LM",
        "write `train.steps = 5`",
        "run.toml:2",
    ),
    "model field misspelt": (
        "[model]\nnum_layer = 2",
        [],
        "unknown key `model.num_layer`",
        "the fields of ModelSpec",
        "did you mean `num_layers`?",
        "run.toml:2",
    ),
    "model field type": (
        '[model]\nnum_layers = "two"',
        [],
        '`model.num_layers` must be a whole number, got "two"',
        "ModelSpec",
        "",
        "run.toml:2",
    ),
    "overrides is no key": ("[model]\noverrides = []", [], "unknown key `model.overrides`", "", "", "run.toml:2"),
    "set twice": (
        "[train]\nsteps = 1\nseed = 2\nsteps = 3",
        [],
        "`train.steps` is set twice",
        "also set at run.toml:2",
        "keep one",
        "run.toml:4",
    ),
    "set twice by alias": (
        "[parallel]\nsp = false\nsequence = false",
        [],
        "`parallel.sequence` is set twice",
        "also set at run.toml:2",
        "",
        "run.toml:3",
    ),
    "section twice": (
        "[train]\nsteps = 1\n[train]\nseed = 1",
        [],
        "`train` is set twice",
        "also set at run.toml:1",
        "keep one",
        "run.toml:3",
    ),
    "no quotes": (
        "[model]\npreset = tiny",
        [],
        "run.toml is not valid TOML",
        "line 2",
        'write `preset = "tiny"`',
        "run.toml:2",
    ),
    "unit without quotes": (
        "[train]\nseq_len = 8k  # long",
        [],
        "run.toml is not valid TOML",
        "line 2",
        'write `seq_len = "8k"`',
        "run.toml:2",
    ),
    "capital": (
        "[train]\ndeterministic = True",
        [],
        "run.toml is not valid TOML",
        "",
        "write `deterministic = true`",
        "run.toml:2",
    ),
    "null": ("[train]\nclip = null", [], "run.toml is not valid TOML", "", "leave the key out", "run.toml:2"),
    "yaml": ("[train]\nsteps: 3", [], "run.toml is not valid TOML", "", "not `key: value`", "run.toml:2"),
    "no value": ("[train]\nsteps =", [], "run.toml is not valid TOML", "", "", "run.toml:2"),
    "open list": ("[optimizer]\nbetas = [0.9, 0.95", [], "run.toml is not valid TOML", "", "", "run.toml:2"),
    "binary": (b"\xff\xfe\x00", [], "run.toml is not a text file", "UTF-8", "", None),
    "override without =": (
        "",
        ["train.steps"],
        "`train.steps` has no `=`",
        "section.key=value",
        "write `train.steps=VALUE`",
        "command line",
    ),
    "override without value": (
        "",
        ["train.steps="],
        "`train.steps=` has no value",
        "",
        "write `train.steps=VALUE`",
        "command line",
    ),
    "override without section": (
        "",
        ["steps=100"],
        "`steps` stands in no section",
        "",
        "write `train.steps=100`",
        "command line",
    ),
    "override of a section": (
        "",
        ["trian.steps=1"],
        "unknown section `[trian]`",
        "",
        "did you mean `[train]`?",
        "command line",
    ),
    "override too deep": ("", ["train.steps.more=1"], "unknown key `train.steps.more`", "", "", "command line"),
    "override smuggling": (
        "",
        ["train.seed=1\nsteps = 3"],
        "`train.seed` must be a whole number",
        "",
        "",
        "command line",
    ),
    # rules between keys
    "two lengths": (
        '[train]\nsteps = 1\ntokens = "1M"',
        [],
        "`train.steps` and `train.tokens` are both set",
        "`train.steps` (run.toml:2), `train.tokens` (run.toml:3)",
        "keep one of steps, tokens, epochs",
        "run.toml:3",
    ),
    "two batches": (
        "",
        ["train.global_batch=8", "train.global_batch_tokens=2k"],
        "`train.global_batch` and `train.global_batch_tokens` are both set",
        "",
        "keep one",
        "command line",
    ),
    "broken batch": (
        "",
        ["train.seq_len=256", "train.global_batch_tokens=1000"],
        "`train.global_batch_tokens = 1000` is not a whole number of sequences",
        "256 tokens (train.seq_len), 232 would be left over",
        "set `train.global_batch_tokens = 1024` (4 sequences)",
        "command line",
    ),
    "micro over global": (
        "[train]\nglobal_batch = 4\nmicro_batch = 8",
        [],
        "`train.micro_batch = 8` is larger than the global batch",
        "has 4 sequences",
        "at most 4",
        "run.toml:3",
    ),
    "micro over tokens": (
        "",
        ["train.seq_len=256", "train.global_batch_tokens=1k", "train.micro_batch=8"],
        "`train.micro_batch = 8` is larger than the global batch",
        "has 4 sequences",
        "at most 4",
        "command line",
    ),
    "beta": (
        "[optimizer]\nbetas = [0.9, 1.0]",
        [],
        "`optimizer.betas` holds 1.0",
        "below 1",
        "[0.9, 0.95]",
        "run.toml:2",
    ),
    "warmup": (
        "",
        ["optimizer.warmup=1.5"],
        "`optimizer.warmup = 1.5` is neither steps nor a share",
        "",
        "set it to 2",
        "command line",
    ),
    "scaling": (
        "",
        ["optimizer.lr_scaling=sqrt"],
        '`optimizer.lr_scaling = "sqrt"` has nothing to scale from',
        "reference_batch",
        "optimizer.reference_batch",
        "command line",
    ),
    "mix": (
        "",
        ["data.source=a,b", "data.mix=1,2,3"],
        "`data.mix` has 3 weights for 2 sources",
        "one weight per source",
        "give 2 weights",
        "command line",
    ),
    "negative mix": (
        "",
        ["data.source=a,b", "data.mix=[1, -2]"],
        "`data.mix = [1.0, -2.0]` are not weights",
        "",
        "[1.0, 1.0]",
        "command line",
    ),
    "no source": ("[data]\nsource = []", [], "`data.source` is empty", "nothing to train on", "python", "run.toml:2"),
    "two models": (
        '[model]\npreset = "tiny"\npath = "dir"',
        [],
        "`model.preset` and `model.path` are both set",
        "preset tiny, path dir",
        "keep one",
        "run.toml:3",
    ),
    "every": (
        "",
        ["checkpoint.every=often"],
        '`checkpoint.every` cannot be read from "often"',
        "5m",
        "",
        "command line",
    ),
    "every 0": (
        "",
        ["checkpoint.every=0"],
        "`checkpoint.every = 0` is out of range",
        "steps between",
        "at least 1",
        "command line",
    ),
    "run name": ("", ["run.name=../x"], '`run.name = "../x"` cannot name a directory', "", "run.dir", "command line"),
    # layout strings
    "layout word": (
        "",
        ["parallel.layout=dq=2"],
        "unknown word `dq=2` in the layout `dq=2`",
        "a layout has the words: dp,",
        "did you mean `dp`?",
        "command line",
    ),
    "layout value": (
        "",
        ["parallel.layout=dp=two"],
        '`parallel.dp` must be a whole number or "auto", got "two"',
        "",
        "",
        "command line",
    ),
    "layout twice": (
        "",
        ["parallel.layout=dp=2 dp=3"],
        "`dp` is set twice in the layout `dp=2 dp=3`",
        "it is 2 and 3",
        "",
        "command line",
    ),
    "layout bare": ("", ["parallel.layout=dp"], "`dp` in the layout has no value", "", "dp=2", "command line"),
    "layout empty": ('[parallel]\nlayout = ""', [], "the layout is empty", "", "dp=2", "run.toml:2"),
    "split word": (
        "",
        ["parallel.split=evn"],
        '`parallel.split` must be a list of whole numbers or "auto" or "even", got "evn"',
        "layers per stage",
        "[4, 4]",
        "command line",
    ),
    "split of nothing": (
        "",
        ["parallel.pp=2", "parallel.split=6,0"],
        "`parallel.split = 0` is out of range",
        "at least 1",
        "",
        "command line",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mistake(name, refused):
    text, words, what, why, fix, where = CASES[name]
    error = refused(text, *words)
    assert error.what.startswith(what), error
    assert why in error.why, error
    assert fix in error.fix, error
    assert error.where == where, error


def test_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal("absent.toml")
    assert (error.what, error.fix) == (
        "there is no config file absent.toml",
        "`shardwise init` writes a commented config",
    )
    (tmp_path / "run.toml").touch()
    assert refusal("absent.toml").fix == "there is: run.toml"


def test_directory(tmp_path):
    assert refusal(tmp_path).what == f"{tmp_path} is a directory"
    (tmp_path / "config.toml").touch()
    assert refusal(tmp_path).fix == f"did you mean {tmp_path / 'config.toml'}?"


def test_file_below_a_file(tmp_path):
    (tmp_path / "run.toml").touch()
    error = refusal(tmp_path / "run.toml" / "inner.toml")
    assert error.what.startswith("cannot read") or error.what.startswith("there is no config file")
