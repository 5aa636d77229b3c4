"""One claim as this worker carries it: how long it may act, whether it lost the lease, and what became of it.

The process clock (monotonic, counted from before each round trip) only ever makes the worker stop earlier; the
database clock alone decides what is accepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fencepost.jobs.claim import Job, JobClassPolicy
from fencepost.jobs.journal import Journal
from fencepost.jobs.result import keepable
from fencepost.schemas.errors import InvalidInput, LeaseLost, WrongTransaction

if TYPE_CHECKING:
    from fencepost.jobs.retrying import RetryPolicy

__all__ = ["Execution", "Poison", "Retry", "Waiting"]


class Retry(Exception):
    """Raised by a handler: try again ``after`` seconds (default: the class's backoff); the attempt counts."""

    def __init__(self, reason: str = "retry", *, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Poison(Exception):
    """Raised by a handler: never try again by itself; an operator may queue the job anew. ``reason`` is a code."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Waiting(Exception):
    """Leaves a handler whose job waits: let it out. The attempt has ended, and nothing that this run still does counts."""


class Execution:
    """The state that the handler's thread, the renewal and the worker share; every member is safe between threads."""

    __slots__ = (
        "_claimed_at",
        "_deadline",
        "_lock",
        "_lost",
        "_lost_event",
        "_on_lost",
        "_published",
        "_settled",
        "_why",
        "_writing",
        "job",
        "journal",
        "policy",
        "result",
        "retry",
    )

    def __init__(
        self, job: Job, policy: JobClassPolicy, journal: Journal | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self.job = job
        self.policy = policy
        self.journal = journal
        self.retry = retry
        self._lost = False
        # Made when somebody asks for it: most handlers never do, and it costs more than all the rest of this object.
        self._lost_event: threading.Event | None = None
        self._lock = threading.Lock()
        self._deadline = job.deadline
        self._claimed_at = time.monotonic()
        self._why = ""
        self._on_lost: Callable[[], None] | None = None
        self._published = False
        self._settled = False
        self._writing = 0
        self.result: bytes | None = None
        """What the handler returned, to be kept with the completion."""

    @property
    def is_lost(self) -> bool:
        """This attempt has no authority left, or the worker gave the claim back."""
        return self._lost

    @property
    def lost(self) -> threading.Event:
        """Set once ``is_lost``."""
        with self._lock:
            if self._lost_event is None:
                self._lost_event = threading.Event()
                if self._lost:
                    self._lost_event.set()
            return self._lost_event

    @property
    def published(self) -> bool:
        """The handler's publication was committed."""
        return self._published

    @property
    def writing(self) -> bool:
        """A publication is under way: it holds the job's row, and renewing would only wait for it."""
        return self._writing > 0

    def forbid_inside(self, what: str) -> None:
        """Raises WrongTransaction while a publication is under way: ``what`` would wait for it, and it for ``what``."""
        if self.writing:
            raise WrongTransaction(
                f"{what} is refused while this attempt publishes",
                field="publication",
                hint="call it before publish; inside the callback only write with its transaction",
            )

    def left(self) -> float:
        """Seconds for which the lease certainly holds, at least 0."""
        return 0.0 if self._lost else max(0.0, self._deadline - time.monotonic())

    def extend(self, deadline: float) -> None:
        """The lease was extended; ``deadline`` is counted from before the round trip that did it."""
        with self._lock:
            self._deadline = max(self._deadline, deadline)

    def age(self) -> float:
        """Seconds since the claim."""
        return time.monotonic() - self._claimed_at

    def expired(self) -> bool:
        """Whether the lease may be over."""
        return time.monotonic() >= self._deadline

    def check(self) -> None:
        """Raises LeaseLost when the lease was lost or may be over."""
        if self._lost or self.expired():
            raise LeaseLost(
                "the lease of this attempt is over",
                field=self._why or "lease",
                hint="stop; stage what was computed for the successor",
            )

    def on_lost(self, told: Callable[[], None]) -> None:
        """Calls ``told`` when the lease is lost, or now if it was already."""
        with self._lock:
            self._on_lost = told
            late = self._lost
        if late:
            told()

    def lose(self, why: str) -> bool:
        """Tells the handler; True when it is news."""
        with self._lock:
            if self._lost or self._published or self._settled:
                return False
            self._why = why
            self._mark_lost()
            told = self._on_lost
        if told is not None:
            told()
        return True

    def _mark_lost(self) -> None:
        self._lost = True
        if self._lost_event is not None:
            self._lost_event.set()

    def abandon(self) -> None:
        """The claim was given back: the handler is told, whatever it still does has no authority."""
        with self._lock:
            news = not self._lost
            self._why = self._why or "released"
            self._mark_lost()
            told = self._on_lost if news else None
        if told is not None:
            told()

    def leave(self) -> None:
        """The attempt has ended by the handler's own wish: there is nothing to tell it, and no outcome to write."""
        with self._lock:
            self._settled = True
            self._why = self._why or "waiting"
            self._mark_lost()

    def keep(self, value: object) -> InvalidInput | None:
        """Keeps what the handler returned for its completion; why it cannot be kept, if so. None is nothing."""
        if value is None or self._published:
            return None
        try:
            self.result = keepable(value)
        except InvalidInput as error:
            return error
        return None

    def settle(self) -> bool:
        """Claims the right to write the outcome; True for the first that asks."""
        with self._lock:
            if self._settled:
                return False
            self._settled = True
            return True

    def begin_writing(self) -> None:
        """A publication starts."""
        with self._lock:
            self._writing += 1

    def end_writing(self, *, published: bool) -> None:
        """A publication ended."""
        with self._lock:
            self._writing -= 1
            self._published = self._published or published
