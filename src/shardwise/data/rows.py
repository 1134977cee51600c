"""Turns one row of a .jsonl or .parquet file into one document: plain text, or a conversation.

Invariant: a row is either understood or refused with its place; nothing is guessed. What a conversation looks like as
text is decided later, by the model's template (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError

Message = dict[str, Any]

ROLE_OF_SPEAKER = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ANSWER_FIELDS = ("response", "completion")
ROW_FIELDS = (
    "messages",
    "conversations",
    "prompt",
    *ANSWER_FIELDS,
    "instruction",
    "input",
    "output",
)  # and the text field


@dataclass(slots=True)
class Document:
    """A document has either `text` (raw bytes of a file, or a row's string) or `messages`. `num_bytes` is its share of
    the file on disk."""

    origin: str
    num_bytes: int
    text: bytes | str | None = None
    messages: list[Message] | None = None


def document_of_row(row: Any, *, text_field: str, origin: str, num_bytes: int) -> Document:
    """Returns the richest form that a row offers: messages first, then the text field, then prompt and answer."""
    if not isinstance(row, Mapping):
        raise UserError(
            f"a row that is not an object but {type(row).__name__}",
            why="each line must be a JSON object with named fields",
            fix=f'write it as {{"{text_field}": ...}}',
            where=origin,
        )
    messages = _messages(row, origin)
    if messages is not None:
        return Document(origin, num_bytes, messages=messages)
    text = row.get(text_field)
    if isinstance(text, str):
        return Document(origin, num_bytes, text=_sound(text))
    if text_field in row and text is not None:
        raise UserError(
            f"the field `{text_field}` is not text but {type(text).__name__}",
            why="documents are strings",
            fix="name the field that holds the text: data.text_field=NAME",
            where=origin,
        )
    pair = _prompt_and_answer(row, origin)
    if pair is not None:
        return Document(origin, num_bytes, messages=pair)
    if text_field in row:  # present but null: an empty document, skipped by the caller
        return Document(origin, num_bytes, text="")
    raise UserError(
        f"a row without `{text_field}`, `messages`, or a prompt and an answer",
        why=f"its fields are {', '.join(map(str, row)) or '(none)'}",
        fix="name the field that holds the text: data.text_field=NAME (data prepare: --text-field NAME)",
        where=origin,
    )


def _messages(row: Mapping[str, Any], origin: str) -> list[Message] | None:
    if row.get("messages") is not None:
        return _checked(row["messages"], origin)
    if row.get("conversations") is not None:  # the {from, value} spelling
        turns = row["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise _malformed("`conversations` must be a list of turns", origin)
        if turns and "from" in turns[0]:
            turns = [
                {"role": ROLE_OF_SPEAKER.get(turn.get("from"), turn.get("from")), "content": turn.get("value")}
                for turn in turns
            ]
        return _checked(turns, origin)
    return None


def _prompt_and_answer(row: Mapping[str, Any], origin: str) -> list[Message] | None:
    answer = next((row[field] for field in ANSWER_FIELDS if row.get(field) is not None), None)
    prompt = row.get("prompt")
    if prompt is not None and answer is not None:
        if isinstance(prompt, list) and isinstance(answer, list):
            return _checked([*prompt, *answer], origin)
        return _checked([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], origin)
    if row.get("instruction") is not None and row.get("output") is not None:
        question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        return _checked(
            [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}], origin
        )
    return None


def _checked(messages: Any, origin: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise _malformed("`messages` must be a list with at least one message", origin)
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _malformed("every message needs a `role` (system, user, assistant)", origin)
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_of(part, origin) for part in content)
        if content is not None and not isinstance(content, str):
            raise _malformed(f"a message's content is {type(content).__name__}, not text", origin)
        # Parquet rows carry every field of the schema, absent ones as null: templates must not see those.
        kept = {key: value for key, value in message.items() if value is not None}
        kept["content"] = _sound(content or "")
        checked.append(kept)
    if not any(message["role"] == "assistant" for message in checked):
        raise UserError(
            "a conversation without an answer",
            why=f"its roles are {', '.join(message['role'] for message in checked)}; loss is on the assistant's "
            "messages only",
            fix="drop the row, or give it as plain text",
            where=origin,
        )
    return checked


def _text_of(part: Any, origin: str) -> str:
    """Returns the text of one part of a message's content; pictures, sounds and calls have none."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if isinstance(text, str):
        return text
    kind = part.get("type", "without a type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(
        f"a message with a part that is not text: {kind}",
        why="a language model reads text; the part would be left out of what it learns from",
        fix='drop the row, or write the part as {"type": "text", "text": "..."}',
        where=origin,
    )


def _malformed(why: str, origin: str) -> UserError:
    return UserError(
        "a conversation that cannot be read",
        why=why,
        fix='write {"messages": [{"role": "user", "content": "..."}, ...]}',
        where=origin,
    )


def _sound(text: str) -> str:
    """Returns the text without lone surrogates, which JSON escapes can spell and UTF-8 cannot."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="replace").decode("utf-8")
    return text
