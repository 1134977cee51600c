"""Performs one demo from the first line to the exit code: starts its ranks, makes a story of what they saw, prints
it."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

from shardwise.demo import DEMOS
from shardwise.errors import Exit


def perform(word: str, as_json: bool = False) -> int:
    """Performs the demo of a word and returns the exit code."""
    began = time.perf_counter()
    # To the error stream where a program reads the other one.
    print(
        f"demo     {word}: starting a few processes on this machine ...",
        file=sys.stderr if as_json else None,
        flush=True,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: ranks share the cores
    from shardwise.demo.ranks import play
    from shardwise.demo.story import WIDTH, Story, make_console

    demo: Any = import_module(f"shardwise.demo.{DEMOS[word]}")
    story: Story = demo.make_story(play(demo.act, demo.WORLD))
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({**story.to_dict(), "world": demo.WORLD, "seconds": round(seconds, 2)}, indent=2))
    else:
        console = make_console()
        if console.width < WIDTH:
            console.print(f"note     drawings are {WIDTH} columns wide; this window has {console.width}")
        story.show(console)
        console.print(f"time     {seconds:.1f} s, {demo.WORLD} processes        the page: shardwise explain {word}")
    return Exit.DONE if story.holds else Exit.FOUND_WRONG
