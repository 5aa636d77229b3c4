"""Spans: for which events routes speak. A route counts from the number at which it was accepted to that at which it went."""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.relay.publisher import Route

TYPES_MAX = 10_000
FOR_EVER = (1 << 63) - 1


class Spans:
    """Answers whether a route held for an event's type at the event's number: (since, until] of the outbox's sequence."""

    __slots__ = ("_by_type", "_rows", "everything")

    def __init__(self) -> None:
        self._rows: list[tuple[str, int, int | None]] = []
        self._by_type: dict[str, tuple[tuple[int, int], ...]] = {}
        self.everything = False

    def set(self, rows: Sequence[tuple[str, int, int | None]]) -> None:
        """Replaces the spans: match, since, until (None: still open)."""
        found = [(match, since, until) for match, since, until in rows]
        if found != self._rows:
            self._rows = found
            self._by_type = {}
            # Only what held from the very first event on spares a look at the events.
            self.everything = any(match == "*" and since == 0 and until is None for match, since, until in found)

    def hold(self, type_: str, first: int, last: int | None = None) -> bool:
        """True when one of them matches this type and contains this number, or all from `first` to `last`."""
        last = first if last is None else last
        spans = self._by_type.get(type_)
        if spans is None:
            if len(self._by_type) >= TYPES_MAX:
                self._by_type.clear()
            spans = self._by_type[type_] = tuple(
                (since, FOR_EVER if until is None else until)
                for match, since, until in self._rows
                if Route(match, "").matches(type_)
            )
        for since, until in spans:
            if since < first and last <= until:
                return True
        return False
