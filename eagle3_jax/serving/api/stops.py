"""Stop strings in a text that arrives in pieces."""

from collections.abc import Collection


class StopStrings:
    """Finds the stop string that is completed first, wherever the borders of the pieces lie.

    Of several completed by the same character the longest counts. Text that may be the beginning of a stop string is
    held back until it is known to be none.
    """

    def __init__(self, stops: Collection[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes a piece; returns the text that is certain, and whether a stop string follows it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        certain = len(text) - self._held_length(text)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
