"""`shardwise.plan`, `verify`, `load` and the names of the package."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.api.planning import plan as plan_of_the_api
from shardwise.api.settings import for_programs, settings_of
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.answer.answer import answer
from shardwise.plan.answer.question import ask


def test_a_plan_is_the_answer_of_the_command(tmp_path):
    plans = shardwise.plan("llama3-8b", "8xh100", {"parallel.tp": 2}, seq="8k", batch=2**20, tokens="1T", price=2)
    asked = ask("llama3-8b", "8xh100", seq="8k", batch="1M", tokens="1T", price="2", words=["parallel.tp=2"])
    expected = answer(asked)
    assert [one.layout for one in plans] == [row.layout for row in expected.rows] and len(plans) == 5
    best = plans[0]
    assert best.step_s == expected.rows[0].step_s and best.memory_bytes < 80e9 and best.plan.tp == 2
    assert best.cost == pytest.approx(best.days * 24 * 8 * 2) and 0.2 < best.mfu < 1
    assert load_config(best.write(tmp_path / "best.toml")).config == best.config
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(UserError, match="is there already"):
        best.write(tmp_path / "mine.toml")
    assert "tp=4" in plans.why_not("tp=4") and "#1" in plans.why_not(best.layout)


def test_models_and_clusters_are_objects():
    spec, cluster = shardwise.ModelSpec.preset("llama3-8b"), shardwise.ClusterSpec.parse("2x8xh100")
    assert cluster.world == 16 and spec.num_layers == 32
    shorter = shardwise.plan(spec.with_overrides({"num_layers": 16}), cluster, seq=4096, batch=2**20, top=1)
    assert shorter[0].step_s < shardwise.plan(spec, cluster, seq=4096, batch=2**20, top=1)[0].step_s


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"batch": 100, "seq": 64}, "not a whole number of sequences"),
        ({"budget": 5e5}, "need tokens"),
        ({"budget": 5e5, "tokens": "1T"}, "price=2.50"),
        ({"constraints": {"parallel.tp": 7}}, "cannot be cut over tp=7"),
        ({"constraints": ["parallel.tp=7"]}, "settings are a list"),
        ({"cluster": 8}, "cluster is an int"),
        ({"cluster": Path("no.toml")}, "`shardwise doctor --out cluster.toml` writes one"),
        ({"seq": "x"}, '`seq="x"` cannot be read'),
        ({"batch": 3, "seq": 8192}, "batch=8192"),
        ({"top": 0}, "top = 0 shows nothing"),
        ({"tokens": "1T", "within_s": 1}, "within_s=1"),
    ],
)
def test_mistakes(keys, said):
    with pytest.raises(UserError) as problem:
        shardwise.plan("llama3-8b", keys.pop("cluster", "8xh100"), **keys)
    assert said in str(problem.value) and not re.search(r"(?<!doctor )--[a-z]", str(problem.value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drop --merge-lora, or --nproc 2", "drop merge_lora, or nproc=2"),
        ("--within 2h, or --budget 5.5, a lower price", "within_s=7200, or budget=5.5, a lower price"),
        ("add --allow optimizer.lr if you mean it", 'add allow=["optimizer.lr"] if you mean it'),
        ("shardwise resume r --nproc 2", "shardwise resume r --nproc 2"),
        ("CUDA_VISIBLE_DEVICES= shardwise resume r --nproc 2", "CUDA_VISIBLE_DEVICES= shardwise resume r --nproc 2"),
        ("--out DIR; `shardwise plan a --cluster b` plans", "out=DIR; `shardwise plan a --cluster b` plans"),
        ("`train.steps` (command line)", "`train.steps` (this program)"),
    ],
)
def test_errors_have_arguments_for_options_and_leave_commands_as_they_are(text, said):
    with pytest.raises(UserError) as problem, for_programs():
        raise UserError(text, why=text, fix=text, where="--why-not")
    assert (problem.value.what, problem.value.why, problem.value.fix) == (said,) * 3
    assert problem.value.where == "this program"


def test_a_planned_layout_is_a_config():
    best = shardwise.plan("tiny", "this", seq=64, batch=512, top=1)[0]
    assert settings_of(best, {"train.steps": 3}).config.train.steps == 3
    assert settings_of(best).config == best.config


def test_editors_and_type_checkers_see_the_names_that_programs_get():
    for package in (shardwise, shardwise.plan):
        tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
        block = next(node for node in tree.body if isinstance(node, ast.If))
        shown = {alias.name: node.module for node in block.body for alias in node.names}
        if package is shardwise:
            assert shown.pop("plan") == "shardwise.api.planning", "the package that can be called calls it"
        assert shown == package._EXPORTS


def test_help_shows_the_arguments_of_plan():
    assert inspect.signature(shardwise.plan) == inspect.signature(plan_of_the_api)


def test_the_package_shows_its_names_and_loads_no_torch_for_plans():
    code = (
        "import shardwise, sys; names = dir(shardwise);"
        "assert {'train', 'plan', 'verify', 'load', 'Run', 'Callback', 'StopTraining', 'ModelSpec'} <= set(names);"
        "assert all(hasattr(shardwise, n) for n in names if n not in ('parallelize',));"
        "print(shardwise.plan('gpt2', '2xa100', top=1)[0]);"
        "from shardwise.plan import search; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "s per step" in done.stdout
