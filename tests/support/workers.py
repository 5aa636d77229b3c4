"""Workers for tests: run in a thread of the test, stopped and checked at the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.worker import Worker
from support.database import Database
from support.jobs import CLASS, Conn, column, save, show
from support.processes import wait_for

ROOT = Path(__file__).parents[2]
ROOTS = ("tests", "compose", "schemas", "relay", "consumer", "jobs", "operate")
CHILD_PATH = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ROOTS)}
"""For child scripts that import `support`: this tree, whatever is installed."""

QUICK: dict[str, Any] = {"lease": 30.0, "max_effect_timeout": 30.0, "network_bound": 0.0}


def quick(**changes: Any) -> dict[str, Any]:
    """QUICK with some other settings."""
    return QUICK | changes


def publishing(worker: Worker, *, by: str = "a", **changes: Any) -> Worker:
    """The worker with a handler that publishes at once."""

    @worker.job(CLASS, **quick(**changes))
    def handler(ctx: Context, job: Job) -> None:
        ctx.publish(lambda tx: save(tx, job.operation, by=by))

    return worker


class Running:
    """A worker in a thread; `stop()` returns when `run` did, and raises what it raised."""

    def __init__(self, worker: Worker, dsn: str, **options: Any) -> None:
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(worker, dsn, {"drain": 5.0, **options}), daemon=True)
        self._thread.start()

    def _run(self, worker: Worker, dsn: str, options: dict[str, Any]) -> None:
        try:
            worker.run(dsn, stop=self._stop, **options)
        except BaseException as error:  # noqa: BLE001 (raised in the test)
            self._error = error

    def ask(self) -> None:
        """Asks it to stop, as a signal would, and returns at once."""
        self._stop.set()

    def stop(self, within: float = 30.0) -> None:
        """Stops it."""
        self._stop.set()
        self.ended(within)

    def ended(self, within: float = 30.0) -> None:
        """Waits until it has ended."""
        self._thread.join(within)
        assert not self._thread.is_alive(), "the worker did not stop"
        if self._error is not None:
            raise self._error


@contextmanager
def running(worker: Worker, database: Database, **options: Any) -> Generator[Running]:
    """The worker runs for the length of the block."""
    made = Running(worker, database.dsn, **options)
    try:
        yield made
    finally:
        made.ask()
    made.ended()


def becomes(conn: Conn, state: str, operation: str = "op-1", *, within: float = 20.0, job_class: str = CLASS) -> None:
    """Returns once the job is in this state; the error says in which one it stayed."""
    try:
        wait_for(lambda: show(conn, operation, job_class=job_class) == state, within, f"{operation} to be {state}")
    except AssertionError as error:
        stayed = f"{show(conn, operation, job_class=job_class)} ({column(conn, 'reason', operation)})"
        raise AssertionError(f"{error}; it is {stayed}") from None
