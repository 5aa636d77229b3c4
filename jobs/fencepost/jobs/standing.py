"""How a worker stands, as it says itself: counts since the start, what runs, and whether its loop moves.

Written by the worker, read by whoever asks; nothing here waits for anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from fencepost.jobs.execution import Execution, Poison, Retry, Waiting
from fencepost.schemas.errors import EffectOpen, EffectUnknown, InvalidArgs, LeaseLost, NotDispatched, StaleFence

__all__ = ["ENDINGS", "Standing", "WorkerState", "ending"]

ENDINGS = ("returned", "published", "waiting", "retry", "poison", "raised", "not_dispatched", "effect_unknown", "lost")
"""How a handler may have ended."""


class WorkerState(StrEnum):
    """Why a worker works, or does not."""

    READY = "ready"
    STARTING = "starting"
    DATABASE = "database"
    DISARMED = "disarmed"
    JOURNAL = "journal"
    DRAINING = "draining"


class Standing:
    """One worker's own account of itself; counts never go back."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.moved_at = time.monotonic()
        self.draining = False
        self.armed: bool | None = None
        """None until the database was asked."""
        self.journal_usable = True
        self.capacity = 0
        self.running: Callable[[], Sequence[Execution]] = tuple
        self.answering = False
        """Whether the database answered when it was last asked."""
        self._lock = threading.Lock()
        self._claimed: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._unwritten = 0

    def moved(self) -> None:
        """The loop took a step."""
        self.moved_at = time.monotonic()

    def moving(self, stalled: float) -> bool:
        """Whether the loop took a step within ``stalled`` seconds."""
        return time.monotonic() - self.moved_at < stalled

    def answered(self, *, armed: bool) -> None:
        """The database answered a poll."""
        self.answering, self.armed = True, armed

    def unanswered(self) -> None:
        """The database was asked and did not answer."""
        self.answering = False

    def claimed(self, jobs: Sequence[Any]) -> None:
        """These were claimed."""
        with self._lock:
            self._claimed.update(job.fence.job_class for job in jobs)

    def ended(self, job_class: str, how: str) -> None:
        """A handler ended; ``how`` is one of ENDINGS."""
        with self._lock:
            self._ended[job_class, how] += 1

    def unwritten(self, count: int) -> None:
        """Outcomes that were given up: their leases will end."""
        with self._lock:
            self._unwritten += count

    def counts(self) -> tuple[dict[str, int], dict[tuple[str, str], int], int]:
        """Claims by class, endings by class and kind, and outcomes that were not written."""
        with self._lock:
            return dict(self._claimed), dict(self._ended), self._unwritten

    @property
    def state(self) -> WorkerState:
        """What stands in the way of work, if anything."""
        if self.draining:
            return WorkerState.DRAINING
        if not self.answering:
            return WorkerState.STARTING if self.armed is None else WorkerState.DATABASE
        if not self.armed:
            return WorkerState.DISARMED
        return WorkerState.READY if self.journal_usable else WorkerState.JOURNAL

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether the worker can do its work, and what stands in the way."""
        running = self.running()
        oldest = max((execution.age() for execution in running), default=None)
        state = self.state
        return state is WorkerState.READY, {
            "state": state.value,
            "owner": self.owner,
            "running": len(running),
            "capacity": self.capacity,
            "oldest_running_seconds": None if oldest is None else round(oldest, 1),
        }


def ending(execution: Execution, error: BaseException | None) -> str:
    """How the handler of this execution ended; one of ENDINGS."""
    if execution.published:
        return "published"
    match error:
        case None:
            return "returned"
        case Waiting():
            return "waiting"
        case Retry():
            return "retry"
        case Poison() | InvalidArgs():
            return "poison"
        case LeaseLost() | StaleFence():
            return "lost"
        case asyncio.CancelledError() if execution.is_lost:
            return "lost"
        case EffectUnknown() | EffectOpen():
            return "effect_unknown"
        case NotDispatched():
            return "not_dispatched"
        case _:
            return "raised"
