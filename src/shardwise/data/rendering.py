"""Renders chat templates in a process of their own, within limits of time, memory and length.

A template is a program that comes with a model. jinja2's sandbox keeps it from files and from Python's own objects, but
not from nested loops that never end or from strings that take all memory. Invariant: whatever a template does, the
caller gets a text or a `RenderError` with a reason, after at most CPU_SECONDS of computing and MEMORY_BYTES of memory.
One process serves one template until its caller forgets it. Who calls it is `chat.py`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from functools import cached_property
from typing import IO, Any

CPU_SECONDS = 10.0  # for one conversation; a usual one takes a thousandth of a second
MEMORY_BYTES = 2 * 2**30
TEXT_LENGTH = 64 * 2**20  # characters of a rendered conversation
SERVE = "from shardwise.data.rendering import serve; serve()"
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters around `{% generation %}` blocks; removed from the text afterwards


class RenderError(Exception):
    """Says why a template gave no text. `line` is set where the template itself is not valid."""

    def __init__(self, why: str, line: int | None = None):
        super().__init__(why)
        self.line = line


class Renderer:
    """Renders one template. A built-in one is rendered here, one that came from somewhere in a process of its own."""

    def __init__(self, template: str, special_strings: dict[str, str], *, is_built_in: bool):
        self._template, self._special_strings, self._is_built_in = template, special_strings, is_built_in
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: a fork starts its own
        self._lock = threading.Lock()
        self._ended = ""  # why a process had to be ended: it is not tried again

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Returns the text of a conversation, with OPEN and CLOSE around generation blocks."""
        if self._is_built_in:
            return _render(self._compiled, self._special_strings, messages, add_generation_prompt)
        with self._lock:
            if self._ended:
                raise RenderError(self._ended)
            found = self._ask([messages, add_generation_prompt])
        if "text" not in found:
            raise RenderError(found["why"], found["line"])
        return found["text"]

    @cached_property
    def _compiled(self) -> Any:
        return environment().from_string(self._template)

    def _ask(self, request: Any) -> dict[str, Any]:
        try:
            if self._process is None or self._owner != os.getpid():
                self._start()
            assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
            _send(self._process.stdin, request)
            return _receive(self._process.stdout)
        except RecursionError:
            raise RenderError("the conversation is nested too deep") from None
        except (EOFError, OSError):
            assert self._process is not None
            code = self._process.wait()
            too_long = code == -signal.SIGPROF
            self._ended = (
                f"it computed for more than {CPU_SECONDS:g} s on one conversation"
                if too_long
                else f"its process ended ({code}); it may use {MEMORY_BYTES >> 30} GiB"
            )
            raise RenderError(self._ended) from None

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        weakref.finalize(self, _end, self._process, self._owner)
        assert self._process.stdin is not None
        _send(self._process.stdin, [self._template, self._special_strings])


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


# In the other process ------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers requests from standard input until it ends. SIGPROF ends the process in the middle of anything."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks; our input ends with it
    template, special_strings = _receive(requests)
    compiled: Any = None
    answer: dict[str, Any]
    while True:
        try:
            messages, add_generation_prompt = _receive(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            compiled = compiled or environment().from_string(template)
            answer = {"text": _render(compiled, special_strings, messages, add_generation_prompt)}
        except MemoryError:
            answer = {"why": f"it needs more than {MEMORY_BYTES >> 30} GiB of memory", "line": None}
        except RecursionError:
            answer = {"why": "it calls itself without end", "line": None}
        except Exception as error:  # whatever the program of somebody else raises
            line = getattr(error, "lineno", None)
            why = str(getattr(error, "message", None) or error)[:300] or type(error).__name__
            answer = {"why": why, "line": line if _is_syntax_error(error) else None}
        _send(answers, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _render(compiled: Any, special_strings: dict[str, str], messages: Any, add_generation_prompt: bool) -> str:
    pieces, length = [], 0
    for piece in compiled.generate(messages=messages, add_generation_prompt=add_generation_prompt, **special_strings):
        length += len(piece)
        if length > TEXT_LENGTH:
            raise ValueError(f"it makes a text of more than {TEXT_LENGTH >> 20} million characters")
        pieces.append(piece)
    return "".join(pieces)


def environment() -> Any:
    """Returns jinja2's sandbox with what templates of the hub expect to be there."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """Renders the body of `{% generation %} ... {% endgeneration %}` between the two brackets."""

        tags = {"generation"}  # noqa: RUF012 -- jinja2 reads it as a class attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            first = nodes.Output([nodes.TemplateData(OPEN)], lineno=line)
            last = nodes.Output([nodes.TemplateData(CLOSE)], lineno=line)
            return [first, *body, last]

    def refuse(message: str) -> None:
        from jinja2 import TemplateError

        raise TemplateError(message)

    # No strftime_now: a prepared corpus must not depend on the day. Templates that ask "is defined" use their own date.
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    sandbox.globals["raise_exception"] = refuse
    sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return sandbox


def _is_syntax_error(error: Exception) -> bool:
    from jinja2 import TemplateSyntaxError

    return isinstance(error, TemplateSyntaxError)


def _send(stream: IO[bytes], value: Any) -> None:
    content = json.dumps(value, default=str).encode("ascii")
    stream.write(len(content).to_bytes(8, "little"))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    content = stream.read(length := int.from_bytes(head, "little"))
    if len(content) < length:
        raise EOFError
    return json.loads(content)
