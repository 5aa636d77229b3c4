"""Crash points: a block ends at a named point as if its process had died there, and the test goes on.

    with crash("after commit"):
        broker.deliver(on_accepted)      # committed, never acknowledged
    broker.deliver(on_accepted)          # arrives again: a duplicate

The points of the kit, in the thread of the test:

    before publish    relay: read from the outbox, not yet at the broker
    after publish     relay: at the broker, not yet recorded as published
    before commit     inbox: the handler has returned, nothing is committed
    after commit      inbox: committed, not yet acknowledged

Points of your own are named by `reach`, in a test double for instance. A dying process runs no ``finally``; here they
run, so a transaction is rolled back by the client instead of the server.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fencepost.schemas.errors import InvalidInput

__all__ = ["Crash", "crash", "reach"]


class Crash(BaseException):
    """The simulated death of the process. No ``except Exception`` catches it, and nothing of the product does."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


class _Armed:
    def __init__(self, point: str, left: int) -> None:
        self.point = point
        self.left = left
        self.raised: Crash | None = None
        self.passed: list[str] = []


# One test at a time runs in a process; the innermost block is asked first.
_armed: list[_Armed] = []


@contextmanager
def crash(point: str, *, nth: int = 1) -> Generator[None]:
    """Ends the block where it reaches ``point`` for the ``nth`` time, and swallows that `Crash` alone.

    Raises AssertionError when the block ends without getting there, so that a test cannot pass for lack of a crash.
    """
    if nth < 1:
        raise InvalidInput("nth is not at least 1", field="nth")
    armed = _Armed(point, nth)
    _armed.append(armed)
    try:
        yield
    except Crash as raised:
        if raised is not armed.raised:
            raise
        return
    finally:
        _armed.remove(armed)
    __tracebackhide__ = True
    seen = ", ".join(dict.fromkeys(armed.passed)) or "none"
    raise AssertionError(f"the block ended without crashing at {point!r} (time {nth}); points reached: {seen}")


def reach(point: str) -> None:
    """A place where a test may crash; does nothing unless `crash` waits for it."""
    for armed in reversed(_armed):
        armed.passed.append(point)
        if armed.point == point and armed.raised is None:
            armed.left -= 1
            if armed.left == 0:
                armed.raised = Crash(point)
                raise armed.raised
