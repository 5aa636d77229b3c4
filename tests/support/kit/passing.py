"""Tests of a user, all of which pass."""

import asyncio
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from fencepost.consumer import acts
from fencepost.consumer.inbox import AsyncInbox, Inbox
from fencepost.consumer.outcomes import Outcome
from fencepost.consumer.upkeep import Purge
from fencepost.jobs.publish import publish
from fencepost.operate.testing import (
    Crash,
    Database,
    MemoryBroker,
    age,
    assert_enqueued,
    assert_enqueued_async,
    assert_submitted,
    assert_submitted_async,
    crash,
    lose_jobs,
    run_jobs,
)
from fencepost.relay import outbox
from fencepost.relay.publisher import ParkReason, Route
from fencepost.schemas.errors import ConfigError, InvalidInput, StaleFence
from support.kit.app import (
    Accepted,
    Withdrawn,
    accept,
    broken,
    broken_async,
    handled,
    on_accepted,
    on_accepted_async,
    on_accepted_by_session,
    worker,
)


def test_two_tests_never_see_each_others_rows(fencepost_database: Database) -> None:
    accept(fencepost_database.dsn, 1)
    with fencepost_database.connect() as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.outbox").fetchone() == (1,)
        name = conn.execute("SELECT current_database()").fetchone()
    print(f"database={name}")


def test_two_tests_never_see_each_others_rows_again(fencepost_database: Database) -> None:
    test_two_tests_never_see_each_others_rows(fencepost_database)


def test_an_event_is_seen_inside_the_open_transaction_and_gone_after_its_rollback(fencepost_database: Database) -> None:
    event = Accepted(tenant="acme", operation="op-1", n=1, note="secret")
    with fencepost_database.connect() as conn:
        outbox.enqueue(conn, event)
        (found,) = assert_enqueued(conn, Accepted, tenant="acme", operation="op-1", n=1, note="secret")
        assert found == event
        assert_enqueued(conn, Accepted, times=0, n=2)
        assert_enqueued(conn, Withdrawn, times=0)
        conn.rollback()
        assert_enqueued(conn, Accepted, times=0)


def test_a_session_of_sqlalchemy_is_looked_into_alike(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    def connected() -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(fencepost_database.dsn)

    engine = create_engine("postgresql+psycopg://", creator=connected, poolclass=NullPool)
    with Session(engine) as session, session.begin():
        outbox.enqueue(session, Accepted(tenant="acme", operation="op-1", n=1))
        assert_enqueued(session, Accepted, n=1)
        assert_submitted(session, "kit.report", times=0)
    fencepost_broker.relay()
    with crash("before commit"):
        fencepost_broker.deliver(on_accepted_by_session, database=sessionmaker(engine))
    assert handled(fencepost_database.dsn, "session") == []
    (done,) = fencepost_broker.deliver(on_accepted_by_session, database=sessionmaker(engine))
    assert done.outcome is Outcome.HANDLED
    assert handled(fencepost_database.dsn, "session") == ["op-1"]


def test_the_async_forms_see_the_same(fencepost_database: Database) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(fencepost_database.dsn) as conn:
            await outbox.enqueue(conn, Accepted(tenant="acme", operation="op-1", n=1))
            await assert_enqueued_async(conn, Accepted, n=1)
            await assert_submitted_async(conn, "kit.report", times=0)

    asyncio.run(run())


def test_a_field_that_the_event_does_not_have_is_no_silent_success(fencepost_database: Database) -> None:
    with fencepost_database.connect() as conn:
        assert_enqueued(conn, Accepted, times=0, n=1)
        with pytest.raises(InvalidInput, match="m"):
            assert_enqueued(conn, Accepted, times=0, m=1)


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
def test_what_was_committed_is_relayed_once_and_handled_once(fencepost_database: Database, kind: str) -> None:
    broker = MemoryBroker(fencepost_database, "kafka" if kind == "kafka" else "rabbitmq")
    accept(fencepost_database.dsn, 1, 2)
    assert broker.relay().published == 2
    assert broker.relay().published == 0
    assert [done.outcome for done in broker.deliver(on_accepted)] == [Outcome.HANDLED, Outcome.HANDLED]
    assert broker.deliver(on_accepted) == []
    broker.redeliver(on_accepted)
    assert [done.outcome for done in broker.deliver(on_accepted, copies=2)] == [Outcome.DUPLICATE] * 4
    assert sorted(handled(fencepost_database.dsn, "sync")) == ["op-1", "op-2"]
    with fencepost_database.connect() as conn:
        assert_submitted(conn, "kit.report", times=2, tenant="acme")
        assert_submitted(conn, "kit.report", operation="op-2", n=2)
        assert_submitted(conn, "kit.report", times=0, operation="op-2", n=1)


def test_sync_and_async_consumers_each_read_all(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    assert len(fencepost_broker.deliver(on_accepted)) == 1
    assert len(fencepost_broker.deliver(on_accepted_async)) == 1
    fencepost_broker.redeliver(on_accepted_async)

    async def inside_a_loop() -> None:
        with pytest.raises(ConfigError, match="deliver_async"):
            fencepost_broker.deliver(on_accepted_async)
        (again,) = await fencepost_broker.deliver_async(on_accepted_async)
        assert again.outcome is Outcome.DUPLICATE

    asyncio.run(inside_a_loop())
    assert handled(fencepost_database.dsn, "async") == ["op-1"]


def test_only_messages_of_the_handlers_types_arrive_unless_topics_are_named(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    with fencepost_database.connect() as conn, conn.transaction():
        outbox.enqueue(conn, Withdrawn(tenant="acme", operation="op-1", reason="none"))
    fencepost_broker.relay([Route("kit.withdrawn", "withdrawn"), Route("*", "rest")])
    assert [m.operation for m in fencepost_broker.messages("withdrawn")] == ["op-1"]
    assert fencepost_broker.messages("rest") == []
    assert fencepost_broker.deliver(on_accepted) == []
    (done,) = fencepost_broker.deliver(on_accepted, topics=["withdrawn"])
    assert (done.outcome, done.reason) == (Outcome.UNDECODABLE, "unknown_type")


def test_a_nacked_event_is_sent_again_and_later_ones_of_its_key_wait_for_it(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1, 2, 3, key="k")
    fencepost_broker.nack(2)
    summary = fencepost_broker.relay()
    assert (summary.published, summary.resent > 0) == (3, True)
    assert [message.operation for message in fencepost_broker.messages()] == ["op-1", "op-2", "op-3"]


def test_a_lost_confirm_makes_a_copy_with_the_same_bytes_and_no_second_handling(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.lose_confirms()
    assert fencepost_broker.relay().published == 1
    first, second = fencepost_broker.messages()
    assert (first.headers(), first.body, first.event_id) == (second.headers(), second.body, second.event_id)
    assert [d.outcome for d in fencepost_broker.deliver(on_accepted)] == [Outcome.HANDLED, Outcome.DUPLICATE]
    assert handled(fencepost_database.dsn, "sync") == ["op-1"]


def test_a_refused_event_is_parked_and_tried_again_when_its_time_has_come(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.refuse(reason=ParkReason.NO_SUCH_TOPIC)
    assert fencepost_broker.relay().parked == 1
    assert fencepost_broker.messages() == []
    with fencepost_database.connect() as conn:
        assert conn.execute("SELECT reason FROM fencepost.parked").fetchall() == [("no_such_topic",)]
        assert age(conn, 3600, of="events") > 0
    assert fencepost_broker.relay().published == 1
    assert len(fencepost_broker.messages()) == 1


def test_shuffled_deliveries_keep_the_order_of_each_key(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1, 2, 3, 4, key="a")
    accept(fencepost_database.dsn, 5, 6, 7, 8, key="b")
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted, shuffle=3)
    seen = handled(fencepost_database.dsn, "sync")
    assert seen != [message.operation for message in fencepost_broker.messages()]
    assert [op for op in seen if op < "op-5"] == ["op-1", "op-2", "op-3", "op-4"]
    assert [op for op in seen if op >= "op-5"] == ["op-5", "op-6", "op-7", "op-8"]


def test_what_a_handler_raises_comes_out_and_its_message_stays(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 0, 1, 2, key="k")
    fencepost_broker.relay()
    with pytest.raises(ValueError, match="no"):
        fencepost_broker.deliver(broken)
    assert handled(fencepost_database.dsn, "broken") == ["op-0"]
    assert [message.operation for message in fencepost_broker.waiting(broken)] == ["op-1", "op-2"]


@pytest.mark.parametrize("handler", [broken, broken_async], ids=["sync", "async"])
def test_a_handler_that_fails_as_often_as_allowed_leaves_a_dead_letter_and_the_rest_goes_on(
    fencepost_database: Database, fencepost_broker: MemoryBroker, handler: Inbox[Accepted] | AsyncInbox[Accepted]
) -> None:
    accept(fencepost_database.dsn, 0, 1, 2, key="k")
    fencepost_broker.relay()
    done = fencepost_broker.deliver(handler, max_attempts=3)
    assert [d.outcome for d in done] == [Outcome.HANDLED, Outcome.HANDLER_FAILED, Outcome.HANDLED]
    assert fencepost_broker.waiting(handler) == []
    assert handled(fencepost_database.dsn, "broken") == ["op-0", "op-2"]
    with fencepost_database.connect() as conn:
        letters = conn.execute("SELECT operation, reason, attempts FROM fencepost.dead_letter").fetchall()
        assert letters == [("op-1", "handler_failed", 3)]
        assert age(conn, 60, of="dead letters") == 1


@pytest.mark.parametrize("point", ["counted", "before commit"])
def test_a_crash_before_the_commit_leaves_nothing_and_the_message_arrives_again(
    fencepost_database: Database, fencepost_broker: MemoryBroker, point: str
) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    with crash(point):
        fencepost_broker.deliver(on_accepted)
    assert handled(fencepost_database.dsn, "sync") == []
    assert [done.outcome for done in fencepost_broker.deliver(on_accepted)] == [Outcome.HANDLED]
    assert handled(fencepost_database.dsn, "sync") == ["op-1"]


def test_a_crash_after_the_commit_makes_a_duplicate(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1, 2)
    fencepost_broker.relay()
    with crash("after commit", nth=2):
        fencepost_broker.deliver(on_accepted)
    (again,) = fencepost_broker.deliver(on_accepted)
    assert (again.outcome, again.arrivals) == (Outcome.DUPLICATE, 2)
    assert sorted(handled(fencepost_database.dsn, "sync")) == ["op-1", "op-2"]


def test_async_handlers_crash_alike(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    with crash("before commit"):
        fencepost_broker.deliver(on_accepted_async)
    assert handled(fencepost_database.dsn, "async") == []
    with crash("after commit"):
        fencepost_broker.deliver(on_accepted_async)
    assert [done.outcome for done in fencepost_broker.deliver(on_accepted_async)] == [Outcome.DUPLICATE]


@pytest.mark.parametrize(("point", "copies"), [("before publish", 1), ("after publish", 2)])
def test_a_relay_that_crashes_loses_nothing_and_repeats_at_most_what_was_sent(
    fencepost_database: Database, fencepost_broker: MemoryBroker, point: str, copies: int
) -> None:
    accept(fencepost_database.dsn, 1)
    with crash(point):
        fencepost_broker.relay()
    fencepost_broker.relay()
    assert [message.operation for message in fencepost_broker.messages()] == ["op-1"] * copies
    fencepost_broker.deliver(on_accepted)
    assert handled(fencepost_database.dsn, "sync") == ["op-1"]


def test_a_crash_passes_every_except_exception(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    with crash("before commit"):
        try:
            fencepost_broker.deliver(on_accepted)
        except Exception:  # noqa: BLE001
            pytest.fail("a crash was caught")
    assert not issubclass(Crash, Exception)


def test_due_jobs_run_to_their_end_and_failed_ones_wait_until_they_are_aged(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1, 13)
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted)
    done, failed = run_jobs(worker, fencepost_database)
    assert (done.operation, done.state, done.attempts) == ("op-1", "done", 1)
    assert (failed.operation, failed.state, failed.reason, failed.detail) == (
        *("op-13", "queued"),
        *("handler_raised", "ValueError"),
    )
    with fencepost_database.connect() as conn:
        age(conn, timedelta(hours=1), of="jobs")
    (again,) = run_jobs(worker, fencepost_database)
    assert (again.operation, again.state, again.attempts) == ("op-13", "done", 2)
    with fencepost_database.connect() as conn:
        rows = conn.execute("SELECT operation, attempt FROM report ORDER BY 1").fetchall()
    assert rows == [("op-1", 1), ("op-13", 2)]
    assert run_jobs(worker, fencepost_database) == []


def test_a_lost_workers_lease_ends_by_ageing_and_only_its_successor_publishes(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted)
    with fencepost_database.connect() as conn:
        (stale,) = lose_jobs(conn, "kit.report")
    assert run_jobs(worker, fencepost_database) == []
    with fencepost_database.connect() as conn:
        age(conn, 3600, of="leases")
    (ran,) = run_jobs(worker, fencepost_database)
    assert (ran.state, ran.attempts) == ("done", 2)
    with pytest.raises(StaleFence):
        publish(fencepost_database.dsn, stale.fence, lambda tx: tx.execute("DELETE FROM report"))
    with fencepost_database.connect() as conn:
        assert conn.execute("SELECT attempt FROM report").fetchall() == [(2,)]


def test_messages_and_reservations_age_together(fencepost_database: Database, fencepost_broker: MemoryBroker) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted)
    with fencepost_database.connect() as conn:
        assert age(conn, 86400, of="reservations") == 1
        old = conn.execute("SELECT event_time < clock_timestamp() - interval '23 hours' FROM fencepost.reservation")
        assert old.fetchall() == [(True,)]
    fencepost_broker.age(86400)
    fencepost_broker.redeliver(on_accepted)
    assert [done.outcome for done in fencepost_broker.deliver(on_accepted)] == [Outcome.DUPLICATE]


def test_what_aged_beyond_the_replay_window_is_purged_and_never_handled_again(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    accept(fencepost_database.dsn, 1)
    fencepost_broker.relay()
    fencepost_broker.deliver(on_accepted)
    with fencepost_database.connect(autocommit=True) as conn:
        acts.set_retention(conn, "sync", timedelta(days=7), actor="ann", reason="a test")
        assert Purge("sync").turn(conn).reservations == 0
        age(conn, timedelta(days=8), of="reservations")
        assert Purge("sync").turn(conn).reservations == 1
    fencepost_broker.age(timedelta(days=8))
    fencepost_broker.redeliver(on_accepted)
    assert [done.outcome for done in fencepost_broker.deliver(on_accepted)] == [Outcome.BEFORE_HORIZON]
    assert handled(fencepost_database.dsn, "sync") == ["op-1"]
