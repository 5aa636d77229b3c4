"""How a runner stands, as it says itself: counts since the start, what is in hand, and whether its loop moves.

Written by the runner, read by whoever asks; nothing here waits for anything.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from fencepost.consumer.outcomes import Handled, Outcome

__all__ = ["DEAD_LETTERS", "BrokerState", "Standing", "dead_letter"]

_NOT_KNOWN_YET = ("unknown_type", "newer_version")
_NO_DEAD_LETTER = (Outcome.HANDLED, Outcome.DUPLICATE)

DEAD_LETTERS = (
    *(outcome.value for outcome in Outcome if outcome not in _NO_DEAD_LETTER),
    *_NOT_KNOWN_YET,
)
"""Why a delivery may have been set aside."""


class BrokerState(StrEnum):
    """What was last seen of the broker; connecting: it never answered yet."""

    CONNECTED = "connected"
    CONNECTING = "connecting"
    UNREACHABLE = "unreachable"


class Standing:
    """One runner's own account of itself, from its making on; counts never go back.

    ``assigned``: partitions of this process, None where the broker has none. ``lag``: messages that are on the broker and
    not yet committed here, of the assigned partitions; None where that is not known. ``in_flight`` and ``oldest`` are asked
    when they are told: deliveries with a handler, and the seconds that the oldest one not done has been here.
    """

    def __init__(self, consumer: str, kind: str) -> None:
        self.consumer = consumer
        self.kind = kind
        self.moved_at = time.monotonic()
        self.broker = BrokerState.CONNECTING
        self.consuming = False
        self.draining = False
        self.assigned: int | None = None
        self.lag: int | None = None
        self.in_flight: Callable[[], int] = int
        self.oldest: Callable[[], float | None] = lambda: None
        self.asks: Callable[[], BrokerState] | None = None
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._dead: Counter[str] = Counter()
        self._failures = 0
        self._lost = 0

    def moved(self) -> None:
        """The loop took a step."""
        self.moved_at = time.monotonic()

    def told(self, handled: Handled) -> None:
        """A delivery is done."""
        reason = dead_letter(handled)
        with self._lock:
            self._outcomes[handled.outcome.value] += 1
            if reason is not None:
                self._dead[reason] += 1

    def failed(self) -> None:
        """An attempt committed nothing, and is made again."""
        with self._lock:
            self._failures += 1

    def lost(self) -> None:
        """A connection, or the ownership of a partition, was lost without being given back."""
        with self._lock:
            self._lost += 1

    def outcome(self, outcome: Outcome) -> int:
        """Deliveries of this outcome so far."""
        return self._outcomes[outcome.value]

    def dead_letters(self, reason: str) -> int:
        """Deliveries set aside for this reason so far; one of ``DEAD_LETTERS``."""
        return self._dead[reason]

    @property
    def failures(self) -> int:
        """Attempts that committed nothing so far."""
        return self._failures

    @property
    def losses(self) -> int:
        """Connections and partitions lost so far."""
        return self._lost


def dead_letter(handled: Handled) -> str | None:
    """The reason of the dead letter that a delivery became, or None where it became none."""
    if handled.outcome in _NO_DEAD_LETTER:
        return None
    if handled.outcome is Outcome.UNDECODABLE and handled.reason in _NOT_KNOWN_YET:
        return handled.reason
    return handled.outcome.value
