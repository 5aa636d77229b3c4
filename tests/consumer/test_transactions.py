"""Whatever kind of transaction a handler is lent: one commit with its reservation, or nothing, and never a false "handled"."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import aio_pika
import psycopg
import pytest
import sqlalchemy
from confluent_kafka import Producer
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import AsyncConnection, Connection, IsolationLevel
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.outcomes import Busy, Handled, Outcome
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.reservation import reserve_in
from fencepost.consumer.retries import take
from fencepost.consumer.runner import Again, Handling, RunnerOptions, Tries
from fencepost.relay import outbox
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.errors import CommitWasRollback, ConfigError, Unreachable, WrongTransaction
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.lending import KINDS, Act, Kind
from support.processes import wait_for
from support.services import Kafka, Rabbit, Services, unique
from support.transactions import ALIAS, Thing, async_engine, django_connection, engine, url

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
SESSIONS = [kind for kind in KINDS if kind.name.startswith(("session", "sqlmodel"))]
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=3, drain_seconds=10)


def done(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def kept(database: Database) -> tuple[int, int, int]:
    """Reservations, jobs and dead letters."""
    with database.connect() as conn:
        row = conn.execute(
            """SELECT (SELECT count(*) FROM fencepost.reservation), (SELECT count(*) FROM fencepost.job),
                      (SELECT count(*) FROM fencepost.dead_letter)"""
        ).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


@every_kind
def test_reservation_change_and_job_are_one_commit_and_a_raise_takes_all_of_it(domain: Database, kind: Kind) -> None:
    fails = True

    def body(act: Act, event: Submitted) -> None:
        act.insert(event)
        assert act.hand_over(event)
        if fails:
            raise ValueError("a bug")

    handler = kind.inbox(body)
    with pytest.raises(ValueError, match="a bug"):
        kind.deliver(domain.dsn, handler, from_kafka(envelope()))
    assert (done(domain), kept(domain)) == ([], (0, 0, 0))

    fails = False
    arrivals = [
        from_kafka(envelope()),
        from_kafka(envelope(), 1),
        from_kafka(envelope(document="b"), 2),
        from_kafka(envelope(), 3, payload=b"nonsense"),
        from_kafka(envelope(operation="op-2"), 4),
    ]
    outcomes = [each.outcome for each in kind.deliver(domain.dsn, handler, *arrivals)]
    assert outcomes == [
        Outcome.HANDLED,
        Outcome.DUPLICATE,
        Outcome.CONFLICT,
        Outcome.UNDECODABLE,
        Outcome.HANDLED,
    ]
    assert (done(domain), kept(domain)) == (["op-1", "op-2"], (2, 2, 2))


@every_kind
def test_a_dead_letter_is_settled_in_the_commit_that_handles_it_and_stays_with_a_raise(
    domain18: Database, kind: Kind
) -> None:
    failed = Handling(inbox(consumer="reports")(_failing), domain18.dsn, RunnerOptions(max_attempts=1))
    failed.attempt(from_kafka(envelope()), Tries(RunnerOptions(max_attempts=1)))
    failed.close()
    with domain18.connect() as conn:
        conn.execute("UPDATE fencepost.dead_letter SET due_at = now()")
    with domain18.connect() as conn:
        taken = take(conn, "reports")
    assert taken is not None
    fails = True

    def body(act: Act, event: Submitted) -> None:
        act.insert(event)
        if fails:
            raise ValueError("a bug")

    handler = kind.inbox(body)
    assert handler.consumer == "reports"
    with pytest.raises(ValueError, match="a bug"):
        kind.deliver(domain18.dsn, handler, taken)
    assert (done(domain18), kept(domain18)) == ([], (0, 0, 1))
    fails = False
    (handled,) = kind.deliver(domain18.dsn, handler, taken)
    assert handled.outcome is Outcome.HANDLED
    assert (done(domain18), kept(domain18)) == (["op-1"], (1, 0, 0))


def _failing(tx: Connection[Any], event: Submitted) -> None:
    raise ValueError("a bug")


@every_kind
def test_an_error_is_contained_by_a_savepoint_and_otherwise_never_a_commit(domain18: Database, kind: Kind) -> None:
    def contained(act: Act, event: Submitted) -> None:
        act.insert(event)
        with pytest.raises(Exception, match="division"), act.savepoint():
            act.execute("SELECT 1/0")

    (handled,) = kind.deliver(domain18.dsn, kind.inbox(contained), from_kafka(envelope(operation="op-0")))
    assert handled.outcome is Outcome.HANDLED

    def swallowing(act: Act, event: Submitted) -> None:
        act.insert(event)
        with pytest.raises(Exception, match="division"):
            act.execute("SELECT 1/0")

    with pytest.raises(CommitWasRollback):
        kind.deliver(domain18.dsn, kind.inbox(swallowing), from_kafka(envelope(), 1))
    assert (done(domain18), kept(domain18)) == (["op-0"], (1, 0, 0))


@pytest.mark.parametrize("kind", SESSIONS, ids=lambda kind: kind.name)
def test_a_failed_flush_that_was_swallowed_is_never_a_commit(domain18: Database, kind: Kind) -> None:
    with domain18.connect() as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS thing (name text PRIMARY KEY, note text NOT NULL DEFAULT '')")
        conn.execute("DELETE FROM thing")
        conn.execute("INSERT INTO thing VALUES ('a')")

    def pending(act: Act, event: Submitted) -> None:
        act.tx.add(Thing(name="b"))

    (handled,) = kind.deliver(domain18.dsn, kind.inbox(pending), from_kafka(envelope()))
    assert handled.outcome is Outcome.HANDLED

    def again(act: Act, event: Submitted) -> None:
        act.tx.add(Thing(name="a"))
        with pytest.raises(IntegrityError):
            act.run(act.tx.flush())

    def rolled_back(act: Act, event: Submitted) -> None:
        again(act, event)
        act.run(act.tx.rollback())
        act.tx.add(Thing(name="c"))

    for offset, (body, told) in enumerate(((again, "swallowed"), (rolled_back, "ended")), 1):
        with pytest.raises(CommitWasRollback, match=told):
            kind.deliver(domain18.dsn, kind.inbox(body), from_kafka(envelope(operation=f"op-{offset + 1}"), offset))

    def at_the_commit(act: Act, event: Submitted) -> None:
        act.tx.add(Thing(name="a"))

    with pytest.raises(IntegrityError):
        kind.deliver(domain18.dsn, kind.inbox(at_the_commit), from_kafka(envelope(operation="op-4"), 4))
    with domain18.connect() as conn:
        assert conn.execute("SELECT name FROM thing ORDER BY name").fetchall() == [("a",), ("b",)]
    assert kept(domain18) == (1, 0, 0)


@every_kind
def test_a_handler_that_ends_the_transaction_is_told_so_and_its_commit_refused(domain18: Database, kind: Kind) -> None:
    def rollback(act: Act) -> None:
        act.execute("ROLLBACK")

    def again(act: Act) -> None:
        act.execute("ROLLBACK")
        act.execute("BEGIN")

    for offset, ending in enumerate((rollback, again)):

        def body(act: Act, event: Submitted, ending: Callable[[Act], None] = ending) -> None:
            act.insert(event)
            ending(act)

        with pytest.raises(CommitWasRollback):
            kind.deliver(domain18.dsn, kind.inbox(body), from_kafka(envelope(operation=f"op-{offset}"), offset))

    def committing(act: Act, event: Submitted) -> None:
        act.insert(event)
        act.run(act.tx.commit())

    refusals = (WrongTransaction, psycopg.ProgrammingError, transaction.TransactionManagementError)
    with pytest.raises(refusals):
        kind.deliver(domain18.dsn, kind.inbox(committing), from_kafka(envelope(operation="op-3"), 3))
    assert (done(domain18), kept(domain18)) == ([], (0, 0, 0))

    def insisting(act: Act, event: Submitted) -> None:
        act.insert(event)
        with pytest.raises(refusals):
            act.run(act.tx.commit())

    try:
        handled = kind.deliver(domain18.dsn, kind.inbox(insisting), from_kafka(envelope(operation="op-4"), 4))
    except CommitWasRollback:
        handled = []
    assert len(done(domain18)) == kept(domain18)[0] == len(handled), "all of it, or none"


@every_kind
def test_a_lost_serialization_race_runs_the_whole_handler_again(domain: Database, kind: Kind) -> None:
    with domain.connect() as conn:
        conn.execute("INSERT INTO done (operation) VALUES ('counter')")
    runs: list[str] = []

    def body(act: Act, event: Submitted) -> None:
        runs.append(act.value("SHOW transaction_isolation") + act.value("SHOW lock_timeout"))
        act.insert(event)
        act.value("SELECT document FROM done WHERE operation = 'counter'")
        if len(runs) == 1:
            with domain.connect() as other:
                other.execute("UPDATE done SET document = 'theirs' WHERE operation = 'counter'")
        act.execute("UPDATE done SET document = 'ours' WHERE operation = 'counter'")

    handler = kind.inbox(body, isolation=IsolationLevel.REPEATABLE_READ)
    (handled,) = kind.deliver(domain.dsn, handler, from_kafka(envelope()))

    assert (handled.outcome, runs) == (Outcome.HANDLED, ["repeatable read0"] * 2)
    assert (done(domain), kept(domain)) == (["counter", "op-1"], (1, 0, 0))


@every_kind
def test_a_connection_that_is_lost_inside_the_handler_is_replaced_and_the_whole_repeated(
    domain18: Database, kind: Kind
) -> None:
    runs: list[int] = []

    def body(act: Act, event: Submitted) -> None:
        act.insert(event)
        runs.append(act.value("SELECT pg_backend_pid()"))
        if len(runs) == 1:
            with domain18.connect(autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", (runs[0],))
        act.execute("SELECT 1")

    (handled,) = kind.deliver(domain18.dsn, kind.inbox(body), from_kafka(envelope()))

    assert handled.outcome is Outcome.HANDLED and len(set(runs)) == 2
    assert (done(domain18), kept(domain18)) == (["op-1"], (1, 0, 0))


@every_kind
def test_a_copy_that_is_being_handled_elsewhere_is_waited_for_within_bounds(domain18: Database, kind: Kind) -> None:
    handler = kind.inbox(lambda act, event: act.insert(event), wait_seconds=0.2)
    with domain18.connect() as other:
        reserve_in(other, "reports", envelope(), "elsewhere")
        with pytest.raises(Busy):
            kind.deliver(domain18.dsn, handler, from_kafka(envelope(), 1))
        other.rollback()
    (handled,) = kind.deliver(domain18.dsn, handler, from_kafka(envelope(), 1))
    assert (handled.outcome, done(domain18)) == (Outcome.HANDLED, ["op-1"])


@every_kind
def test_a_pooler_with_one_server_connection_carries_every_kind(
    services: Services, domain18: Database, kind: Kind
) -> None:
    through = services.pgbouncer("18", pool_size=1).dsn(domain18.dsn)
    handler = kind.inbox(lambda act, event: act.insert(event))

    sent = envelope()
    handled = kind.deliver(through, handler, *(from_kafka(sent, offset) for offset in range(7)))

    assert [each.outcome for each in handled] == [Outcome.HANDLED, *[Outcome.DUPLICATE] * 6]
    assert done(domain18) == ["op-1"]


def test_a_session_hands_over_and_accepts_in_the_same_commit(domain18: Database) -> None:
    @inbox(consumer="reports")
    def chained(tx: Session, event: Submitted) -> None:
        tx.execute(sqlalchemy.text("INSERT INTO done (operation) VALUES (:operation)"), {"operation": event.operation})
        outbox.enqueue(tx, Submitted(tenant="acme", operation="next", document="b"))

    with engine(domain18.dsn) as made:
        assert chained.handle(sessionmaker(made), from_kafka(envelope())).outcome is Outcome.HANDLED
    with domain18.connect() as conn:
        assert conn.execute("SELECT operation FROM fencepost.outbox").fetchall() == [("next",)]
        conn.execute("TRUNCATE fencepost.outbox; DELETE FROM fencepost.event_key")


def test_what_django_would_roll_back_in_silence_is_never_a_commit(domain18: Database) -> None:
    @inbox(consumer="reports")
    def doomed(tx: BaseDatabaseWrapper, event: Submitted) -> None:
        Act(tx).insert(event)
        with pytest.raises(ValueError), transaction.atomic(using=tx.alias, savepoint=False):
            raise ValueError

    with django_connection(domain18.dsn) as django, pytest.raises(CommitWasRollback):
        doomed.handle(django, from_kafka(envelope()))
    assert (done(domain18), kept(domain18)) == ([], (0, 0, 0))


def test_django_is_refused_where_somebody_else_commits(domain18: Database) -> None:
    @inbox(consumer="reports")
    def handler(tx: BaseDatabaseWrapper, event: Submitted) -> None:
        Act(tx).insert(event)

    with django_connection(domain18.dsn) as django:
        assert handler.handle(django, from_kafka(envelope())).outcome is Outcome.HANDLED
        with transaction.atomic(using=ALIAS), pytest.raises(WrongTransaction) as inside:
            handler.handle(django, from_kafka(envelope(operation="op-2"), 1))
        django.settings_dict["AUTOCOMMIT"] = False
        django.set_autocommit(False)
        with pytest.raises(ConfigError) as without:
            handler.handle(django, from_kafka(envelope(operation="op-2"), 1))
    assert (inside.value.field, without.value.field) == ("subtransaction", "database")
    assert done(domain18) == ["op-1"]


def test_a_database_that_lends_something_else_than_the_handler_takes_is_refused_before_anything_runs(
    domain18: Database,
) -> None:
    @inbox(consumer="reports")
    def on_session(tx: Session, event: Submitted) -> None:
        Act(tx).insert(event)

    @inbox(consumer="reports")
    def on_connection(tx: Connection[Any], event: Submitted) -> None:
        Act(tx).insert(event)

    @inbox(consumer="reports")
    async def on_async_session(tx: AsyncSession, event: Submitted) -> None: ...

    with engine(domain18.dsn) as made, Session(made) as session, django_connection(domain18.dsn) as django:
        assert on_session.handle(sessionmaker(made), from_kafka(envelope())).outcome is Outcome.HANDLED
        wrong: list[tuple[Inbox[Submitted], Any]] = [
            (on_session, made),
            (on_session, domain18.dsn),
            (on_session, django),
            (on_session, session),
            (on_connection, sessionmaker(made)),
            (on_connection, object()),
        ]
        for handler, database in wrong:
            with pytest.raises(ConfigError) as refused:
                handler.handle(database, from_kafka(envelope(operation="op-2"), 1))
            assert refused.value.field == "database"
            with pytest.raises(ConfigError):
                KafkaRunner(handler, database, bootstrap="127.0.0.1:1", topics=["t"])
            with pytest.raises(ConfigError):
                RabbitRunner(handler, database, url="amqp://127.0.0.1:1", queue="q")
        for other in (made, django):
            stranger: Any = other
            with pytest.raises(ConfigError):
                asyncio.run(on_async_session.handle(stranger, from_kafka(envelope(operation="op-2"), 1)))
    assert done(domain18) == ["op-1"]


def test_a_database_without_real_transactions_is_not_the_handlers_fault(domain18: Database) -> None:
    @inbox(consumer="reports")
    def handler(tx: Session, event: Submitted) -> None:
        Act(tx).insert(event)

    delivery = from_kafka(envelope())
    with engine(domain18.dsn, isolation_level="AUTOCOMMIT") as made:
        with pytest.raises(ConfigError) as refused:
            handler.handle(sessionmaker(made), delivery)
        assert refused.value.field == "database" and "AUTOCOMMIT" in str(refused.value)
        tries = Tries(FAST)
        handling = Handling(handler, sessionmaker(made), FAST)
        for _ in range(FAST.max_attempts + 1):
            assert isinstance(handling.attempt(delivery, tries), Again)
        assert tries.failures == 0
    assert (done(domain18), kept(domain18)) == ([], (0, 0, 0))

    @inbox(consumer="reports")
    async def handler_async(tx: AsyncSession, event: Submitted) -> None: ...

    async def on_asyncpg() -> None:
        made = create_async_engine(url(domain18.dsn, "asyncpg"))
        try:
            await handler_async.handle(async_sessionmaker(made), delivery)
        finally:
            await made.dispose()

    with pytest.raises(ConfigError, match="asyncpg"):
        asyncio.run(on_asyncpg())


def test_a_pool_without_a_free_connection_is_unreachable_and_not_the_handlers_fault(domain18: Database) -> None:
    @inbox(consumer="reports")
    def handler(tx: Session, event: Submitted) -> None:
        Act(tx).insert(event)

    with engine(domain18.dsn, pool_size=1, max_overflow=0, pool_timeout=0.1) as made:
        with made.connect(), pytest.raises(Unreachable):
            handler.handle(sessionmaker(made), from_kafka(envelope()))
        assert handler.handle(sessionmaker(made), from_kafka(envelope())).outcome is Outcome.HANDLED


def test_what_sqlalchemy_and_django_wrap_is_judged_and_told_by_the_drivers_error(
    domain18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fencepost")
    secret = "do-not-log-me"

    @inbox(consumer="reports")
    def handler(tx: Session, event: Submitted) -> None:
        tx.execute(sqlalchemy.text("SELECT CAST(:text AS integer)"), {"text": secret})

    options = RunnerOptions(max_attempts=1)
    with engine(domain18.dsn) as made:
        found = Handling(handler, sessionmaker(made), options).attempt(from_kafka(envelope()), Tries(options))
    assert isinstance(found, Handled) and found.outcome is Outcome.HANDLER_FAILED
    with domain18.connect() as conn:
        assert conn.execute("SELECT detail FROM fencepost.dead_letter").fetchall() == [("DataError 22P02",)]
    assert secret not in caplog.text


def test_a_cancelled_handler_leaves_nothing_and_gives_its_connection_back(domain18: Database) -> None:
    started = asyncio.Event()

    @inbox(consumer="reports")
    async def handler(tx: AsyncSession, event: Submitted) -> None:
        await tx.execute(sqlalchemy.text("INSERT INTO done (operation) VALUES ('op-1')"))
        if not started.is_set():
            started.set()
            await tx.execute(sqlalchemy.text("SELECT pg_sleep(30)"))

    async def cancelled() -> Outcome:
        async with async_engine(domain18.dsn, pool_size=1, max_overflow=0, pool_timeout=5) as made:
            database = async_sessionmaker(made)
            task = asyncio.create_task(handler.handle(database, from_kafka(envelope())))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await handler.handle(database, from_kafka(envelope()))).outcome

    assert asyncio.run(cancelled()) is Outcome.HANDLED
    assert (done(domain18), kept(domain18)) == (["op-1"], (1, 0, 0))


@contextmanager
def running(runner: KafkaRunner | RabbitRunner) -> Generator[None]:
    """The runner in a thread, stopped and drained at the end; its error, if any, is the test's."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            runner.run(stop)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and errors == []


RUN = [kind for kind in KINDS if kind.name in ("session", "session-async", "django")]


@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind.name)
def test_runners_lend_every_kind(kafka: Kafka, rabbitmq: Rabbit, domain18: Database, kind: Kind) -> None:
    topic, queue = kafka.topic(), rabbitmq.name()
    sent = [envelope(operation=f"op-{number}") for number in range(30)]
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "acks": "all", "log_level": 0})
    for each in sent[:20]:
        key = kafka_binding.key(each.tenant, each.ordering_key)
        producer.produce(topic, value=each.payload, key=key, headers=list(kafka_binding.encode(each)))
    assert producer.flush(30) == 0

    async def publish() -> None:
        async with await aio_pika.connect(rabbitmq.url, timeout=30) as connection:
            channel = await connection.channel()
            await channel.declare_queue(queue, durable=True)
            for each in sent[10:]:
                headers, content_type = amqp_binding.encode(each)
                message = aio_pika.Message(
                    each.payload, headers=dict(headers), content_type=content_type, message_id=str(each.id)
                )
                await channel.default_exchange.publish(message, queue, timeout=30)

    async def delete() -> None:
        async with await aio_pika.connect(rabbitmq.url, timeout=30) as connection:
            await (await connection.channel()).queue_delete(queue)

    failed: list[str] = []

    def body(act: Act, event: Submitted) -> None:
        act.insert(event)
        if event.operation == "op-5" and not failed:
            failed.append(event.operation)
            raise ValueError

    asyncio.run(publish())
    handler = kind.inbox(body)

    def run(database: Any) -> None:
        from_topic = KafkaRunner(
            handler, database, bootstrap=kafka.bootstrap, topics=[topic], group=unique("group"), options=FAST
        )
        with running(from_topic):
            wait_for(lambda: len(done(domain18)) == 20, 30, "the topic to be handled")
        with running(RabbitRunner(handler, database, url=rabbitmq.url, queue=queue, options=FAST)):
            wait_for(lambda: len(done(domain18)) == 30, 30, "the queue to be handled")

    if kind.asynchronous:
        run(async_sessionmaker(create_async_engine(url(domain18.dsn), connect_args={"prepare_threshold": None})))
    else:
        with kind.open(domain18.dsn) as database:
            run(database)
    asyncio.run(delete())
    assert sorted(done(domain18)) == sorted(each.operation for each in sent)
    assert (kept(domain18), failed) == ((30, 0, 0), ["op-5"])


def test_a_handler_of_sqlalchemy_may_use_its_own_errors(domain18: Database) -> None:
    @inbox(consumer="reports")
    def handler(tx: Session, event: Submitted) -> None:
        raise SQLAlchemyError("of the handler")

    with engine(domain18.dsn) as made, pytest.raises(SQLAlchemyError, match="of the handler"):
        handler.handle(sessionmaker(made), from_kafka(envelope()))
    assert kept(domain18) == (0, 0, 0)


def test_psycopg_stays_as_it_was(domain18: Database) -> None:
    @inbox(consumer="reports")
    async def handler(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    async def on_one_connection() -> None:
        async with await AsyncConnection.connect(domain18.dsn, autocommit=True) as conn:
            assert (await handler.handle(conn, from_kafka(envelope()))).outcome is Outcome.HANDLED
            async with conn.transaction():
                with pytest.raises(WrongTransaction):
                    await handler.handle(conn, from_kafka(envelope(operation="op-2"), 1))

    asyncio.run(on_one_connection())
    assert done(domain18) == ["op-1"]
