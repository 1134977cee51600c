"""Layouts against the number of processes. (Rules between keys: test_errors.py.)"""

from dataclasses import replace

import pytest

from shardwise.config.check import check_world
from shardwise.config.schema import Config, ParallelConfig
from shardwise.errors import UserError


def config(**parallel):
    return replace(Config(), parallel=ParallelConfig(**parallel))


def test_degrees_that_multiply_to_the_world_pass():
    check_world(config(dp=4), 4)
    check_world(config(dp=2), 4)
    check_world(config(dp=2, tp=2, cp=1, pp=1), 4)
    check_world(config(), 3)


@pytest.mark.parametrize(
    ("parallel", "world"), [({"dp": 3}, 4), ({"dp": 2, "tp": 1, "cp": 1, "pp": 1}, 4), ({"dp": 8}, 4)]
)
def test_degrees_that_do_not_fit_are_refused(parallel, world):
    with pytest.raises(UserError, match=f"there are {world}"):
        check_world(config(**parallel), world)
