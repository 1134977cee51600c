"""Text ends before the first stop string, however it is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.until_stop import UntilStop

LETTERS = st.text("ab\n", max_size=12)


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_pieces_are_as_good_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    text, until = "".join(pieces), UntilStop(stops)
    said = "".join(until.push(piece) for piece in pieces) + until.finish()
    ends = [text.find(stop) for stop in stops if stop in text]
    assert until.has_ended == bool(ends)
    assert not any(stop in said for stop in stops)
    assert text.startswith(said) and (said == text or bool(ends))
    if len(pieces) <= 1:
        assert said == text[: min(ends, default=len(text))]


def test_what_may_begin_a_stop_string_waits() -> None:
    until = UntilStop(["\nUser:"])
    assert [until.push(piece) for piece in ("one", "\nUs", "e it\nU", "ser: no")] == ["one", "", "\nUse it", ""]
    assert until.has_ended and until.push("more") == until.finish() == ""
