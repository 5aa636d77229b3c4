"""Jobs for tests: classes, claims, ageing by the database's own columns, and waits on what sessions really do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast
from uuid import uuid4

import psycopg
import psycopg.sql

from fencepost.jobs import effects
from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.fence import Fence
from fencepost.jobs.submit import submit
from fencepost.schemas.identity import EffectAttempt, as_class
from support.database import Database
from support.processes import wait_for

Conn = psycopg.Connection[tuple[Any, ...]]
T = TypeVar("T")

CLASS = "report.analyse"
RESULTS = """CREATE TABLE IF NOT EXISTS result (tenant text, operation text, by text, at timestamptz DEFAULT clock_timestamp(),
                                                PRIMARY KEY (tenant, operation))"""


def given(conn: Conn, operation: str = "op-1", *, tenant: str = "t", job_class: str = CLASS, **policy: Any) -> None:
    """A queued job of a registered class, committed, beside a domain table for results; `conn` is in autocommit."""
    defaults: dict[str, Any] = {"lease": 30.0, "backoff_base": 0.0, "backoff_max": 0.0, "network_bound": 0.0}
    made = JobClassPolicy(name=as_class(job_class), **(defaults | policy))
    with conn.transaction():
        conn.execute(RESULTS)
        register_class(conn, made)
        submit(conn, job_class, tenant=tenant, operation=operation, args={"n": 1})


def claimed(conn: Conn, operation: str = "op-1", *, owner: str = "worker-a", job_class: str = CLASS) -> Job:
    """The claim of this one job, committed; fails when it cannot be had."""
    jobs = [job for job in claim(conn, owner, [job_class], 100) if job.operation == operation]
    assert len(jobs) == 1, f"not claimable: {show(conn, operation)}"
    return jobs[0]


def begun(
    conn: Conn, f: Fence, key: str = "e1", *, timeout: float = 5.0, kind: effects.Kind = "opaque"
) -> EffectAttempt:
    """A pending effect of this claim, committed."""
    attempt = EffectAttempt(uuid4())
    digest = effects.request_digest({"key": key})
    began = effects.begin(conn, f, key, kind=kind, effect_attempt=attempt, digest=digest, timeout=timeout)
    assert isinstance(began, effects.Begun)
    return attempt


def again(conn: Conn, f: Fence, key: str = "e1") -> effects.Begun | effects.Recorded:
    """The same begin by whoever holds this fence, under an effect attempt of its own."""
    digest = effects.request_digest({"key": key})
    return effects.begin(conn, f, key, kind="opaque", effect_attempt=uuid4(), digest=digest, timeout=5.0)


def expire(conn: Conn, operation: str = "op-1") -> None:
    """The lease of this job ended a moment ago."""
    done = conn.execute(
        "UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 ms'"
        " WHERE operation = %(operation)s AND exec = 'running'",
        {"operation": operation},
    )
    assert done.rowcount == 1


def age_effect(conn: Conn, operation: str = "op-1") -> None:
    """The deadline and the quiescence of this job's effects have passed."""
    conn.execute(
        "UPDATE fencepost.effect SET dispatch_deadline = clock_timestamp() - interval '2 ms',"
        " quiescent_at = clock_timestamp() - interval '1 ms' WHERE operation = %(operation)s",
        {"operation": operation},
    )


def show(conn: Conn, operation: str = "op-1", *, tenant: str = "t", job_class: str = CLASS) -> str:
    """The execution state of a job."""
    row = conn.execute(
        "SELECT exec FROM fencepost.job WHERE tenant = %(t)s AND operation = %(o)s AND class = %(c)s",
        {"t": tenant, "o": operation, "c": job_class},
    ).fetchone()
    assert row is not None
    return cast(str, row[0])


def column(conn: Conn, name: str, operation: str = "op-1") -> Any:
    """One column of the job of this operation."""
    query = psycopg.sql.SQL("SELECT {} FROM fencepost.job WHERE operation = %(o)s").format(psycopg.sql.Identifier(name))
    row = conn.execute(query, {"o": operation}).fetchone()
    assert row is not None
    return row[0]


def effect(conn: Conn, name: str, operation: str = "op-1", key: str = "e1") -> Any:
    """One column of an effect."""
    query = psycopg.sql.SQL("SELECT {} FROM fencepost.effect WHERE operation = %(o)s AND effect_key = %(k)s").format(
        psycopg.sql.Identifier(name)
    )
    row = conn.execute(query, {"o": operation, "k": key}).fetchone()
    assert row is not None
    return row[0]


def save(conn: psycopg.Connection[Any], operation: str = "op-1", by: str = "a", tenant: str = "t") -> str:
    """The domain write of a publication: a second one for the same operation would fail."""
    conn.execute(
        "INSERT INTO result (tenant, operation, by) VALUES (%(t)s, %(o)s, %(b)s)",
        {"t": tenant, "o": operation, "b": by},
    )
    return by


def results(conn: Conn, operation: str = "op-1") -> list[str]:
    """Who published results of this operation."""
    return [
        cast(str, row[0]) for row in conn.execute("SELECT by FROM result WHERE operation = %(o)s", {"o": operation})
    ]


def stale(f: Fence, **parts: Any) -> Fence:
    """The fence with some part that is not the current one."""
    return replace(f, **parts)


def waiting(conn: Conn, pid: int) -> None:
    """Returns once that session waits for a lock."""
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %(pid)s"
    wait_for(lambda: conn.execute(query, {"pid": pid}).fetchone() == (True,), 10, f"session {pid} to wait for a lock")


class Background(threading.Thread):
    """Runs one call on a connection of its own beside the test; `outcome()` gives its value or raises its error."""

    def __init__(self, database: Database, call: Callable[[Conn], T], *, autocommit: bool = True) -> None:
        super().__init__(daemon=True)
        self._conn = database.connect(autocommit=autocommit)
        self.pid = self._conn.info.backend_pid
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call(self._conn)
        except BaseException as error:  # noqa: BLE001 (raised in the test)
            self._error = error
        finally:
            self._conn.close()

    def outcome(self, within: float = 20.0) -> Any:
        """The value of the call, or its exception."""
        self.join(within)
        assert not self.is_alive(), "the background call did not end"
        if self._error is not None:
            raise self._error
        return self._value


@contextmanager
def two(database: Database) -> Generator[tuple[Conn, Conn]]:
    """Two sessions: one in autocommit, one whose transactions the test ends."""
    with database.connect(autocommit=True) as auto, database.connect() as manual:
        yield auto, manual
