"""Host lists of SLURM, read without SLURM."""

from __future__ import annotations

import pytest

from shardwise.errors import UserError
from shardwise.launch.schedulers.hostlist import expand


@pytest.mark.parametrize(
    "text, names",
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[01,03-04,7]-ib,login", ["gpu01-ib", "gpu03-ib", "gpu04-ib", "gpu7-ib", "login"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("a[98-101].cluster.org", ["a98.cluster.org", "a99.cluster.org", "a100.cluster.org", "a101.cluster.org"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1-2]]", "n[[1]]", "n[0-999999999]"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UserError, match="cannot read the node list"):
        expand(text)


def test_lists_that_would_fill_the_memory_are_refused():
    with pytest.raises(UserError, match="more than"):
        expand("a[0-99999]b[0-99999]")
