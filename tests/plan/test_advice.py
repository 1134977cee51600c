"""Do not distribute: the planner says so when its own numbers say so, and is silent when they do not."""

from __future__ import annotations

import pytest

from shardwise.plan.answer.advice import Advice, advice_for
from shardwise.plan.answer.question import ask
from shardwise.plan.layouts.search import explore


def advice(model: str, cluster: str, **more: object) -> list[Advice]:
    question = ask(model, cluster, **more)  # type: ignore[arg-type]
    return advice_for(question, explore(question.spec, question.cluster, question.job, 3))


def test_a_small_batch_has_work_for_one_of_eight_cards():
    (one,) = advice("tiny", "8xh100", seq="128", batch="128")
    assert one.what == "use 1 of your 8 GPUs"


def test_lora_fits_on_one_card_where_all_weights_do_not():
    found = advice("llama3-8b", "2xh100", seq="2k", batch="16k", tokens="10M")
    assert any("LoRA on one card" in one.what for one in found), found


def test_a_pretraining_gets_no_advice_on_adapters():
    assert not any("LoRA" in one.what for one in advice("llama3-8b", "2xh100", seq="2k", batch="1M", tokens="1T"))


@pytest.mark.parametrize(("nic", "is_better"), [("100MB/s", True), ("50GB/s", False)])
def test_fewer_nodes_are_faster_on_a_slow_link(nic, is_better):
    found = advice("llama3.2-1b", f"4x1xh100:nic={nic}", seq="2k", batch="64k")
    assert any("of your 4 nodes: fewer nodes are faster on this link" in one.what for one in found) == is_better, found


def test_fewer_nodes_that_are_no_faster_are_not_called_faster():
    """Seven of eight slow cards lose 1 %."""
    found = advice("llama3-8b", "8x1xl40s:nic=25Gb/s", seq="4k", batch="256k")
    texts = [one.what for one in found if "of your 8 nodes" in one.what]
    assert texts and all("as fast" in text for text in texts), found


@pytest.mark.parametrize(("tokens", "is_short"), [("2M", True), ("100B", False)])
def test_a_training_that_is_shorter_than_its_start_up(tokens, is_short):
    found = advice("gpt2", "4xh100", seq="1k", batch="512k", tokens=tokens)
    assert any("shorter than its own start-up" in one.what for one in found) == is_short, found
    assert all("assumed" in one.why for one in found if "start-up" in one.what)


def test_a_job_that_fills_its_cluster_gets_no_advice():
    assert advice("llama3.2-1b", "4xh100", seq="4k", batch="512k", tokens="1T") == []
