"""Chat templates: what a conversation looks like, and that loss is on the answers and nothing else."""

from __future__ import annotations

import json

import pytest

from shardwise.data.chat import BUILT_IN, ChatTemplate, open_template, render
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import UserError

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the quick?"},
    {"role": "assistant", "content": "brown fox"},
    {"role": "user", "content": "jumps?"},
    {"role": "assistant", "content": "over 🙂 a dog"},
]


def trained_text(row, template, tokenizer):
    ids, mask = render(row, template, tokenizer)
    assert len(ids) == len(mask)
    return tokenizer.decode([token for token, loss in zip(ids, mask) if loss], keep_special=True)


def test_chatml_trains_answers_and_their_end_of_turn(bpe, chatml):
    template = ChatTemplate(chatml, bpe.special_strings, origin="test")
    assert trained_text(TALK, template, bpe) == "brown fox<|im_end|>over 🙂 a dog<|im_end|>"


def test_header_template_trains_answers_and_their_end_of_turn(bpe, headers):
    template = ChatTemplate(headers, bpe.special_strings, origin="test")
    ids, _ = render(TALK, template, bpe)
    assert trained_text(TALK, template, bpe) == "brown fox<|eot_id|>over 🙂 a dog<|eot_id|>"
    assert bpe.decode(ids, keep_special=True).startswith("<|begin_of_text|><|start_header_id|>system")


def test_rendering_equals_transformers(bpe, tokenizer_dir, chatml, headers):
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_dir / "tokenizer.json"), bos_token="<|begin_of_text|>")
    for source in (chatml, headers):
        ours, _ = render(TALK, ChatTemplate(source, bpe.special_strings, origin="test"), bpe)
        theirs = other.apply_chat_template(TALK, chat_template=source, tokenize=True, return_dict=False)
        assert ours == [*theirs, bpe.separator]


def test_generation_blocks_decide_when_the_template_has_them(bpe):
    marked = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% "
        "endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    template = ChatTemplate(marked, bpe.special_strings, origin="test")
    # The space before an answer is part of its first token, so it is trained with it.
    assert trained_text(TALK, template, bpe) == " brown fox over 🙂 a dog"


def test_built_in_template_ends_answers_with_the_separator():
    tokenizer = ByteTokenizer()
    template = open_template(None, None, tokenizer)
    assert template.origin == BUILT_IN
    ids, mask = render({"prompt": "hi", "response": "hey\0 you"}, template, tokenizer)
    assert bytes(ids) == b"### user\nhi\n### assistant\nhey you\0"
    assert bytes(token for token, loss in zip(ids, mask) if loss) == b"hey you\0"


def test_prompt_is_where_the_answer_begins(chatml):
    template = ChatTemplate(chatml, {}, origin="test")
    assert template.render(TALK[:3]).text.startswith(template.prompt(TALK[:2]) + "brown fox")


def test_template_whose_turn_ends_in_a_newline_trains_that_newline():
    tokenizer = ByteTokenizer()
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}{% if add_generation_prompt "
        "%}assistant: {% endif %}"
    )
    assert trained_text(TALK[1:3], ChatTemplate(plain, {}, origin="test"), tokenizer) == "brown fox\n"


def test_answers_that_a_template_rewrites_later_are_lost_but_the_last_is_found():
    hides_old = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}(old){% else %}{{ "
        "m.content }}{% endif %};"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rendered = ChatTemplate(hides_old, {}, origin="test").render(TALK)
    assert [rendered.text[start:end] for start, end in rendered.answers] == ["over 🙂 a dog;"]
    assert rendered.num_lost == 1


def test_model_template_is_found_in_either_place(tokenizer_dir, bpe, tmp_path, chatml, headers):
    assert open_template(None, tokenizer_dir, bpe).template == chatml
    (tmp_path / "chat_template.jinja").write_text(headers)
    assert open_template(None, tmp_path, bpe).template == headers
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_template(None, tmp_path, ByteTokenizer()).template == "y"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ raise_exception('system first') }}", "refuses a conversation"),
        ("{{ ''.__class__.mro() }}", "refuses"),
    ],
)
def test_bad_templates_are_user_errors(template, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(template, {}, origin="bad.jinja").render(TALK)


def test_missing_template_file_is_a_user_error():
    with pytest.raises(UserError, match="cannot read the chat template"):
        open_template("no/such.jinja", None, ByteTokenizer())
