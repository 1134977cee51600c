"""Ends text at the first of some stop strings, also where one comes in several pieces. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class UntilStop:
    """Passes text on, piece by piece, up to the first stop string; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.has_ended, self._held = tuple(stops), False, ""

    def push(self, piece: str) -> str:
        """Returns the text that is certain to come before any stop string. The stop string itself is never returned."""
        if self.has_ended:
            return ""
        text = self._held + piece
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.has_ended, self._held = True, ""
            return text[: min(found)]
        held = max((self._begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns what was held back, where no more text comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Returns how many characters at the end of a text are the beginning of a stop string."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
