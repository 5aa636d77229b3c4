"""Publication is one transaction behind the fence: everything the callback wrote, or nothing."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import psycopg.sql
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs.claim import claim
from fencepost.jobs.publish import FencedTransaction, publish, published
from fencepost.jobs.submit import submit
from fencepost.schemas.errors import (
    CommitWasRollback,
    InvalidInput,
    LeaseLost,
    StaleFence,
    Unreachable,
    Unresolved,
    WrongTransaction,
)
from support.database import Database
from support.jobs import CLASS, Conn, claimed, column, expire, given, results, save, show
from support.processes import wait_for
from support.proxy import Proxy


def test_a_publication_commits_domain_result_new_job_and_completion_together(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)

        def callback(tx: FencedTransaction) -> str:
            save(tx)
            with tx.transaction():
                tx.cursor().executemany("INSERT INTO result VALUES (%s, %s, %s)", [("t", "x", "b"), ("t", "y", "b")])
            with tx.cursor().copy("COPY result (tenant, operation, by) FROM STDIN") as copy:
                copy.write_row(("t", "z", "c"))
            assert submit(tx, "report.mail", tenant="t", operation="op-2", args={})
            return "value"

        assert publish(database.dsn, job.fence, callback) == "value"
        assert results(conn) == ["a"] and results(conn, "z") == ["c"]
        assert show(conn) == "done" and show(conn, "op-2", job_class="report.mail") == "queued"
        assert column(conn, "done_attempt") == job.fence.attempt and published(conn, job.fence)


def test_a_callback_that_raises_publishes_nothing_and_the_job_runs_on(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)

        def callback(tx: FencedTransaction) -> None:
            save(tx)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            publish(conn, job.fence, callback)
        assert results(conn) == [] and show(conn) == "running" and not published(conn, job.fence)
        publish(conn, job.fence, lambda tx: save(tx))
        assert results(conn) == ["a"]


def test_a_swallowed_sql_error_is_an_error_and_a_savepoint_makes_it_none(database: Database) -> None:
    with database.connect() as conn, database.connect(autocommit=True) as look:
        given(look)
        job = claimed(look)

        def swallowing(tx: FencedTransaction) -> None:
            save(tx)
            with pytest.raises(psycopg.Error):
                save(tx)

        with pytest.raises(CommitWasRollback):
            publish(conn, job.fence, swallowing)
        assert results(look) == [] and show(look) == "running"

        def contained(tx: FencedTransaction) -> None:
            save(tx)
            with pytest.raises(psycopg.errors.UniqueViolation), tx.transaction():
                save(tx)

        publish(conn, job.fence, contained)
        assert results(look) == ["a"]


ENDS: list[Callable[[FencedTransaction], Any]] = [
    lambda tx: tx.commit(),
    lambda tx: tx.rollback(),
    lambda tx: tx.close(),
    lambda tx: tx.set_autocommit(True),
    lambda tx: setattr(tx, "autocommit", True),
    lambda tx: tx.execute("COMMIT"),
    lambda tx: tx.execute("select 1; commit"),
    lambda tx: tx.execute("/* x */ RollBack"),
    lambda tx: tx.execute("-- x\n ROLLBACK TO SAVEPOINT before"),
    lambda tx: tx.execute(b"end"),
    lambda tx: tx.execute("abort"),
    lambda tx: tx.execute("PREPARE TRANSACTION 'x'"),
    lambda tx: tx.execute("SET ROLE nobody"),
    lambda tx: tx.execute("SET LOCAL ROLE nobody"),
    lambda tx: tx.execute("set session authorization default"),
    lambda tx: tx.execute("RESET ROLE"),
    lambda tx: tx.execute("SET CONSTRAINTS ALL IMMEDIATE"),
    lambda tx: tx.execute(psycopg.sql.SQL("COMMIT")),
    lambda tx: tx.cursor().executemany("COMMIT", [()]),
    lambda tx: tx.cursor("server side"),
    lambda tx: tx.pipeline(),
]


def test_the_callback_can_neither_end_the_transaction_nor_change_who_it_acts_as(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        for end in ENDS:

            def callback(tx: FencedTransaction, end: Callable[[FencedTransaction], Any] = end) -> None:
                save(tx)
                end(tx)

            with pytest.raises(WrongTransaction):
                publish(conn, job.fence, callback)
            assert results(conn) == [] and show(conn) == "running"
        allowed = "SELECT '; commit', \"commit\" FROM (SELECT 1 AS commit) AS x -- ; rollback"
        publish(conn, job.fence, lambda tx: (tx.execute(allowed), save(tx)))
        assert results(conn) == ["a"]


def test_the_lent_connection_is_of_no_use_after_the_callback(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        kept: list[FencedTransaction] = []
        publish(conn, claimed(conn).fence, kept.append)
        with pytest.raises(WrongTransaction):
            kept[0].execute("SELECT 1")
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_in_a_transaction_and_an_asynchronous_callback_are_refused(database: Database) -> None:
    async def asynchronous(tx: FencedTransaction) -> None: ...

    def hidden(tx: FencedTransaction) -> object:
        return asynchronous(tx)

    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        with conn.transaction(), pytest.raises(WrongTransaction):
            publish(conn, job.fence, lambda tx: save(tx))
        callbacks: list[Callable[[FencedTransaction], object]] = [asynchronous, partial(asynchronous)]
        callbacks.append(hidden)
        for callback in callbacks:
            with pytest.raises(InvalidInput, match="asynchronous"):
                publish(conn, job.fence, callback)
        assert show(conn) == "running"


def test_the_lease_that_ends_inside_the_callback_publishes_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, lease=0.5)
        job = claimed(conn)
        with pytest.raises(StaleFence) as refused:
            publish(conn, job.fence, lambda tx: (save(tx), tx.execute("SELECT pg_sleep(0.6)")))
        assert refused.value.field == "lease" and results(conn) == []
        given(conn, lease=30.0)
        publish(conn, claimed(conn).fence, lambda tx: save(tx, by="successor"))
        assert results(conn) == ["successor"]


def test_the_transaction_has_limits_from_the_lease_and_a_stricter_one_of_the_session_stays(database: Database) -> None:
    def limits(conn: Conn) -> tuple[str, ...]:
        names = ("statement_timeout", "idle_in_transaction_session_timeout")
        return tuple(conn.execute(f"SHOW {name}".encode()).fetchone()[0] for name in names)  # type: ignore[index]

    with database.connect(autocommit=True) as conn:
        for operation in ("plain", "limited", "strict"):
            given(conn, operation)
        job = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS], 3)}
        assert publish(conn, job["plain"], limits) == ("0", "0")
        assert publish(conn, job["limited"], limits, lease=20.0) == ("21s", "21s")
        assert limits(conn) == ("0", "0")
        conn.execute("SET statement_timeout = '7s'")
        assert publish(conn, job["strict"], limits, lease=20.0) == ("7s", "21s")
        assert limits(conn) == ("7s", "0")


def test_a_timeout_of_the_callbacks_own_is_not_taken_for_the_end_of_the_lease(database: Database) -> None:
    def callback(tx: FencedTransaction) -> None:
        save(tx)
        tx.execute("SET LOCAL statement_timeout = '50ms'")
        tx.execute("SELECT pg_sleep(5)")

    with database.connect(autocommit=True) as conn:
        given(conn)
        with pytest.raises(psycopg.errors.QueryCanceled):
            publish(conn, claimed(conn).fence, callback, lease=20.0)
        assert results(conn) == [] and show(conn) == "running"


@pytest.mark.parametrize("how", ["idle", "in a statement", "before the callback"])
def test_a_publication_that_hangs_past_its_lease_ends_with_nothing_published(database: Database, how: str) -> None:
    def callback(tx: FencedTransaction) -> None:
        save(tx)
        if how == "idle":
            pid = tx.info.backend_pid
            query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %(pid)s"
            wait_for(lambda: look.execute(query, {"pid": pid}).fetchone() == (0,), 10, "the session to be ended")
        else:
            tx.execute("SELECT pg_sleep(20)")

    with database.connect(autocommit=True) as look, database.connect() as holder:
        given(look)
        f = claimed(look).fence
        if how == "before the callback":
            holder.execute("SELECT FROM fencepost.job FOR UPDATE")
        with database.connect(autocommit=True) as conn, pytest.raises(LeaseLost) as lost:
            publish(conn, f, callback, lease=0.2)
        holder.rollback()
        assert lost.value.field == "lease" and results(look) == []
        publish(database.dsn, f, lambda tx: save(tx))
        assert results(look) == ["a"]


def test_a_connection_lost_before_the_commit_published_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as look:
        given(look)
        job = claimed(look)

        def callback(tx: FencedTransaction) -> None:
            save(tx)
            look.execute("SELECT pg_terminate_backend(%s)", (tx.info.backend_pid,))
            save(tx, "more")

        with pytest.raises(Unreachable):
            publish(database.dsn, job.fence, callback)
        assert results(look) == [] and show(look) == "running"
        publish(database.dsn, job.fence, lambda tx: save(tx))
        assert results(look) == ["a"]


def test_a_callback_whose_database_falls_silent_is_left_after_its_lease_with_nothing_published(
    database18: Database,
) -> None:
    info = conninfo_to_dict(database18.dsn)
    with (
        Proxy(int(str(info["port"])), str(info["host"])) as proxy,
        database18.connect(autocommit=True) as look,
    ):
        given(look)
        f = claimed(look).fence

        def callback(tx: FencedTransaction) -> None:
            save(tx)
            proxy.blackhole()
            save(tx, "more")

        with pytest.raises(LeaseLost):
            publish(make_conninfo(database18.dsn, host="127.0.0.1", port=proxy.port), f, callback, lease=0.2)
        assert results(look) == [] and show(look) == "running"
        proxy.heal()
        proxy.cut()
        publish(database18.dsn, f, lambda tx: save(tx))  # the control: the claim itself still holds
        assert results(look) == ["a"]


class Cut(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose commit reaches the server while the answer is lost on the way."""

    proxy: Proxy
    refuse_new = False

    def commit(self) -> None:
        self.proxy.drop_replies()
        threading.Thread(target=self._cut, daemon=True).start()
        super().commit()

    def _cut(self) -> None:
        wait_for(lambda: self.proxy.dropped_bytes > 0, 10, "the answer to be dropped")
        self.proxy.heal()
        self.proxy.cut(refuse_new=self.refuse_new)


@contextmanager
def through_a_proxy(database: Database, *, refuse_new: bool) -> Generator[Cut]:
    info = conninfo_to_dict(database.dsn)
    with Proxy(int(str(info["port"])), str(info["host"])) as proxy:
        conn = Cut.connect(make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port, connect_timeout="10"))
        conn.proxy = proxy
        conn.refuse_new = refuse_new
        yield conn
        conn.close()


def test_a_lost_answer_to_the_commit_is_read_back_by_attempt(database: Database) -> None:
    """Crash here: [P]: the commit happened, its answer did not arrive."""
    with through_a_proxy(database, refuse_new=False) as conn, database.connect(autocommit=True) as look:
        given(look)
        assert publish(conn, claimed(look).fence, lambda tx: (save(tx), "value")[1]) == "value"
        assert results(look) == ["a"] and show(look) == "done"


def test_an_unreadable_publication_counts_as_not_published(database: Database) -> None:
    with through_a_proxy(database, refuse_new=True) as conn, database.connect(autocommit=True) as look:
        given(look)
        with pytest.raises(Unresolved):
            publish(conn, claimed(look).fence, lambda tx: save(tx))
        assert show(look) == "done"


def test_an_expired_attempt_reads_back_as_not_published(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        first = claimed(conn).fence
        expire(conn)
        second = claimed(conn).fence
        publish(conn, second, lambda tx: save(tx))
        assert published(conn, second) and not published(conn, first)
