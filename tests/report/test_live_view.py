"""What a run shows while it goes on: a rate and an ETA that the first step and measured steps do not spoil."""

from __future__ import annotations

from shardwise.report.terminal import LiveView
from shardwise.terminal import patience


def step(number: int, seconds: float) -> dict[str, float]:
    return {"step": number, "loss": 2.0, "step_s": seconds, "tokens": 1000, "data_wait_s": 0.0}


def test_rate_and_eta_are_of_timed_steps_after_the_first(capsys):
    view = LiveView(num_steps=10, unigram=None)
    view.step(step(1, 60.0))  # compiles
    view.step(step(2, 9.0), is_timed=False)  # watches its memory
    for number in (3, 4):
        view.step(step(number, 0.5))
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith("60.00 s, warming up") and second.endswith("9.00 s, warming up")
    assert third.endswith("2.0k tok/s  data wait 0.0 %  eta 0:04")
    assert fourth.endswith("2.0k tok/s  data wait 0.0 %  eta 0:03")


def test_a_wait_is_announced_when_it_is_long_and_only_then(capsys):
    with patience("quick    ...", after_s=60.0):
        pass
    assert capsys.readouterr().err == ""
    with patience("slow     ...", after_s=0.0, every_s=0.0):
        while (said := capsys.readouterr().err).count("\n") < 2:
            pass
    assert said.startswith("slow     ...") or " s\n" in said
