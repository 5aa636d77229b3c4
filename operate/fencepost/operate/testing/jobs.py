"""Jobs in a test: the real worker runs what is due and comes back, or dies with a claim in its hands."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.worker import Worker
from fencepost.operate.testing.databases import Database
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import ConfigError, Unresolved
from fencepost.schemas.identity import as_class

__all__ = ["Ran", "lose_jobs", "run_jobs"]

ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.01
DEAD = "dead-worker"

LEFT: LiteralString = """
SELECT count(*) FROM fencepost.job AS j
WHERE j.class = ANY (%(classes)s)
  AND (j.exec = 'queued' AND j.run_at <= clock_timestamp() AND j.open_effects = 0
       OR j.exec = 'waiting' AND EXISTS (
           SELECT FROM fencepost.wait AS w LEFT JOIN fencepost.signal AS s
               ON s.tenant = w.tenant AND s.operation = w.operation AND s.class = w.class AND s.name = w.signal
           WHERE w.tenant = j.tenant AND w.operation = j.operation AND w.class = j.class AND w.generation = j.generation
             AND w.answer IS NULL AND (s.n IS NOT NULL OR w.until <= clock_timestamp()))
       OR j.exec = 'running' AND (j.owner = %(owner)s OR j.lease_until <= clock_timestamp()))"""
NOW: LiteralString = "SELECT clock_timestamp()"
RAN: LiteralString = """
SELECT j.tenant, j.operation, j.class, j.exec, j.attempts, j.reason, j.detail
FROM fencepost.job AS j
WHERE EXISTS (SELECT FROM fencepost.attempt AS a
              WHERE a.tenant = j.tenant AND a.operation = j.operation AND a.class = j.class
                AND a.owner = %(owner)s AND a.claimed_at >= %(since)s)
ORDER BY j.tenant, j.operation, j.class"""
KNOWN: LiteralString = "SELECT FROM fencepost.job_class WHERE class = %(class)s"


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of one job: done, queued (to be tried again later), waiting, poison, blocked by an effect, cancelled.

    ``reason`` is a code, as `fencepost jobs show` has it; ``detail`` the name of the error that the handler raised.
    """

    tenant: str
    operation: str
    job_class: str
    state: str
    attempts: int
    reason: str | None
    detail: str


def run_jobs(worker: Worker, database: Database, *, concurrency: int = 1, timeout: float = 30.0) -> list[Ran]:
    """Runs every job that is due, through the real worker, until none is; says what became of each.

    A job that is to be tried again later stays queued: make it due with ``age(conn, 3600, of="jobs")``. Handlers run in
    threads of their own, and what they raise is recorded as in production. Raises Unresolved when something is still due
    or running after ``timeout`` seconds, and what ended the worker.
    """
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            worker.run(database.dsn, concurrency=concurrency, stop=stop, drain=1.0)
        except BaseException as error:  # noqa: BLE001 (raised below, in the caller's thread)
            failures.append(error)

    with connect(database.dsn, autocommit=True, answer_within=ANSWER_SECONDS) as conn:
        since = _one(conn, NOW, {})
        thread = threading.Thread(target=work, name="fencepost-test-worker", daemon=True)
        thread.start()
        until = time.monotonic() + timeout
        try:
            # Invariant: a job is due or running in every snapshot until it is neither; between the two nothing is lost.
            while left := _one(conn, LEFT, {"classes": list(worker.classes), "owner": worker.owner}):
                if not thread.is_alive():
                    break
                if time.monotonic() >= until:
                    raise Unresolved(
                        f"{left} jobs are still due or running after {timeout:g} s",
                        field="timeout",
                        hint="raise it, or see `fencepost doctor`: an unarmed database claims nothing",
                    )
                thread.join(POLL_SECONDS)
        finally:
            stop.set()
            thread.join(timeout)
        if failures:
            raise failures[0]
        with conn.cursor(row_factory=tuple_row) as cursor:
            rows = cursor.execute(RAN, {"owner": worker.owner, "since": since}).fetchall()
    return [Ran(*row) for row in rows]


def lose_jobs(conn: Connection[Any], *classes: str, limit: int = 100) -> list[Job]:
    """Claims what is due as a worker that dies before its handler starts, in the caller's transaction.

    The claims' leases run on with nobody behind them: ``age(conn, 3600, of="leases")`` ends them, and the next worker
    takes the jobs back, the lost attempt counted. The returned claims are what a stale worker still holds: publish with
    one of their fences, and PostgreSQL refuses.
    """
    if not classes:
        raise ConfigError("no class is named", field="classes", hint="lose_jobs(conn, 'report.analyse')")
    for name in classes:
        with conn.cursor(row_factory=tuple_row) as cursor:
            if cursor.execute(KNOWN, {"class": name}).fetchone() is None:
                register_class(conn, JobClassPolicy(name=as_class(name)))
    return claim(conn, DEAD, classes, limit)


def _one(conn: Connection[Any], query: LiteralString, values: dict[str, object]) -> Any:
    row = conn.execute(query, values).fetchone()
    assert row is not None
    return row[0]
