"""Copies that arrive at the same time, lost answers and cancelled tasks: still one committed handling, nobody stuck."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from fencepost.consumer.batch import RESERVE_MANY, SETTLE_BATCH, Batch
from fencepost.consumer.connections import AsyncConnections, Connections
from fencepost.consumer.inbox import AsyncInbox, inbox
from fencepost.consumer.outcomes import Busy, Handled, Outcome
from fencepost.consumer.reading import Reading
from fencepost.consumer.reservation import reserve_in
from fencepost.consumer.runner import Again, Handling, RunnerOptions, Tries
from fencepost.schemas.connect import AsyncPunctual, NoAnswer, Punctual
from fencepost.schemas.errors import Unreachable
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Pooler
from support.transactions import async_engine

Tx = Connection[Any]
DEADLINE_SECONDS = 20.0

WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE %(query)s
"""


class Gate:
    """A handler that says when it has begun and goes on when it is told, to fail or not."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.fail_first = False
        self.runs = 0

    def __call__(self, tx: Tx, event: Submitted) -> None:
        self.runs += 1
        first = self.runs == 1
        self.begun.release()
        assert self.go.wait(DEADLINE_SECONDS)
        tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
        if first and self.fail_first:
            raise ValueError("the first one fails")


def nothing(tx: Tx, event: Submitted) -> None:
    """A handler without any work."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def count(database: Database) -> int:
    with database.connect() as conn:
        return int(conn.execute("SELECT count(*) FROM done").fetchall()[0][0])


def wait_until_waiting(database: Database, query: str, number: int = 1) -> None:
    """Returns when that many statements like `query` wait for a lock."""
    with database.connect(autocommit=True) as conn:
        wait_for(
            lambda: conn.execute(WAITING, {"query": query}).fetchall()[0][0] >= number,
            DEADLINE_SECONDS,
            f"{query} to wait",
        )


@pytest.mark.parametrize("same_coordinates", [True, False], ids=["same delivery", "another delivery"])
@pytest.mark.parametrize("isolation", [None, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_of_two_copies_at_once_one_is_handled_and_the_other_a_duplicate(
    domain: Database, threads: ThreadPoolExecutor, isolation: IsolationLevel | None, same_coordinates: bool
) -> None:
    gate = Gate()
    one_of = inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS, isolation=isolation)
    handler, elsewhere = (one_of(gate.__call__) for _ in range(2))
    sent = envelope()

    first = threads.submit(handler.handle, domain.dsn, from_kafka(sent))
    assert gate.begun.acquire(timeout=DEADLINE_SECONDS)
    second = threads.submit(elsewhere.handle, domain.dsn, from_kafka(sent, 0 if same_coordinates else 1))
    wait_until_waiting(domain, "%reserve%")
    assert gate.runs == 1
    gate.go.set()

    assert first.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
    assert second.result(DEADLINE_SECONDS).outcome is Outcome.DUPLICATE
    assert (gate.runs, count(domain)) == (1, 1)


@pytest.mark.parametrize("isolation", [None, IsolationLevel.SERIALIZABLE])
def test_the_second_copy_does_the_work_when_the_first_one_rolls_back(
    domain: Database, threads: ThreadPoolExecutor, isolation: IsolationLevel | None
) -> None:
    gate = Gate()
    gate.fail_first = True
    one_of = inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS, isolation=isolation)
    handler, elsewhere = (one_of(gate.__call__) for _ in range(2))
    sent = envelope()

    first = threads.submit(handler.handle, domain.dsn, from_kafka(sent))
    assert gate.begun.acquire(timeout=DEADLINE_SECONDS)
    second = threads.submit(elsewhere.handle, domain.dsn, from_kafka(sent, 1))
    wait_until_waiting(domain, "%reserve%")
    gate.go.set()

    with pytest.raises(ValueError):
        first.result(DEADLINE_SECONDS)
    assert second.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
    assert (gate.runs, count(domain)) == (2, 1)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["in another process", "in this process"])
def test_the_wait_for_another_copy_is_bounded_and_holds_no_other_work_up(
    domain: Database, threads: ThreadPoolExecutor, elsewhere: bool
) -> None:
    gate = Gate()
    handler = inbox(consumer="reports", wait_seconds=0.2)(gate.__call__)
    copies = inbox(consumer="reports", wait_seconds=0.2)(gate.__call__) if elsewhere else handler
    other = inbox(consumer="other")(nothing)
    sent = envelope()
    pool = Connections(domain.dsn, limit=2)
    first = threads.submit(handler.handle, pool, from_kafka(sent))
    assert gate.begun.acquire(timeout=DEADLINE_SECONDS)

    begun = time.monotonic()
    with pytest.raises(Busy) as busy:
        copies.handle(pool, from_kafka(sent, 1))
    assert time.monotonic() - begun < DEADLINE_SECONDS / 2
    assert "op-1" not in str(busy.value)
    assert other.handle(pool, from_kafka(envelope(operation="op-2"))).outcome is Outcome.HANDLED
    gate.go.set()

    assert first.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
    assert handler.handle(pool, from_kafka(sent, 1)).outcome is Outcome.DUPLICATE
    assert gate.runs == 1
    pool.close()


def test_twenty_copies_at_once_leave_a_pool_of_two_to_others(domain: Database) -> None:
    gate = Gate()
    handler = inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)(gate.__call__)
    other = inbox(consumer="other")(nothing)
    sent = envelope()
    pool = Connections(domain.dsn, limit=2, wait_seconds=2)
    with ThreadPoolExecutor(20) as threads:
        copies = [threads.submit(handler.handle, pool, from_kafka(sent, number)) for number in range(20)]
        assert gate.begun.acquire(timeout=DEADLINE_SECONDS)
        for number in range(10):
            done = other.handle(pool, from_kafka(envelope(operation=f"other-{number}"), 100 + number))
            assert done.outcome is Outcome.HANDLED
        gate.go.set()
        outcomes = [each.result(DEADLINE_SECONDS).outcome for each in copies]
    pool.close()

    assert sorted(outcomes) == [Outcome.DUPLICATE] * 19 + [Outcome.HANDLED]
    assert (gate.runs, count(domain)) == (1, 1)


def test_twenty_tasks_with_copies_leave_a_pool_of_two_to_others(domain: Database) -> None:
    runs = 0

    async def storm() -> list[Outcome]:
        begun, go = asyncio.Event(), asyncio.Event()

        @inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)
        async def handler(tx: AsyncConnection[Any], event: Submitted) -> None:
            nonlocal runs
            runs += 1
            begun.set()
            await go.wait()
            await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

        @inbox(consumer="other")
        async def other(tx: AsyncConnection[Any], event: Submitted) -> None:
            """Without any work."""

        sent = envelope()
        pool = AsyncConnections(domain.dsn, limit=2, wait_seconds=2)
        copies = [asyncio.create_task(handler.handle(pool, from_kafka(sent, number))) for number in range(20)]
        await asyncio.wait_for(begun.wait(), DEADLINE_SECONDS)
        for number in range(10):
            await other.handle(pool, from_kafka(envelope(operation=f"other-{number}"), 100 + number))
        go.set()
        outcomes = [each.outcome for each in await asyncio.gather(*copies)]
        await pool.close()
        return outcomes

    assert sorted(asyncio.run(storm())) == [Outcome.DUPLICATE] * 19 + [Outcome.HANDLED]
    assert (runs, count(domain)) == (1, 1)


def test_copies_that_are_cancelled_while_they_wait_leave_no_turn_behind(domain: Database) -> None:
    async def storm() -> list[Outcome]:
        begun, go = asyncio.Event(), asyncio.Event()

        @inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)
        async def handler(tx: AsyncConnection[Any], event: Submitted) -> None:
            begun.set()
            await go.wait()
            await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

        sent = envelope()
        pool = AsyncConnections(domain.dsn, limit=2)
        copies = [asyncio.create_task(handler.handle(pool, from_kafka(sent, number))) for number in range(20)]
        await asyncio.wait_for(begun.wait(), DEADLINE_SECONDS)
        for task in copies:  # The one whose handler runs, too.
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*copies, return_exceptions=True)
        )
        go.set()
        again = await asyncio.gather(*(handler.handle(pool, from_kafka(sent, number)) for number in range(3)))
        await pool.close()
        return [each.outcome for each in again]

    assert sorted(asyncio.run(storm())) == [Outcome.DUPLICATE] * 2 + [Outcome.HANDLED]
    assert count(domain) == 1


def test_a_deadlock_between_handlers_is_repeated_as_a_whole(domain: Database, threads: ThreadPoolExecutor) -> None:
    both = threading.Barrier(2)
    runs: list[str] = []
    with domain.connect() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY)")
        conn.execute("INSERT INTO account VALUES ('a'), ('b') ON CONFLICT DO NOTHING")

    @inbox(consumer="reports")
    def crossing(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        names = ["a", "b"] if event.operation == "op-1" else ["b", "a"]
        if runs.count(event.operation) == 1:
            tx.execute("SELECT FROM account WHERE name = %s FOR UPDATE", (names[0],))
            both.wait(DEADLINE_SECONDS)
            tx.execute("SELECT FROM account WHERE name = %s FOR UPDATE", (names[1],))
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    futures = [
        threads.submit(crossing.handle, domain.dsn, from_kafka(envelope(operation=f"op-{number}"), number))
        for number in (1, 2)
    ]

    assert [each.result(DEADLINE_SECONDS).outcome for each in futures] == [Outcome.HANDLED] * 2
    assert (len(runs), count(domain)) == (3, 2)


@pytest.mark.parametrize("shared", ["coordinates", "operations"])
def test_batches_of_the_same_in_opposite_orders_wait_for_each_other_in_turn(
    domain18: Database, threads: ThreadPoolExecutor, shared: str
) -> None:
    """Each has its first and wants the one in the middle, which a third holds: in their own orders they would deadlock."""

    def reserved(numbers: list[int], first: int) -> list[str]:
        sent = [from_kafka(envelope(operation=f"op-{n}"), first + n) for n in numbers]
        batch = Batch(Reading.accepting(Submitted), "reports", sent, DEADLINE_SECONDS)
        with domain18.connect() as conn:
            rows = conn.execute(RESERVE_MANY, batch.reserving()).fetchall()
            conn.execute(SETTLE_BATCH, batch.settling())
        return [row[1] for row in rows]

    middle = from_kafka(envelope(operation="op-2"), 2 if shared == "coordinates" else 100)
    with domain18.connect() as holder:
        reserve_in(holder, "reports", middle.envelope(), middle.coordinates)
        batches = [
            threads.submit(reserved, [1, 2, 3], 0),
            threads.submit(reserved, [3, 2, 1], 0 if shared == "coordinates" else 10),
        ]
        wait_until_waiting(domain18, "%reserve_many%", 2)
        holder.rollback()
        outcomes = [each.result(DEADLINE_SECONDS) for each in batches]

    assert sorted(outcomes) == [["duplicate"] * 3, ["reserved"] * 3]


def test_a_serialization_failure_that_never_ends_is_raised_after_five_tries(domain: Database) -> None:
    runs = 0

    @inbox(consumer="reports")
    def losing(tx: Tx, event: Submitted) -> None:
        nonlocal runs
        runs += 1
        tx.execute("DO $$ BEGIN RAISE serialization_failure; END $$")

    with pytest.raises(psycopg.errors.SerializationFailure):
        losing.handle(domain.dsn, from_kafka(envelope()))
    assert (runs, count(domain)) == (5, 0)


def test_a_serialization_failure_is_tried_again_by_a_runner_and_never_set_aside(domain18: Database) -> None:
    options = RunnerOptions(max_attempts=1)

    @inbox(consumer="reports", isolation=IsolationLevel.SERIALIZABLE)
    def losing(tx: Tx, event: Submitted) -> None:
        if event.operation == "op-1":
            tx.execute("DO $$ BEGIN RAISE serialization_failure; END $$")
        raise ValueError("the handler's own fault")

    handling = Handling(losing, domain18.dsn, options)
    fault = handling.attempt(from_kafka(envelope(operation="op-2")), Tries(options))
    assert isinstance(fault, Handled) and fault.outcome is Outcome.HANDLER_FAILED  # the control
    tries = Tries(options)
    assert isinstance(handling.attempt(from_kafka(envelope(), 1), tries), Again)
    handling.close()

    assert (tries.tries, tries.failures) == (1, 0)
    with domain18.connect() as conn:
        assert conn.execute("SELECT operation FROM fencepost.dead_letter").fetchall() == [("op-2",)]


@pytest.mark.parametrize("fails", [False, True], ids=["the first commits", "the first rolls back"])
def test_copies_behind_a_pooler_of_four_are_handled_once(
    domain18: Database, threads: ThreadPoolExecutor, pgbouncer18: Pooler, fails: bool
) -> None:
    through = pgbouncer18.dsn(domain18.dsn)
    gate = Gate()
    gate.fail_first = fails
    sent = envelope()
    copies = [inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)(gate.__call__) for _ in range(3)]

    first = threads.submit(copies[0].handle, through, from_kafka(sent))
    assert gate.begun.acquire(timeout=DEADLINE_SECONDS)
    others = [threads.submit(each.handle, through, from_kafka(sent, n)) for n, each in enumerate(copies[1:], 1)]
    wait_until_waiting(domain18, "%reserve%", 2)
    gate.go.set()

    if fails:
        with pytest.raises(ValueError):
            first.result(DEADLINE_SECONDS)
    else:
        assert first.result(DEADLINE_SECONDS).outcome is Outcome.HANDLED
    outcomes = sorted(each.result(DEADLINE_SECONDS).outcome for each in others)
    assert outcomes == sorted([Outcome.DUPLICATE, Outcome.HANDLED if fails else Outcome.DUPLICATE])
    assert (gate.runs, count(domain18)) == (1 + fails, 1)
    with domain18.connect(autocommit=True) as conn:
        left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        assert conn.execute(left).fetchall() == [(0,)], "the pooler got every session back whole"


SLOW_COMMIT = """
CREATE OR REPLACE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END $$;
DROP TRIGGER IF EXISTS slow_commit ON done;
CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON done DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION slow_commit();
"""


@pytest.fixture
def slow_commit(domain: Database) -> Iterator[Database]:
    """While a test holds advisory lock 42, a COMMIT of a handler waits for it inside the server."""
    with domain.connect() as conn:
        conn.execute(SLOW_COMMIT)
    yield domain
    with domain.connect() as conn:
        conn.execute("DROP TRIGGER slow_commit ON done")


@pytest.mark.parametrize("answered", [True, False], ids=["the answer is lost", "the commit goes on behind the cut"])
def test_a_commit_whose_answer_never_came_is_found_out_on_a_new_connection(
    slow_commit: Database, threads: ThreadPoolExecutor, answered: bool
) -> None:
    runs: list[str] = []

    @inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)
    def handler(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    assert handler.handle(slow_commit.dsn, from_kafka(envelope(operation="control"))).outcome is Outcome.HANDLED
    port = int(conninfo_to_dict(slow_commit.dsn)["port"] or 5432)
    with Proxy(port) as proxy, slow_commit.connect() as holder:
        through = make_conninfo(slow_commit.dsn, host="127.0.0.1", port=proxy.port, sslmode="disable")
        holder.execute("SELECT pg_advisory_lock(42)")
        holder.commit()
        handling: Future[Handled] = threads.submit(handler.handle, through, from_kafka(envelope(), 1))
        wait_until_waiting(slow_commit, "COMMIT")
        if answered:
            proxy.drop_replies()
            holder.execute("SELECT pg_advisory_unlock(42)")
            holder.commit()
            wait_for(lambda: count(slow_commit) == 2, DEADLINE_SECONDS, "the commit")
            wait_for(lambda: proxy.dropped_bytes > 0, DEADLINE_SECONDS, "the answer to be dropped")
            proxy.heal()
            proxy.cut()
        else:
            proxy.cut()
            wait_until_waiting(slow_commit, "%reserve%")
            holder.execute("SELECT pg_advisory_unlock(42)")
            holder.commit()
        handled = handling.result(DEADLINE_SECONDS)

    assert handled.outcome is Outcome.DUPLICATE
    assert (runs, count(slow_commit)) == (["control", "op-1"], 2)


@pytest.mark.parametrize("kind", ["psycopg", "session"])
def test_a_cancel_during_the_commit_is_no_success_and_the_next_delivery_finds_out(
    slow_commit: Database, kind: str
) -> None:
    """Whatever the server made of the commit: what is told afterwards is what is stored."""

    @inbox(consumer="reports")
    async def on_connection(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    @inbox(consumer="reports")
    async def on_session(tx: AsyncSession, event: Submitted) -> None:
        await tx.execute(text("INSERT INTO done (operation) VALUES (:operation)"), {"operation": event.operation})

    async def cancelled(handler: AsyncInbox[Submitted], database: Any) -> Outcome:
        control = await handler.handle(database, from_kafka(envelope(operation="control")))
        assert control.outcome is Outcome.HANDLED
        with slow_commit.connect(autocommit=True) as holder:
            holder.execute("SELECT pg_advisory_lock(42)")
            task = asyncio.create_task(handler.handle(database, from_kafka(envelope(), 1)))
            await asyncio.to_thread(wait_until_waiting, slow_commit, "COMMIT")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            holder.execute("SELECT pg_advisory_unlock(42)")
            busy = """SELECT count(*) FROM pg_stat_activity
                      WHERE datname = current_database() AND state <> 'idle' AND backend_type = 'client backend'"""
            await asyncio.to_thread(
                wait_for,
                lambda: holder.execute(busy).fetchall() == [(1,)],  # The one that asks.
                DEADLINE_SECONDS,
                "every statement and transaction to be over",
            )
        stored = count(slow_commit) - 1
        found = (await handler.handle(database, from_kafka(envelope(), 1))).outcome
        assert found is (Outcome.DUPLICATE if stored else Outcome.HANDLED)
        return found

    async def scene() -> None:
        if kind == "psycopg":
            pool = AsyncConnections(slow_commit.dsn, limit=1, wait_seconds=DEADLINE_SECONDS)
            await cancelled(on_connection, pool)
            await pool.close()
        else:
            async with async_engine(slow_commit.dsn, pool_size=1, max_overflow=0, pool_timeout=10) as made:
                await cancelled(on_session, async_sessionmaker(made))

    asyncio.run(scene())
    assert count(slow_commit) == 2


def test_a_connection_that_is_lost_before_the_commit_is_replaced_and_the_work_done_once(domain: Database) -> None:
    pool = Connections(domain.dsn, limit=1)
    runs = 0

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        nonlocal runs
        runs += 1
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
        if runs == 1:
            with domain.connect(autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (tx.info.backend_pid,))

    assert handler.handle(pool, from_kafka(envelope())).outcome is Outcome.HANDLED
    pool.close()
    assert (runs, count(domain)) == (2, 1)


def test_a_silent_database_is_left_at_our_own_deadline_and_its_connection_never_handed_on(domain: Database) -> None:
    port = int(conninfo_to_dict(domain.dsn)["port"] or 5432)
    with Proxy(port) as proxy:
        through = make_conninfo(domain.dsn, host="127.0.0.1", port=proxy.port, sslmode="disable")
        pool = Connections(through, answer_within=DEADLINE_SECONDS)
        with pool.connection() as conn:
            conn.execute("SELECT 1")  # the control
            conn.rollback()
        with pytest.raises(NoAnswer), pool.connection() as again:
            assert again is conn and isinstance(again, Punctual)
            assert again.answer_within == DEADLINE_SECONDS
            again.answer_within = 0.5
            proxy.blackhole()
            again.execute("SELECT 1")
        assert conn.closed
        proxy.heal()
        with pool.connection() as fresh:
            assert fresh is not conn and fresh.execute("SELECT 1").fetchone() == (1,)
        pool.close()


def test_a_silent_database_is_left_by_asyncio_connections_too(domain: Database) -> None:
    async def scene(proxy: Proxy) -> None:
        through = make_conninfo(domain.dsn, host="127.0.0.1", port=proxy.port, sslmode="disable")
        pool = AsyncConnections(through, answer_within=DEADLINE_SECONDS)
        async with pool.connection() as conn:
            await conn.execute("SELECT 1")  # the control
            await conn.rollback()
        with pytest.raises(NoAnswer):
            async with pool.connection() as again:
                assert again is conn and isinstance(again, AsyncPunctual)
                assert again.answer_within == DEADLINE_SECONDS
                again.answer_within = 0.5
                proxy.blackhole()
                await again.execute("SELECT 1")
        assert conn.closed
        proxy.heal()
        async with pool.connection() as fresh:
            assert await (await fresh.execute("SELECT 1")).fetchone() == (1,)
        await pool.close()

    with Proxy(int(conninfo_to_dict(domain.dsn)["port"] or 5432)) as proxy:
        asyncio.run(scene(proxy))


def test_a_database_that_is_not_there_is_unreachable_without_its_password() -> None:
    handler = inbox(consumer="reports")(nothing)
    with pytest.raises(Unreachable) as refused:
        handler.handle("host=127.0.0.1 port=1 user=u password=hidden dbname=d", from_kafka(envelope()))
    assert "127.0.0.1:1" in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_cancelled_tasks_leak_no_connection_and_count_nothing_that_was_not_committed(domain: Database) -> None:
    @inbox(consumer="reports")
    async def sleeping(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("SELECT pg_sleep(%s)", (random.random() / 200,))
        await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    async def storm() -> tuple[list[str], list[Outcome]]:
        pool = AsyncConnections(domain.dsn, limit=4)

        async def one(number: int) -> str:
            delivery = from_kafka(envelope(operation=f"op-{number}"), number)
            return str((await sleeping.handle(pool, delivery)).operation)

        tasks = [asyncio.create_task(one(number)) for number in range(200)]
        for task in random.sample(tasks, len(tasks)):
            await asyncio.sleep(random.random() / 200)
            task.cancel()
        told = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, str)]
        normal = [from_kafka(envelope(operation=f"normal-{number}"), 1000 + number) for number in range(20)]
        outcomes = [each.outcome for each in await asyncio.gather(*(sleeping.handle(pool, each) for each in normal))]
        await pool.close()
        return told, outcomes

    told, outcomes = asyncio.run(storm())

    assert outcomes == [Outcome.HANDLED] * 20
    with domain.connect(autocommit=True) as conn:
        stored = {row[0] for row in conn.execute("SELECT operation FROM done").fetchall()}
        assert set(told) <= stored
        assert len(stored) == count(domain)
        left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        wait_for(lambda: conn.execute(left).fetchall() == [(0,)], DEADLINE_SECONDS, "every connection to be gone")
