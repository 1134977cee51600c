"""The scanner finds the line of every key, however the file is written."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.lines import key_lines


def test_tables_dotted_keys_and_comments():
    text = '# a comment = 1\n[train]\nsteps = 3 # [no.table]\n\n"seq_len" = 4\n[a.b]\nc.d = 1\n'
    assert key_lines(text) == [
        (("train",), 2),
        (("train", "steps"), 3),
        (("train", "seq_len"), 5),
        (("a", "b"), 6),
        (("a", "b", "c", "d"), 7),
    ]


def test_values_that_span_lines_hide_no_keys_and_invent_none():
    text = 'a = """\nfake = 1\n[fake]\n"""\nb = [\n  1, # c = 2\n  "x = 3",\n]\n'
    text += "d = { e = 1, f = { g = 2 } }\nh = '''\ni = 1'''\nj = 1\n"
    assert dict(key_lines(text)) == {
        ("a",): 1, ("b",): 5, ("d",): 9, ("d", "e"): 9, ("d", "f"): 9, ("d", "f", "g"): 9, ("h",): 10, ("j",): 12
    }  # fmt: skip


@given(st.text(alphabet="ab=[]{}\"'\n#., \\1", max_size=60))
def test_never_raises_and_agrees_with_tomllib(text):
    found = {path for path, _ in key_lines(text)}
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert {(name,) for name in document} <= {path[:1] for path in found}
