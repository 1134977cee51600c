"""Each demo is played once by real processes; its figures are compared with formulas that are worked out here again.

The command is a fresh process of the pool, where torch is imported: it forks the ranks of the demo as any other would.
"""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import be_command, warm_command
from demo_processes import left_over, start_demo
from ranks import RankPool
from rich.console import Console

from shardwise.demo import DEMOS

LAYERS, HIDDEN, FFN, VOCAB = 4, 64, 128, 128
BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
DEADLINE_S = 60


Played = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def played(ranks: RankPool) -> Played:
    @cache
    def play(word: str) -> dict[str, Any]:
        done = warm_command(ranks, "explain", word, "--demo", "--json", cwd=Path.cwd(), timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        _, leader = ranks.pids()
        if sys.platform == "linux":
            assert left_over(leader) == [leader]
        assert done.stderr.startswith(f"demo     {word}: starting")
        return json.loads(done.stdout)

    return play


@pytest.mark.parametrize("word", DEMOS)
def test_every_figure_is_what_its_formula_says(word, played):
    report = played(word)
    assert (report["schema"], report["demo"], report["same"]) == (1, word, True)
    assert 2 <= report["world"] <= 4
    assert report["checks"] and all(check["same"] for check in report["checks"])
    whole = "largest difference of any loss, gradient or parameter from one process"
    (found,) = [check for check in report["checks"] if check["what"].startswith(whole)]
    assert found["counted"] < 1e-9


@pytest.mark.parametrize("word", DEMOS)
def test_the_story_fits_into_100_columns_without_colour(word, played):
    report = played(word)
    ranks = report.get("ranks")
    if word == "pipeline":
        schedules = report["schedules"]
        ranks = [{name: schedules[name]["ranks"][rank] for name in schedules} for rank in range(report["world"])]
    story = import_module(f"shardwise.demo.{DEMOS[word]}").make_story(ranks)
    page = io.StringIO()
    story.show(Console(file=page, width=100, highlight=False, markup=False))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in page.getvalue()
    assert f"{len(story.steps) + 1}. The formulas with the numbers put in, and what was counted" in lines
    assert any(line.startswith("SAME") for line in lines)
    assert [check.to_dict() for check in story.checks] == report["checks"]


def test_data_parallel_sums_and_sends_twice_the_gradient_less_one_share(played):
    ranks = played("data-parallel")["ranks"]
    assert [rank["before"][0] for rank in ranks] == [1, 2, 3, 4]
    assert all(rank["after"] == [10, 100, 1000, 10000] for rank in ranks)
    assert [rank["buffer_bytes"] for rank in ranks] == [4 * PARAMETERS] * 4
    if sys.platform == "linux":
        assert [rank["sent"] for rank in ranks] == pytest.approx([2 * 4 * PARAMETERS * 3 / 4] * 4, rel=0.05)


def test_data_parallel_shows_that_averages_of_averages_are_wrong(played):
    rank = played("data-parallel")["ranks"][0]
    ways = rank["ways"]
    assert ways["sum"] == pytest.approx(ways["one"], abs=1e-12)
    assert max(abs(a - b) for a, b in zip(ways["average"], ways["one"], strict=True)) > 1e-4
    targets = [rank["targets"] for rank in played("data-parallel")["ranks"]]
    losses = [rank["own_loss"] for rank in played("data-parallel")["ranks"]]
    assert ways["average"][-1] == pytest.approx(sum(losses) / 4)
    weighted = sum(count * loss for count, loss in zip(targets, losses, strict=True)) / sum(targets)
    assert ways["one"][-1] == pytest.approx(weighted)


@pytest.mark.parametrize(("stage", "gathers", "reductions"), [(0, 0, 0), (1, 6, 6), (2, 6, 12), (3, 18, 12)])
def test_zero_keeps_a_share_and_sends_what_the_table_says(stage, gathers, reductions, played):
    for rank in played("zero")["ranks"]:
        found = rank["stages"][stage]
        share = 1 if stage == 0 else 4
        assert found["kept"] == {
            "parameters": 4 * PARAMETERS // share,
            "gradients": 4 * PARAMETERS // share,
            "optimizer": 8 * PARAMETERS // share,
        }
        assert (found["gathers"], found["reductions"]) == (gathers, reductions)


def test_zero_shows_how_long_full_weights_live(played):
    stages = played("zero")["ranks"][0]["stages"]
    assert [stage["most_full_weights"] for stage in stages] == [0, 4 * PARAMETERS, 4 * PARAMETERS, 2 * 4 * BLOCK]
    assert stages[1]["most_full_gradients"] == 4 * PARAMETERS
    assert all(0 < stage["most_full_gradients"] <= 4 * BLOCK for stage in stages[2:])
    names = [when for when, _ in stages[3]["moments"]]
    assert names == 2 * ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    assert all(here[1 + int(when[1])] == "#" for when, here in stages[3]["moments"])  # who computes is there in full
    assert all(here.count("#") + here.count("+") <= 3 for _, here in stages[3]["moments"])


def test_tensor_parts_add_up_and_borders_cost_a_message_each(played):
    first, second = played("tensor")["ranks"]
    total = [a + b for a, b in zip(first["part"], second["part"], strict=True)]
    assert first["out"] == second["out"] == total == [6, 140]
    assert first["x_gradient"] == second["x_gradient"] == [42, 52]
    size = 4 * 4 * 64 * HIDDEN
    for phase in ("forward", "backward"):
        hidden = [m for m in first["transfers"] if m["phase"] == phase and m["num_bytes"] == size]
        assert len(hidden) == 2 * (2 * LAYERS + 1)  # two micro-batches
    norms = (2 * LAYERS + 1) * HIDDEN
    assert first["held"] == second["held"] == (PARAMETERS - norms) // 2 + norms


def test_sequence_trades_each_all_reduce_for_a_pair_and_keeps_less(played):
    for rank in played("sequence")["ranks"]:
        without, with_sp = rank["without"], rank["with"]
        pairs = 2 * 2 * (2 * LAYERS + 1)  # two micro-batches, forward and backward
        assert without["counts"] == {"all-reduce": pairs, "all-gather": 0, "all-to-all": 0}
        assert with_sp["counts"] == {"all-reduce": 0, "all-gather": pairs, "all-to-all": pairs}
        assert (without["between"], with_sp["between"]) == ([4, 64, HIDDEN], [4, 32, HIDDEN])
        assert with_sp["wire_bytes"] - without["wire_bytes"] == 4 * (2 * LAYERS + 1) * HIDDEN  # the norms' gradients
        assert with_sp["saved"] < without["saved"]
    assert [rank["left"] for rank in played("sequence")["ranks"]] == [[11, 22], [33, 44]]


def test_context_sends_keys_round_a_ring_and_keeps_half(played):
    ranks = played("context")["ranks"]
    kv = 4 * 2 * 4 * 32 * HIDDEN  # K and V of 4 rows x 32 tokens, fp32
    for rank in ranks:
        ring, ulysses = rank["ring"], rank["ulysses"]
        assert ring["sends"] == {"forward": 2 * LAYERS * kv, "backward": 2 * LAYERS * 2 * kv}
        assert ring["num_swaps"] == ulysses["num_sends"] == 0
        assert ulysses["swaps"] == {"forward": 2 * LAYERS * 2 * kv, "backward": 2 * LAYERS * 2 * kv}
        assert ring["saved"] == pytest.approx(rank["whole_saved"] / 2, rel=0.01)
        assert ring["saved"] < ulysses["saved"] < rank["whole_saved"]
    assert [rank["work"] for rank in ranks] == [{"zigzag": 1024, "stretch": 512}, {"zigzag": 1024, "stretch": 1536}]


def test_pipeline_runs_its_lists_and_holds_what_they_say(played):
    schedules = played("pipeline")["schedules"]
    held = {name: [rank["held"] for rank in found["ranks"]] for name, found in schedules.items()}
    assert held == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1], "zero-bubble": [4] * 4, "zbv": [8] * 4}
    assert schedules["gpipe"]["bubble_simulated"] == pytest.approx(3 / 11)
    assert schedules["1f1b"]["bubble_simulated"] == pytest.approx(3 / 11)
    for name, found in schedules.items():
        sends = 2 * 8 * 3 * (2 if name == "zbv" else 1)
        assert sum(rank["sends"] for rank in found["ranks"]) == sends
        assert sum(rank["send_bytes"] for rank in found["ranks"]) == sends * 4 * 2 * 32 * HIDDEN
        assert found["step_s_measured"] >= 0.99 * found["step_s_simulated"]  # nobody can be faster than asleep


def test_text_in_a_pipe_begins_at_once_and_has_no_colour():
    process = start_demo("tensor")
    assert process.stdout is not None
    assert process.stdout.readline() == "demo     tensor: starting a few processes on this machine ...\n"
    rest, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, rest
    assert "\x1b" not in rest and max(map(len, rest.splitlines())) <= 100
    assert "SAME     8 of 8 figures" in rest


def lie() -> tuple[int, str, str]:
    """A demo whose formula is wrong."""
    from shardwise.demo.story import Check, Story

    lying: Any = types.ModuleType("shardwise.demo.lying")
    lying.WORLD = 2
    lying.act = lambda rank, world, say: rank
    lying.make_story = lambda found: Story("zero", "a title", checks=[Check("ranks", "N + 1", "2 + 1", 3, len(found))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "shardwise.demo.lying", lying)
        patch.setitem(DEMOS, "zero", "lying")
        return be_command(["explain", "zero", "--demo"], ".")


def test_a_count_that_differs_is_said_and_ends_with_1(ranks: RankPool):
    [(code, out, err)] = ranks.run(lie, 1, fresh=True)
    assert code == 1, out + err
    assert "WRONG    ranks: counted 2, not 3" in out
    assert "DIFFERENT" in out and "SAME" not in out


def test_experts_get_every_token_that_chose_them_and_send_it_back(played):
    ranks = played("experts")["ranks"]
    chosen = {token: expert for rank in ranks for token, expert in zip(rank["tokens"], rank["chosen"], strict=True)}
    for expert, rank in enumerate(ranks):
        assert rank["arrived"] == sorted(token for token, wish in chosen.items() if wish == expert)
        assert rank["back"] == [token + 100 * (chosen[token] + 1) for token in rank["tokens"]]
    whole = 4 * 2 * 8 * 3 * HIDDEN * 32  # two layers, eight experts of width 32
    assert [rank["expert_bytes"] for rank in ranks] == [whole // 4] * 4
    assert [sum(load) for rank in ranks for load in rank["loads"]] == [2 * 2 * 64] * 16
