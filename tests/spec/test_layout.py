"""One layout string, printed and read."""

from shardwise.spec.layout import WORDS, format_layout, parse_layout
from shardwise.spec.schema import MemoryConfig, ParallelConfig


def test_the_string_of_the_public_surface():
    parallel = ParallelConfig(dp=128, zero=3, tp=4, sequence=True, pp=2)
    text = format_layout(parallel, MemoryConfig(recompute="selective"))
    assert text == "dp=128 zero=3 tp=4 sp pp=2 schedule=1f1b recompute=selective"
    assert parse_layout(text) == {
        "parallel.dp": "128",
        "parallel.zero": "3",
        "parallel.tp": "4",
        "parallel.sequence": "true",
        "parallel.pp": "2",
        "parallel.schedule": "1f1b",
        "memory.recompute": "selective",
    }


def test_everything_at_once_reads_back():
    parallel = ParallelConfig(
        dp=4, zero=3, replicate=2, tp=2, sequence=True, cp=2, cp_kind="ulysses", pp=2, schedule="interleaved",
        virtual_stages=2, split=(3, 3, 3, 3), ep=2,
    )  # fmt: skip
    text = format_layout(parallel, MemoryConfig(recompute="every-2", offload="optimizer", activation_offload=True))
    assert text.split()[-4:] == ["ep=2", "recompute=every-2", "offload=optimizer", "activation_offload=true"]
    assert set(parse_layout(text)) == set(WORDS.values()) - {"memory.precision"}
    assert parse_layout(text)["parallel.split"] == "3,3,3,3"


def test_what_does_not_apply_is_left_out():
    assert format_layout(ParallelConfig(dp=2, zero=0, tp=1)) == "dp=2"
    assert format_layout(ParallelConfig(dp=2, pp=2)) == "dp=2 pp=2 schedule=1f1b"  # what is open is not said


def test_a_word_for_the_split():
    text = format_layout(ParallelConfig(dp=1, pp=2, split="even"))
    assert text == "dp=1 pp=2 schedule=1f1b split=even"
    assert parse_layout(text)["parallel.split"] == "even"
