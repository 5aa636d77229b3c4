"""The doorbell: no job waits for the poll though the worker sleeps, nobody is rung who does not, and a lost ring loses nothing."""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs import doorbell
from fencepost.jobs import worker as workers
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.doorbell import DOZE, RUNG
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker
from fencepost.schemas.arming import ensure_armed
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import ConfigError
from support.database import Database
from support.jobs import CLASS, Conn, given
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Pooler
from support.workers import Running, quick, running

SOON = 60.0
MARK: LiteralString = """
SELECT last_value FROM fencepost.job_doorbell WHERE last_value > extract(epoch FROM clock_timestamp()) * 1000000"""
# After its look a worker may have moved its hint on, which is the last that it said then.
ASLEEP: LiteralString = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'
AND (query LIKE '%%fencepost.claim(%%' OR query LIKE '%%fencepost.marks(%%')"""
WAITING: LiteralString = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%doze_jobs%%'"""
GATE: LiteralString = "SELECT pg_advisory_lock(1179665234, 2)"
OPEN: LiteralString = "SELECT pg_advisory_unlock(1179665234, 2)"


@pytest.fixture
def rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping worker polls so rarely that only a ring can be what woke it."""
    monkeypatch.setattr(workers, "POLL_SECONDS_MAX", 300.0)


class Started:
    """A worker whose handler notes what it runs, and when."""

    def __init__(self, **changes: Any) -> None:
        self.jobs: dict[str, float] = {}
        self.worker = Worker()

        @self.worker.job(CLASS, **quick(**changes))
        def handler(_ctx: Context, job: Job) -> None:
            self.jobs[job.operation] = time.time()

    def have(self, *operations: str) -> None:
        wait_for(lambda: set(operations) <= set(self.jobs), SOON, f"{operations} to be run")


@contextmanager
def asleep(database: Database, conn: Conn, **changes: Any) -> Generator[Started]:
    """A worker with a doorbell that has marked itself and looked once more."""
    made = Started(**changes)
    with running(made.worker, database, doorbell=True):
        sleeps(conn)
        yield made


def sleeps(conn: Conn) -> int:
    """Waits until somebody has marked and then looked in vain; the mark."""
    found = wait_for(lambda: conn.execute(MARK).fetchone(), SOON, "a worker to mark itself asleep")
    wait_for(lambda: conn.execute(ASLEEP).fetchone(), SOON, "the look after the mark")
    return int(found[0])


def submitted(conn: Conn, *operations: str, **options: Any) -> None:
    """Jobs in one commit."""
    with conn.transaction():
        for operation in operations:
            submit(conn, CLASS, tenant="t", operation=operation, args={"n": 1}, **options)


@contextmanager
def listener(database: Database) -> Generator[Conn]:
    with database.connect(autocommit=True) as conn:
        conn.execute("LISTEN fencepost_jobs")
        yield conn


def heard(conn: Conn) -> int:
    """How many rings arrived; a round trip to the server brings all that was sent before."""
    conn.execute("SELECT 1")
    return sum(1 for _ in conn.notifies(timeout=0))


@pytest.mark.usefixtures("rare")
def test_sleeping_worker_is_woken_by_each_commit_that_makes_a_job_due(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn, asleep(database18, conn) as started:
        for operation in ("op-1", "op-2", "op-3"):
            submitted(conn, operation)
            started.have(operation)
            sleeps(conn)
        submitted(conn, "later", run_at=datetime.now(UTC) + timedelta(hours=1))
        cancel(conn, "t", "later", CLASS, actor="ann", reason="no more")
        requeue(conn, "t", "later", CLASS, actor="ann", reason="now")
        started.have("later")


@pytest.mark.usefixtures("rare")
def test_job_committed_between_the_look_and_the_mark_is_found_by_the_second_look(database18: Database) -> None:
    made = Started()
    with database18.connect(autocommit=True) as conn, listener(database18) as ears:
        conn.execute(GATE)
        with running(made.worker, database18, doorbell=True):
            wait_for(lambda: conn.execute(WAITING).fetchone(), SOON, "the worker to be about to mark")
            heard(ears)
            submitted(conn, "op-1")
            assert heard(ears) == 0  # nobody rang: only the second look can find it
            conn.execute(OPEN)
            made.have("op-1")


@pytest.mark.usefixtures("rare")
def test_writer_that_looked_before_the_mark_and_commits_after_it_is_not_slept_over(database18: Database) -> None:
    with database18.connect() as early, database18.connect(autocommit=True) as conn, listener(database18) as ears:
        submit(early, CLASS, tenant="t", operation="op-1", args={"n": 1})
        with asleep(database18, conn) as started:
            heard(ears)
            early.commit()
            assert heard(ears) == 0
            started.have("op-1")


@pytest.mark.usefixtures("rare")
def test_two_workers_are_both_woken_and_a_ring_for_one_does_not_silence_the_other(database18: Database) -> None:
    one, other = Started(), Worker()
    done: list[str] = []

    @other.job("another.class", **quick())
    def handler(_ctx: Context, job: Job) -> None:
        done.append(job.operation)

    with (
        database18.connect(autocommit=True) as conn,
        running(one.worker, database18, doorbell=True),
        running(other, database18, doorbell=True),
    ):
        for number in range(4):
            sleeps(conn)
            submitted(conn, f"op-{number}")
            given(conn, f"op-{number}", job_class="another.class")
            one.have(f"op-{number}")
            wait_for(lambda: len(done) == number + 1, SOON, "the other worker's job")  # noqa: B023 (waited for here)


def test_nobody_is_notified_without_a_sleeper_and_one_commit_notifies_once_with_one(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn, listener(database18) as ears:
        given(conn, "op-1")
        assert heard(ears) == 0
        conn.execute(DOZE, {"seconds": 60})
        submitted(conn, "op-2", "op-3", "op-4")  # the control: these ears do hear
        assert heard(ears) == 1
        submitted(conn, "op-4")  # submitted before: nothing new is there
        submitted(conn, "op-5", run_at=datetime.now(UTC) + timedelta(minutes=1))
        assert heard(ears) == 0
        with database18.connect() as other:
            submit(other, CLASS, tenant="t", operation="op-6", args={"n": 1})
            other.rollback()
        assert heard(ears) == 0
        found = conn.execute(MARK).fetchone()
        assert found is not None
        conn.execute(DOZE, {"seconds": 60})
        conn.execute(RUNG, {"mark": found[0]})  # an older ring takes away no later mark
        submitted(conn, "op-7")
        assert heard(ears) == 1
        found = conn.execute(MARK).fetchone()
        assert found is not None
        conn.execute(RUNG, {"mark": found[0]})
        submitted(conn, "op-8")
        assert heard(ears) == 0
        conn.execute(DOZE, {"seconds": 0})  # asleep until now: as one that was killed in its sleep, later
        submitted(conn, "op-9")
        assert heard(ears) == 0


def test_a_job_for_later_rings_nobody_and_is_started_in_time_not_before(database18: Database) -> None:
    with (
        database18.connect(autocommit=True) as conn,
        listener(database18) as ears,
        asleep(database18, conn) as started,
    ):
        heard(ears)
        due = time.time() + 6.0
        submitted(conn, "op-1", run_at=datetime.fromtimestamp(due, UTC))
        assert heard(ears) == 0
        started.have("op-1")
        assert started.jobs["op-1"] >= due


def test_a_worker_whose_connection_died_without_a_sign_finds_what_came_meanwhile_and_listens_again(
    database18: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "ANSWER_SECONDS", 1.0)
    with (
        Proxy(int(str(conninfo_to_dict(database18.dsn)["port"]))) as proxy,
        database18.connect(autocommit=True) as conn,
    ):
        through = Database(make_conninfo(database18.dsn, port=proxy.port), database18.state)
        # What was claimed by the look that nobody answered is free once its lease ends.
        with asleep(through, conn, lease=5.0) as started:
            submitted(conn, "op-1")
            started.have("op-1")  # the control
            sleeps(conn)
            proxy.blackhole()
            submitted(conn, "op-2")
            wait_for(lambda: "does not answer" in caplog.text, SOON, "the silence to be noticed")
            assert "op-2" not in started.jobs
            proxy.heal()
            started.have("op-2")
            sleeps(conn)
            submitted(conn, "op-3")
            started.have("op-3")


def test_a_doorbell_behind_a_pooler_in_transaction_mode_is_refused_and_polling_is_not(
    database18: Database, pgbouncer18: Pooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.jobs.doorbell.PROOF_SECONDS", 1.0)
    pooled = Database(pgbouncer18.dsn(database18.dsn), database18.state)
    made = Started()
    with database18.connect(autocommit=True) as conn, running(made.worker, pooled):
        wait_for(lambda: conn.execute("SELECT FROM fencepost.job_class").fetchone(), SOON, "the class")
        submitted(conn, "op-1")
        made.have("op-1")  # the control
    refused = Running(made.worker, pooled.dsn, doorbell=True)
    with pytest.raises(ConfigError, match="notification") as told:
        refused.ended(SOON)
    assert told.value.field == "doorbell" and "pooler" in str(told.value.hint)


def test_a_disarmed_database_is_waited_for_and_once_it_is_armed_the_worker_sleeps_again(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    with database18.connect(autocommit=True) as conn, asleep(database18, conn) as started:
        conn.execute("DELETE FROM fencepost.ticket")
        submitted(conn, "op-1")
        wait_for(lambda: "nothing is claimed" in caplog.text, SOON, "the line")
        assert started.jobs == {}
        ensure_armed(database18.dsn, database18.state)
        started.have("op-1")
        sleeps(conn)
        submitted(conn, "op-2")
        started.have("op-2")


def test_a_worker_that_was_suspended_past_the_proof_still_hears_what_came_meanwhile(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database18.connect(autocommit=True) as conn:

        @contextmanager
        def suspended(dsn: str, **options: Any) -> Generator[Any]:
            with connect(dsn, **options) as other:
                yield other
            assert select.select([conn.fileno()], [], [], 20)[0], "the control: it is in the socket"

        conn.execute("LISTEN fencepost_jobs")
        monkeypatch.setattr(doorbell, "PROOF_SECONDS", 0.0)
        monkeypatch.setattr(doorbell, "connect", suspended)
        doorbell.prove(conn, database18.dsn)
