"""Raw warnings of torch, FSDP2 and torchao never reach a user; everything else does."""

from __future__ import annotations

import logging
import warnings

import pytest

from shardwise.api.settings import for_programs
from shardwise.run.known_warnings import KNOWN_RECORDS, KNOWN_WARNINGS, known_warnings_left_out

FSDP2 = "FSDP2-wrapped module (Block) returned a view tensor. An in-place op on this view"


def test_known_warnings_are_left_out_and_others_are_not(caplog):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with known_warnings_left_out():
            warnings.warn(FSDP2, UserWarning, stacklevel=1)
            warnings.warn("something new", UserWarning, stacklevel=1)
            logging.getLogger("torchao").warning("Failed to load a.so: no CUDA")
            logging.getLogger("torchao").warning("something new")
        warnings.warn(FSDP2, UserWarning, stacklevel=1)  # outside of our commands it is everybody's own
    assert [str(one.message) for one in seen] == ["something new", FSDP2]
    assert caplog.messages == ["something new"]


ENUM = "<enum 'Kind'> is an Enum subclass and is now natively supported by torch.compile as an opaque value type."


@pytest.mark.parametrize("left_out", [known_warnings_left_out, for_programs])
def test_advice_to_torchaos_authors_is_left_out_of_commands_and_of_programs(left_out, caplog):
    """transformers and peft import torchao, whose advice arises in a module of torch."""
    with left_out():
        logging.getLogger("torch.utils._pytree").warning(ENUM)
        logging.getLogger("torch.utils._pytree").warning("something new")
    assert caplog.messages == ["something new"]


def test_each_has_its_reason():
    assert all(len(reason) > 20 for reason in (*KNOWN_WARNINGS.values(), *KNOWN_RECORDS.values()))
