"""Turns conversations into text by a chat template, and says which parts of that text carry loss.

Templates are the Jinja files that come with a model; `rendering.py` runs them. Loss is on the assistant's answers
only, end-of-turn token included. Where the template marks answers itself (`{% generation %}`), its marks are used;
otherwise the conversation is rendered up to each answer and past it, and the difference is the answer. Invariant: an
answer whose place cannot be found this way is counted and left without loss, never guessed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.rendering import CLOSE, OPEN, Renderer, RenderError
from shardwise.data.rows import Document, Message, document_of_row
from shardwise.data.tokenizer import Span, Tokenizer
from shardwise.errors import UserError
from shardwise.files import open_regular
from shardwise.foreign_json import read_object

# Used when the model brings no template: every turn is headed by its role, answers end with the end-of-text token.
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{%- if not loop.first %}{{ "\\n" }}{% endif -%}
### {{ message.role }}
{{ message.content }}{% if message.role == "assistant" %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "\\n### assistant\\n" }}{% endif -%}
"""

BUILT_IN = "built-in chat template"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the character spans of its answers."""

    text: str
    answers: list[Span]
    num_lost: int  # answers whose place in the text is not stable


class ChatTemplate:
    """A compiled template with the special strings its model defines."""

    def __init__(self, template: str, special_strings: dict[str, str], *, origin: str):
        self.template, self.special_strings, self.origin = template, special_strings, origin

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.template, self.special_strings], sort_keys=True).encode()).hexdigest()

    def prompt(self, messages: list[Message]) -> str:
        """Returns the text a model should continue with its answer."""
        return self._render(messages, add_generation_prompt=True)[0]

    def render(self, messages: list[Message]) -> Rendered:
        """Returns the whole conversation as text, with the character spans of its answers."""
        text, marked = self._render(messages)
        if marked:
            return Rendered(text, marked, num_lost=0)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        found = [self._answer_span(messages, index, text) for index in turns]
        spans = [span for span in found if span is not None]
        return Rendered(text, spans, num_lost=len(turns) - len(spans))

    def _answer_span(self, messages: list[Message], index: int, text: str) -> Span | None:
        """Returns the span from the end of the generation prompt to the end of the turn, if both stand in `text` as
        rendered alone; else None."""
        try:
            before = self._render(messages[:index])[0]
            prompt = self.prompt(messages[:index])
            through = text if index == len(messages) - 1 else self._render(messages[: index + 1])[0]
        except UserError:  # the whole conversation is fine but its beginning alone is not, as when nobody asked first
            return None
        # A template may render an old turn differently from the newest one (dropping its reasoning, for instance).
        start = _length_in_common(prompt, through)
        if not text.startswith(through) or start < len(before.rstrip()):
            return None
        answer = through[start:]
        content = messages[index]["content"]
        closed = answer.rstrip()
        # Whitespace after an end-of-turn token belongs to the template; after bare content it is the end of the turn.
        if isinstance(content, str) and not closed.endswith(content.rstrip()):
            answer = closed
        return (start, start + len(answer)) if answer else None

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        try:
            raw = self._renderer.render(messages, add_generation_prompt)
        except RenderError as error:
            if error.line is not None:
                raise UserError(
                    "the chat template is not valid Jinja",
                    why=str(error),
                    fix="repair the template, or give another: data.chat_template=FILE",
                    where=f"{self.origin}:{error.line}",
                ) from None
            raise UserError(
                "the chat template refuses a conversation",
                why=f"{error} (roles: {_roles(messages)})",
                fix="repair the row, or give another template: data.chat_template=FILE",
                where=self.origin,
            ) from None
        return _without_marks(raw) if OPEN in raw else (raw, [])

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.template, self.special_strings, is_built_in=self.template == DEFAULT_TEMPLATE)


def open_template(path: str | None, model_dir: Path | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template file the user named, else the model's own, else the built-in one."""
    if path is not None:
        file = Path(path).expanduser()
        return ChatTemplate(_read(file), tokenizer.special_strings, origin=str(file))
    places = [model_dir, tokenizer.path.parent if tokenizer.path else None]
    for directory in (place for place in places if place is not None):
        own = directory / "chat_template.jinja"
        if own.is_file():
            return ChatTemplate(_read(own), tokenizer.special_strings, origin=str(own))
        for file in (directory / "tokenizer_config.json", directory / "chat_template.json"):
            text = _template_in(file)
            if text is not None:
                return ChatTemplate(text, tokenizer.special_strings, origin=str(file))
    return ChatTemplate(DEFAULT_TEMPLATE, tokenizer.special_strings, origin=BUILT_IN)


def render(
    row: list[Message] | dict[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Returns the ids and the loss mask of one conversation, given as messages or as a row (prompt and response, for
    example)."""
    fields = {"messages": row} if isinstance(row, list) else row
    document = document_of_row(fields, text_field="text", origin="row", num_bytes=0)
    ids, mask, _ = encode_conversations([document], template, tokenizer)
    return ids.tolist(), mask.tolist()


def encode_conversations(
    documents: list[Document], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, int, int]]:
    """Returns all conversations' ids in one array with their loss mask; then their lengths in tokens, the number of
    lost answers and the bytes of the rendered text."""
    rendered = [template.render(_clean(document.messages or [])) for document in documents]
    encoded = tokenizer.encode_spans([one.text for one in rendered], [one.answers for one in rendered])
    all_ids, all_masks = [], []
    for ids, mask in encoded:
        # Documents end with the separator. One that the template did not write is not an answer: no loss on it.
        closed = len(ids) > 0 and ids[-1] == tokenizer.separator
        all_ids.append(ids if closed else np.append(ids, ids.dtype.type(tokenizer.separator)))
        all_masks.append(mask if closed else np.append(mask, np.uint8(0)))
    lengths = np.array([len(ids) for ids in all_ids], dtype=np.int64)
    text_bytes = sum(len(one.text.encode()) for one in rendered)
    num_lost = sum(one.num_lost for one in rendered)
    return np.concatenate(all_ids), np.concatenate(all_masks), (lengths, num_lost, text_bytes)


def _roles(messages: list[Message]) -> str:
    shown = [str(message["role"])[:20] for message in messages[:8]]
    return ", ".join(shown) + (f" and {len(messages) - 8} more" if len(messages) > 8 else "")


def _length_in_common(one: str, other: str) -> int:
    """Returns how many characters two texts have in common at their start."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (left, right) in enumerate(zip(one, other)) if left != right), min(len(one), len(other)))


def _clean(messages: list[Message]) -> list[Message]:
    """Returns the messages without the characters that mark structure: NUL (the byte separator) and the two
    brackets."""
    cleaned = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and any(mark in content for mark in ("\0", OPEN, CLOSE)):
            message = {**message, "content": content.replace("\0", "").replace(OPEN, "").replace(CLOSE, "")}
        cleaned.append(message)
    return cleaned


def _without_marks(raw: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for position, chunk in enumerate(raw.split(OPEN)):
        inside, closed, outside = chunk.partition(CLOSE) if position else ("", "", chunk)
        if closed:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(pieces), spans


def _template_in(path: Path) -> str | None:
    try:
        found = read_object(path).get("chat_template")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # never another template in silence: the model would learn another format
        raise UserError(
            f"cannot read {path}",
            why=str(error),
            fix="repair or remove it, or give the template: data.chat_template=FILE",
        ) from None
    if isinstance(found, list):  # several named templates: the one called "default"
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = next((entry.get("template") for entry in named), None)
    return found if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the chat template {path}",
            why=getattr(error, "strerror", None) or str(error),
            fix="give the path of a Jinja file, or leave data.chat_template out",
        ) from None
