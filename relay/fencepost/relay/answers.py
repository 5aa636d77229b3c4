"""The answers of one send: collected from any thread, handed over once, at the deadline at the latest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from fencepost.relay.publisher import Answer, Outcome, Outgoing

Key = tuple[str, str]
"""(tenant, ordering key)."""

OVERTAKEN = "overtaken"
"""Detail of a confirmed event whose key has an earlier event without a confirm: the order of first arrivals broke."""


def key_of(event: Outgoing) -> Key:
    """Whose order this event keeps."""
    return event.row.tenant, event.row.ordering_key


class Told(Future[list[Outcome]]):
    """Knows whether somebody has looked at the answers."""

    told = False

    def result(self, timeout: float | None = None) -> list[Outcome]:
        """The answers; from now on the caller knows them."""
        found = super().result(timeout)
        self.told = True
        return found


Seal = Callable[["Answers", list[Outcome]], None]
"""Called once with the complete list, just before the caller gets it; may replace outcomes in place."""


class Answers:
    """One outcome per event of a batch; the future is resolved exactly once, and the first answer of an event counts.

    Invariant: a confirm that arrives after the future was resolved changes nothing that the caller has seen.
    """

    __slots__ = ("_lock", "_open", "_outcomes", "_seal", "_sealed", "batch", "deadline", "future", "number")

    def __init__(self, number: int, batch: Sequence[Outgoing], deadline: float, seal: Seal | None = None) -> None:
        self.number = number
        self._seal = seal
        self.batch = batch
        self.deadline = deadline
        self.future = Told()
        self.future.set_running_or_notify_cancel()
        self._outcomes: list[Outcome | None] = [None] * len(batch)
        self._open = len(batch)
        self._lock = threading.Lock()
        self._sealed = not batch
        if not batch:
            self.future.set_result([])

    @property
    def done(self) -> bool:
        """Whether every event has its answer."""
        return self.future.done()

    @property
    def told(self) -> bool:
        """Whether the caller has looked at the answers."""
        return self.future.told

    def answer(self, index: int, outcome: Outcome) -> bool:
        """Records the answer of one event; False when it had one, or when the caller has its list already."""
        with self._lock:
            if self._sealed or self._outcomes[index] is not None:
                return False
            self._outcomes[index] = outcome
            self._open -= 1
            if self._open:
                return True
            found = self._sealed_list()
        self.future.set_result(found)
        return True

    def give_up(self, detail: str) -> None:
        """Everything without an answer becomes unknown, and the caller gets its list."""
        unknown = Outcome(Answer.UNKNOWN, detail=detail)
        with self._lock:
            if self._sealed:
                return
            self._outcomes = [unknown if outcome is None else outcome for outcome in self._outcomes]
            found = self._sealed_list()
        self.future.set_result(found)

    def _sealed_list(self) -> list[Outcome]:
        self._sealed = True
        found = [outcome for outcome in self._outcomes if outcome is not None]
        if self._seal is not None:
            self._seal(self, found)
        return found


class StoppedKeys:
    """Keys with an event that got no confirm, until the caller has been told.

    Invariant: between the failure of an event and the moment the caller looks at the list with it, no later event of
    its key is handed over, however many batches are ahead; afterwards the caller knows, and decides.
    """

    def __init__(self) -> None:
        self._stopped: dict[Key, Answers] = {}
        self._lock = threading.Lock()

    def stop(self, key: Key, answers: Answers) -> None:
        """Later events of this key are withheld until `answers` has been handed over."""
        with self._lock:
            self._stopped[key] = answers

    def stopped(self, key: Key) -> bool:
        """Whether an event of this key must be withheld now."""
        if not self._stopped:
            return False
        with self._lock:
            by = self._stopped.get(key)
            if by is None:
                return False
            if by.told:
                del self._stopped[key]
                return False
            return True

    def sweep(self) -> None:
        """Forgets what callers have been told."""
        with self._lock:
            if self._stopped:
                self._stopped = {key: answers for key, answers in self._stopped.items() if not answers.told}
