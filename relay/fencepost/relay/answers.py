"""The answers of one send: collected from any thread, handed over once, at the deadline at the latest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, Outgoing

Key = tuple[str, str]
"""(tenant, ordering key)."""


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
    """One outcome per event of a batch; the future is resolved exactly once, and a confirm of an event always counts.

    Invariant: a confirm that arrives after the future was resolved changes nothing that the caller has seen.
    """

    __slots__ = (
        "_confirmed",
        "_count",
        "_left",
        "_lock",
        "_others",
        "_seal",
        "_sealed",
        "batch",
        "deadline",
        "free_from",
        "future",
        "number",
    )

    def __init__(self, number: int, batch: Sequence[Outgoing], deadline: float, seal: Seal | None = None) -> None:
        self.number = number
        self.free_from: int | None = None
        self._seal = seal
        self.batch = batch
        self.deadline = deadline
        self.future = Told()
        self.future.set_running_or_notify_cancel()
        self._confirmed: list[int] = []
        self._others: dict[int, Outcome] = {}
        self._count = len(batch)
        self._left = self._count
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

    def confirm(self, index: int) -> None:
        """Records the confirm of one event, at most once for each; takes no lock until the batch is complete."""
        confirmed = self._confirmed
        confirmed.append(index)
        if len(confirmed) >= self._left:
            self._complete()

    def answer(self, index: int, outcome: Outcome) -> None:
        """Records the answer of one event, unless it had one or the caller has its list already."""
        if outcome is CONFIRMED:
            self.confirm(index)
            return
        with self._lock:
            self._others.setdefault(index, outcome)
            # Invariant: complete when as many are confirmed as have no other answer.
            self._left = self._count - len(self._others)
        if len(self._confirmed) >= self._left:
            self._complete()

    def give_up(self, detail: str) -> None:
        """Everything without an answer becomes unknown, and the caller gets its list."""
        self._complete(Outcome(Answer.UNKNOWN, detail=detail))

    def _complete(self, missing: Outcome | None = None) -> None:
        with self._lock:
            if self._sealed:
                return
            found = self._found(missing)
            if found is None:
                return
            self._sealed = True
            if self._seal is not None:
                self._seal(self, found)
        self.future.set_result(found)

    def _found(self, missing: Outcome | None) -> list[Outcome] | None:
        """The list, or None while an event has no answer and nothing stands in for it."""
        if not self._others and len(self._confirmed) == self._count:
            return [CONFIRMED] * self._count
        known = dict.fromkeys(self._confirmed, CONFIRMED)
        answers = [known.get(n) or self._others.get(n, missing) for n in range(self._count)]
        found = [answer for answer in answers if answer is not None]
        return found if len(found) == self._count else None


class StoppedKeys:
    """Keys with an event that got no confirm, until the caller has been told.

    Invariant: between the failure of an event and the first send after the caller has looked at the list with it, no later
    event of its key is handed over, however many batches are ahead; afterwards the caller knows, and decides. A withheld
    event has no confirm either, so its own list must have been looked at as well.
    `keys` is always the same mapping.
    """

    def __init__(self) -> None:
        self._stopped: dict[Key, dict[int, Answers]] = {}
        self._lock = threading.Lock()
        self.keys: Mapping[Key, Mapping[int, Answers]] = self._stopped

    def stop(self, key: Key, answers: Answers) -> None:
        """Later events of this key are withheld until `answers` has been looked at."""
        with self._lock:
            self._stopped.setdefault(key, {})[answers.number] = answers

    def sending(self, number: int) -> None:
        """Called for each send, in the caller's thread: what it has been told by now does not bind this and later sends."""
        if self._stopped:
            with self._lock:
                for holders in self._stopped.values():
                    for answers in holders.values():
                        if answers.free_from is None and answers.told:
                            answers.free_from = number

    def reached(self, number: int) -> None:
        """Called before a send is handed over, in the order of sends: forgets what does not bind it."""
        if self._stopped:
            with self._lock:
                for key, holders in list(self._stopped.items()):
                    for answers in list(holders.values()):
                        if answers.free_from is not None and answers.free_from <= number:
                            del holders[answers.number]
                    if not holders:
                        del self._stopped[key]
