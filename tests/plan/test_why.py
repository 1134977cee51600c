"""`--why-not`: what is named as the cause and as the cure is true of the predictions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwise.errors import UserError
from shardwise.plan.answer.answer import Answer, answer
from shardwise.plan.answer.question import ask
from shardwise.plan.answer.why import why_not
from shardwise.plan.prediction.predict import predict


@pytest.fixture(scope="module")
def base() -> Answer:
    return answer(ask("llama3.2-1b", "2x4xh100", seq="2k", batch="256k"), 3, detail=False)


def test_differences_add_up_to_what_it_is_slower(base):
    made = why_not(base, "tp=4 pp=2")
    more = made.row.step_s - base.rows[0].step_s
    assert sum(one.seconds for one in made.differences) == pytest.approx(more, rel=0.05)
    assert made.differences[0].seconds > 0 and made.differences[0].why


def test_a_link_at_which_it_would_win_is_where_the_two_change_places(base):
    question, winner = base.question, base.rows[0].candidate
    made = why_not(base, "tp=2 pp=4")
    text = next(text for text in made.wins_if if text.startswith("nic below"))
    rate = float(re.search(r"below ([\d.e+-]+) GB/s", text)[1]) * 1e9  # type: ignore[index]

    def lead(factor: float) -> float:
        slow = [
            replace(link, bandwidth=rate * factor) if link.name == "nic" else link for link in question.cluster.tiers
        ]
        cluster = replace(question.cluster, tiers=tuple(slow))
        other, first = (
            predict(question.spec, cluster, question.job, one.plan).step_s for one in (made.row.candidate, winner)
        )
        return other - first

    assert lead(1.1) > 0 > lead(0.9)


def test_a_changed_word_gives_what_is_said_of_it(base):
    made = why_not(base, "tp=4 pp=2")
    assert made.nearest and all(row.step_s < made.row.step_s for _, row in made.nearest)
    for change, row in made.nearest:
        kept = "tp" if change.startswith("pp") else "pp"
        assert getattr(row.candidate.plan, kept) == {"tp": 4, "pp": 2}[kept]


def test_what_does_not_fit_has_remedies_that_do(base):
    question = ask("llama3-8b", "2xh100", seq="2k", batch="32k")
    made = why_not(answer(question, 1, detail=False), "dp=2 zero=0 offload=none recompute=none")
    assert not made.fits and made.row.candidate.prediction.memory_bytes > made.limit
    assert made.remedies and all(one.memory_bytes <= made.limit for one in made.remedies)


def test_a_layout_that_cannot_be_is_refused_like_any_constraint(base):
    with pytest.raises(UserError, match="tp=4 pp=4 needs 16 GPUs"):
        why_not(base, "tp=4 pp=4")
    with pytest.raises(UserError, match="cannot be cut over tp=5"):
        why_not(base, "tp=5")
