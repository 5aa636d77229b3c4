"""A signal is in the caller's commit, once for its key, and waits for nobody who works on the job."""

import asyncio
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fencepost.jobs.cancel import cancel
from fencepost.jobs.doorbell import DOZE
from fencepost.jobs.fence import complete
from fencepost.jobs.signals import PAYLOAD_BYTES_MAX, signal, signals
from fencepost.jobs.submit import submit
from fencepost.schemas.connect import connect_async
from fencepost.schemas.errors import InvalidInput, OperationConflict, UnknownJob, WrongTransaction
from support.database import Database
from support.jobs import CLASS, Background, Conn, claimed, given, show, two, waiting
from support.transactions import async_engine, engine

WHICH: dict[str, Any] = {"tenant": "t", "operation": "op-1", "job_class": CLASS}
tell = partial(signal, **WHICH)


def told(conn: Conn) -> list[tuple[str, bytes]]:
    return conn.execute("SELECT name, payload FROM fencepost.signal ORDER BY n").fetchall()


def test_a_signal_commits_with_the_callers_transaction_and_vanishes_with_it(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        assert tell(manual, name="approved", payload={"by": "ann"}) == "recorded"
        manual.rollback()
        assert told(auto) == []
        assert tell(manual, name="approved", payload={"by": "ann"}) == "recorded"
        assert told(auto) == []
        manual.commit()
        assert told(auto) == [("approved", b'{"by":"ann"}')]


def test_every_kind_of_transaction_carries_it_and_none_is_refused(database18: Database) -> None:
    async def asynchronous() -> None:
        async with await connect_async(database18.dsn) as conn:
            assert await signal(conn, name="psycopg-async", **WHICH) == "recorded"
            await conn.commit()
        async with async_engine(database18.dsn) as made, AsyncSession(made) as session:
            assert await signal(session, name="sqlalchemy-async", **WHICH) == "recorded"
            await session.commit()
        async with await connect_async(database18.dsn, autocommit=True) as conn:
            with pytest.raises(WrongTransaction):
                await signal(conn, name="none", **WHICH)

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with conn.transaction():
            assert tell(conn, name="psycopg") == "recorded"
        with engine(database18.dsn) as made, Session(made) as session:
            assert tell(session, name="sqlalchemy") == "recorded"
            session.commit()
        asyncio.run(asynchronous())
        with pytest.raises(WrongTransaction) as refused:
            tell(conn, name="none")
        assert refused.value.field == "autocommit"
        names = [name for name, _ in told(conn)]
        assert names == ["psycopg", "sqlalchemy", "psycopg-async", "sqlalchemy-async"]


def test_an_unknown_job_is_refused_and_one_of_the_same_transaction_is_known(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto, "other")
        with pytest.raises(UnknownJob):
            tell(manual, name="approved")
        manual.rollback()
        submit(manual, CLASS, tenant="t", operation="op-1", args={})
        assert tell(manual, name="approved") == "recorded"
        with pytest.raises(UnknownJob):
            signal(manual, **(WHICH | {"tenant": "another"}), name="approved")
        manual.rollback()
        assert told(auto) == []


def test_a_key_tells_the_same_once_and_nothing_else(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        for heard in ("recorded", "known"):
            with conn.transaction():
                assert tell(conn, name="approved", payload=[1], key="k") == heard
        for other in ({"name": "approved", "payload": [2]}, {"name": "refused", "payload": [1]}):
            with pytest.raises(OperationConflict) as refused, conn.transaction():
                tell(conn, key="k", **other)
            assert refused.value.field == "key"
        with conn.transaction():
            assert signal(conn, **(WHICH | {"operation": "op-2"}), name="refused", key="k") == "recorded"
            assert tell(conn, name="approved", payload=[1]) == "recorded"  # without a key it is another one
        assert len(told(conn)) == 3


def test_two_at_once_with_one_key_are_one_signal(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        assert tell(manual, name="approved", payload=1, key="k") == "recorded"
        same = Background(database18, lambda conn: tell(conn, name="approved", payload=1, key="k"), autocommit=False)
        other = Background(database18, lambda conn: tell(conn, name="approved", payload=2, key="k"), autocommit=False)
        waiting(auto, same.pid)
        waiting(auto, other.pid)
        manual.commit()
        assert same.outcome() == "known"
        with pytest.raises(OperationConflict):
            other.outcome()
        assert len(told(auto)) == 1


def test_a_done_job_hears_nothing_more_and_a_cancelled_one_keeps_what_it_is_told(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "cancelled")
        with conn.transaction():
            assert tell(conn, name="early", key="k") == "recorded"
        cancel(conn, "t", "cancelled", CLASS, actor="ann", reason="no more")
        complete(conn, claimed(conn).fence)
        with conn.transaction():
            assert tell(conn, name="late") == "too_late"
            assert tell(conn, name="late", key="k2") == "too_late"
            assert tell(conn, name="early", key="k") == "known"
            assert signal(conn, **(WHICH | {"operation": "cancelled"}), name="late") == "recorded"
        assert [name for name, _ in told(conn)] == ["early", "late"]
        assert show(conn, "cancelled") == "cancelled"


def test_it_waits_neither_for_the_gate_nor_for_whoever_holds_the_job(database18: Database) -> None:
    with two(database18) as (auto, holder):
        given(auto)
        holder.execute("LOCK TABLE fencepost.gate IN ACCESS EXCLUSIVE MODE")
        holder.execute("SELECT FROM fencepost.job FOR UPDATE")
        auto.execute("SET lock_timeout = '300ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            cancel(auto, "t", "op-1", CLASS, actor="ann", reason="the control, which needs both")
        with auto.transaction():
            assert tell(auto, name="approved") == "recorded"
            locks = auto.execute(
                "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'fencepost.gate'::regclass"
            ).fetchone()
            assert locks == (0,)
        holder.rollback()


def test_it_rings_for_a_worker_that_sleeps_and_for_nobody_else(database18: Database) -> None:
    with two(database18) as (conn, teller), database18.connect(autocommit=True) as ears:
        given(conn)
        conn.execute("SELECT setval('fencepost.job_doorbell', 0)")
        ears.execute("LISTEN fencepost_jobs")

        def rings() -> int:
            ears.execute("SELECT 1")  # a round trip brings all that was sent before
            return sum(1 for _ in ears.notifies(timeout=0))

        tell(teller, name="a")
        teller.commit()
        assert rings() == 0
        conn.execute(DOZE, {"seconds": 60})
        for name in ("b", "c"):
            tell(teller, name=name)
        assert rings() == 0
        teller.commit()
        assert rings() == 1


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tenant", {"tenant": ""}),
    ("operation", {"operation": "x" * 201}),
    ("class", {"job_class": "Not A Name"}),
    ("name", {"name": ""}),
    ("name", {"name": "a\nb"}),
    ("key", {"key": " k"}),
    ("actor", {"actor": ""}),
    ("payload", {"payload": object()}),
    ("payload", {"payload": "x" * PAYLOAD_BYTES_MAX}),
]


def test_what_cannot_be_kept_is_refused_by_name_and_nothing_is_written(database18: Database) -> None:
    with two(database18) as (auto, conn):
        given(auto)
        good: dict[str, Any] = WHICH | {"name": "approved", "payload": "x" * (PAYLOAD_BYTES_MAX - 2)}
        assert signal(conn, **good) == "recorded"
        conn.rollback()
        for field, changes in REFUSED:
            with pytest.raises(InvalidInput) as refused:
                signal(conn, **(good | changes))
            assert refused.value.field == field
            conn.rollback()
        # Whoever calls the function without this client meets the same limit.
        with pytest.raises(InvalidInput, match="payload"):
            conn.execute("SELECT fencepost.signal('t', 'op-1', %(c)s, 'n', %(p)s)", {"c": CLASS, "p": b"x" * 65_537})
        conn.rollback()
        assert told(auto) == []


def test_a_job_takes_a_thousand_signals(database18: Database) -> None:
    with two(database18) as (auto, conn):
        given(auto)
        many = "SELECT count(fencepost.signal('t', 'op-1', %(c)s, 'page', '1')) FROM generate_series(1, %(n)s)"
        assert conn.execute(many, {"c": CLASS, "n": 999}).fetchone() == (999,)
        assert tell(conn, name="page", key="last") == "recorded"
        conn.commit()
        with pytest.raises(InvalidInput) as refused:
            tell(conn, name="page")
        assert refused.value.field == "name"


def test_a_job_reads_its_own_signals_with_who_and_when_and_no_log_line_has_their_content(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "op-2")
        with conn.transaction():
            tell(conn, name="a", payload={"secret": 1.5}, key="k", actor="ann")
            tell(conn, name="b")
            signal(conn, **(WHICH | {"operation": "op-2"}), name="of another job")
        first, second = signals(conn, claimed(conn).fence)
        assert (first.name, first.key, first.payload, first.actor) == ("a", "k", {"secret": 1.5}, "ann")
        assert (second.name, second.key, second.payload, second.actor) == ("b", None, None, None)
        assert conn.execute("SELECT session_user").fetchone() == (first.login,)
        assert first.number < second.number and first.at <= second.at and "secret" not in repr(first)
        with pytest.raises(InvalidInput):
            conn.execute("UPDATE fencepost.signal SET payload = '2'")
