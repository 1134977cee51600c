"""A chat template is somebody else's program: whatever it does, there is a text or a refusal, soon and in little
memory."""

from __future__ import annotations

import resource
import time

import pytest

from shardwise.data import rendering
from shardwise.data.chat import ChatTemplate
from shardwise.data.rendering import Renderer
from shardwise.errors import UserError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

HOSTILE = {
    "doubled string": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x|length }}",
    "multiplied string": "{{ 'a' * 10**11 }}",
    "wide format": "{{ '%1000000000000d' % 1 }}",
    "centred": "{{ 'a'|center(10**11) }}",
    "list": "{{ ([0] * 10**11)|length }}",
    "too large a range": "{% for i in range(10**30) %}{% endfor %}",
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "unknown name": "{{ a.b.c }}",
    "division": "{{ 1 // 0 }}",
    "no format": "{{ '%d' % 'x' }}",
    "private": "{{ ''.__class__.__mro__ }}",
    "long text": "{% for i in range(90000) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 20 }}{% endfor %}",
    "not closed": "{% for i in range(3) %}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "number": "{{ (9**(9**9)) % 7 }}",
}


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        ChatTemplate(text, {}, origin="template").render(TALK)
    assert len(str(caught.value).splitlines()) == 3
    return str(caught.value)


def test_what_would_take_all_memory_or_the_whole_stack_is_refused():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, text in HOSTILE.items():
        assert "the chat template" in refusal(text), name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB in this process


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_never_ends_is_ended_and_not_tried_again(kind, monkeypatch):
    monkeypatch.setattr(rendering, "CPU_SECONDS", 0.5)
    monkeypatch.setattr(rendering, "SERVE", "import shardwise.data.rendering as r; r.CPU_SECONDS = 0.5; r.serve()")
    template = ChatTemplate(ENDLESS[kind], {}, origin="template")
    for _ in range(2):
        began = time.process_time()
        with pytest.raises(UserError, match=r"refuses a conversation") as caught:
            template.render(TALK)
        assert "computed for more than 0.5 s" in caught.value.why
        assert time.process_time() - began < 5


def test_a_process_renders_what_this_one_would():
    text = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.extra|tojson }}{{ eos_token }}{% endfor %}"
    talk = [{"role": "user", "content": "ü🙂\n", "extra": {"a": [1, None, "x"]}}]
    here, there = (Renderer(text, {"eos_token": "</s>"}, is_built_in=where) for where in (True, False))
    for _ in range(3):
        assert there.render(talk, False) == here.render(talk, False) == 'user ü🙂\n {"a": [1, null, "x"]}</s>'


def test_the_process_ends_with_its_template():
    renderer = Renderer("a", {}, is_built_in=False)
    assert renderer.render(TALK, False) == "a"
    process = renderer._process
    assert process is not None and process.poll() is None
    del renderer
    assert process.poll() is not None
