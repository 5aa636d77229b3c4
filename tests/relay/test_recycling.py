"""Partitions are used again only when nothing needs what is in them, and whoever writes meanwhile loses nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.relay import outbox
from fencepost.relay.destination import NoRoute
from fencepost.relay.pages import PageReader, Progress, newest_tick
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, ParkReason
from fencepost.relay.recycling import Recycler, Step, recycle_outbox
from fencepost.relay.sidecar import Relay
from fencepost.schemas import grants, migrate
from fencepost.schemas.errors import InvalidInput, StaleSlot, WrongTransaction
from support.database import Database
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import (
    BRISK,
    Changed,
    accept,
    accepted,
    arrived,
    destination,
    loop,
    registered,
    relay_once,
    relaying,
    until,
    value,
)

PROMPT = replace(BRISK, record=0.0)
RETENTION: LiteralString = "SELECT fencepost.set_retention(%(retention)s, %(window)s, 'ops', 'a test')"
EVENTS: LiteralString = "SELECT count(*) FROM fencepost.outbox"
CURRENT: LiteralString = "SELECT outbox_child FROM fencepost.installation"
CHILD_OF: LiteralString = "SELECT child FROM fencepost.outbox WHERE operation = %(operation)s"
PATIENT: LiteralString = "SELECT outcome, child, detail FROM fencepost.recycle_outbox('0', '20 s')"
RECYCLE_ACKS: LiteralString = "SELECT outcome FROM fencepost.recycle_acks(0)"
WAITS: LiteralString = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %(pid)s"
KEYS: LiteralString = "SELECT operation FROM fencepost.event_key ORDER BY operation"
PURGE_KEYS: LiteralString = "SELECT purged FROM fencepost.purge_event_keys('-infinity', %(batch)s)"
PURGE_TICKS: LiteralString = "SELECT purged, after FROM fencepost.purge_ticks(%(after)s, %(batch)s)"
REGISTER: LiteralString = """
SELECT fencepost.register_destination(%(name)s, 'kafka', '[{"match": "*", "to": "x", "routing_key": "{type}"}]')"""


def keep(database: Database, retention: str = "0", window: str = "7 days") -> None:
    with database.connect() as conn:
        conn.execute(RETENTION, {"retention": retention, "window": window})


def step(conn: psycopg.Connection[Any]) -> Step:
    """One step, whatever the age of the current partition."""
    return recycle_outbox(conn, min_age=0)


def settle(database: Database, broker: MemoryBroker) -> None:
    """Everything committed is acked by every destination there is."""
    relay_once(database, destination(broker))
    loop(database, NoRoute(), pace=PROMPT).run(once=True)


def child_of(conn: psycopg.Connection[Any], operation: str) -> int:
    row = conn.execute(CHILD_OF, {"operation": operation}).fetchone()
    assert row is not None
    return int(row[0])


def test_a_partition_is_recycled_after_its_retention_and_every_destinations_ack_and_not_before(
    database: Database,
) -> None:
    broker, other = MemoryBroker(), MemoryBroker()
    registered(database)
    registered(database, "other")
    with database.connect(autocommit=True) as conn:
        accepted(database, "a", "b")
        assert step(conn) == Step("opened", 1, "")
        relay_once(database, destination(broker))
        assert step(conn) == Step("kept", 0, "its retention is not over")
        keep(database)
        assert "destination - has not acked it" in step(conn).detail
        loop(database, NoRoute(), pace=PROMPT).run(once=True)
        assert step(conn) == Step("kept", 0, "destination other has not acked it")
        relay_once(database, destination(other, "other"))
        assert step(conn) == Step("recycled", 0, "")
        assert value(conn, EVENTS) == 0
        assert step(conn) == Step("idle", None, "")
        assert (sorted(broker.operations()), sorted(other.operations())) == (["a", "b"], ["a", "b"])


def test_partitions_go_round_while_events_flow(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with database.connect(autocommit=True) as conn:
        for n in range(5):
            accepted(database, f"op-{n}")
            settle(database, broker)
            assert step(conn) == Step("opened", (n + 1) % 3, "")
            assert step(conn) == Step("recycled", n % 3, "")
        assert broker.operations() == [f"op-{n}" for n in range(5)]


def test_a_young_partition_stays_the_current_one(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with database.connect(autocommit=True) as conn:
        accepted(database, "a")
        settle(database, broker)
        assert step(conn).outcome == "opened"
        accepted(database, "b")
        settle(database, broker)
        assert recycle_outbox(conn).outcome == "recycled"
        assert recycle_outbox(conn) == Step("idle", None, "")
        assert step(conn).outcome == "opened"


def test_nothing_is_recycled_before_there_is_a_destination(database: Database) -> None:
    keep(database)
    with database.connect(autocommit=True) as conn:
        accepted(database, "a")
        assert step(conn).outcome == "opened"
        assert step(conn) == Step("kept", 0, "no destination is registered yet")
        broker = MemoryBroker()
        settle(database, broker)
        assert step(conn).outcome == "recycled"
        assert broker.operations() == ["a"]


def test_the_row_of_a_writer_that_commits_while_recycling_waits_for_it_is_kept(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with (
        database.connect() as writer,
        database.connect(autocommit=True) as conn,
        database.connect(autocommit=True) as recycler,
    ):
        accepted(database, "a")
        settle(database, broker)
        accept(writer, "late")
        assert step(conn).outcome == "opened"
        # To a look without the lock, everything in this partition is acked.
        assert value(conn, "SELECT fencepost._needed(0::smallint) IS NULL") is True
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(recycler.execute(PATIENT).fetchone()))
        thread.start()
        pid = recycler.info.backend_pid
        wait_for(
            lambda: conn.execute(WAITS, {"pid": pid}).fetchone() == (True,), 10, "recycling to wait for the writer"
        )
        writer.commit()
        thread.join(20)
        assert found == [("kept", 0, "destination - has not acked it")]
        settle(database, broker)
        assert broker.operations() == ["a", "late"]
        assert step(conn) == Step("recycled", 0, "")


def test_an_open_writer_is_not_waited_for_and_is_named(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with database.connect() as writer, database.connect(autocommit=True) as conn:
        accepted(database, "a")
        settle(database, broker)
        accept(writer, "late")
        assert step(conn).outcome == "opened"
        assert step(conn) == Step("locked", 0, f"held by session {writer.info.backend_pid}")
        assert value(conn, "SHOW lock_timeout") == "0"
        # The new partition takes events meanwhile.
        accepted(database, "b")
        assert child_of(conn, "b") == 1
        writer.rollback()
        assert step(conn).outcome == "recycled"


def test_an_event_is_accepted_while_another_partition_is_locked_for_recycling(database: Database) -> None:
    with database.connect() as recycler, database.connect() as writer, database.connect(autocommit=True) as conn:
        accepted(database, "a")
        assert step(conn) == Step("opened", 1, "")
        recycler.execute("LOCK TABLE fencepost.outbox_0 IN ACCESS EXCLUSIVE MODE")
        writer.execute("SET LOCAL lock_timeout = '1s'")
        accept(writer, "b")
        writer.commit()
        recycler.rollback()
        assert child_of(conn, "b") == 1


def test_a_prepared_transaction_that_holds_the_partition_is_named(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with database.connect() as writer, database.connect(autocommit=True) as conn:
        accepted(database, "a")
        settle(database, broker)
        writer.tpc_begin(writer.xid(1, f"recycling-{database.state.name}", "b"))
        accept(writer, "prepared")
        writer.tpc_prepare()
        try:
            assert step(conn).outcome == "opened"
            gid = value(conn, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
            assert step(conn) == Step("locked", 0, f"held by prepared transaction {gid}")
        finally:
            writer.tpc_commit()
        assert step(conn).outcome == "kept"
        settle(database, broker)
        assert step(conn).outcome == "recycled"
        assert broker.operations() == ["a", "prepared"]


def test_the_partition_is_chosen_by_number_and_not_by_the_time_a_transaction_began(database: Database) -> None:
    with database.connect() as early, database.connect(autocommit=True) as conn:
        assert value(early, "SELECT now() IS NOT NULL") is True
        accepted(database, "a")
        assert step(conn) == Step("opened", 1, "")
        accept(early, "b")
        early.commit()
        assert (child_of(conn, "a"), child_of(conn, "b")) == (0, 1)


def test_an_event_written_under_an_old_snapshot_into_a_recycled_partition_is_published(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    with database.connect() as old, database.connect(autocommit=True) as conn:
        accepted(database, "a")
        settle(database, broker)
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        assert value(old, CURRENT) == 0
        assert [step(conn).outcome, step(conn).outcome] == ["opened", "recycled"]
        accept(old, "late")
        old.commit()
        assert child_of(conn, "late") == 0
        assert step(conn) == Step("kept", 0, "destination - has not acked it")
        # Its retention counts from when it was recorded, not from when the partition was closed.
        keep(database, "1 hour")
        assert step(conn) == Step("kept", 0, "its retention is not over")
        keep(database)
        settle(database, broker)
        assert broker.operations() == ["a", "late"]
        assert step(conn) == Step("recycled", 0, "")


def test_recycling_outside_read_committed_is_refused(database: Database) -> None:
    with database.connect() as conn:
        assert step(conn).outcome == "idle"  # the allowed control
        conn.rollback()
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(WrongTransaction):
            step(conn)


def test_a_parked_event_is_recycled_and_can_still_be_retried(database: Database) -> None:
    keep(database)
    failing = threading.Event()
    failing.set()

    def verdict(row: OutboxRow) -> Outcome:
        return Outcome(Answer.REFUSED, ParkReason.UNROUTABLE) if failing.is_set() else CONFIRMED

    broker = MemoryBroker(verdict)
    accepted(database, "a", "b", key="k")
    settle(database, broker)
    with database.connect(autocommit=True) as conn:
        assert [step(conn).outcome, step(conn).outcome] == ["opened", "recycled"]
        assert (value(conn, EVENTS), value(conn, "SELECT count(*) FROM fencepost.parked")) == (0, 2)
        failing.clear()
        with relaying(database, destination(broker)):
            until(conn, "SELECT count(*) = 0 FROM fencepost.parked")
    assert broker.operations() == ["a", "b"]


def test_acks_are_recycled_under_a_working_relay_and_the_newest_of_each_slot_stays(database: Database) -> None:
    broker = MemoryBroker()
    newest = "SELECT array_agg(p ORDER BY p.destination, p.slot) FROM fencepost._progress() AS p"
    with database.connect(autocommit=True) as conn:
        accepted(database, *[f"op-{n}" for n in range(40)])
        settle(database, broker)
        before = value(conn, newest)
        for ack_child in (1, 0, 1):
            assert value(conn, RECYCLE_ACKS) == "recycled"
            assert value(conn, newest) == before
            assert value(conn, "SELECT ack_child FROM fencepost.installation") == ack_child
            assert value(conn, "SELECT count(*) = count(DISTINCT (destination, slot)) FROM fencepost.ack") is True
        with relaying(database, destination(broker)):
            for n in range(40, 80):
                accepted(database, f"op-{n}")
                assert value(conn, RECYCLE_ACKS) in ("recycled", "locked")
            arrived(broker.operations, 80)
    assert sorted(broker.operations()) == sorted(f"op-{n}" for n in range(80))


def test_acks_of_a_session_that_is_still_open_are_not_lost(database: Database) -> None:
    broker = MemoryBroker()
    with database.connect() as reader, database.connect(autocommit=True) as conn:
        accepted(database, "a")
        settle(database, broker)
        reader.execute("SELECT FROM fencepost.slot FOR NO KEY UPDATE")
        assert conn.execute("SELECT outcome, detail FROM fencepost.recycle_acks(0)").fetchone() == (
            "locked",
            f"held by session {reader.info.backend_pid}",
        )
        reader.rollback()
        assert value(conn, RECYCLE_ACKS) == "recycled"


def test_ticks_that_no_slot_needs_are_purged_in_batches_and_a_page_between_purged_ticks_is_refused(
    database: Database,
) -> None:
    broker = MemoryBroker()
    with database.connect(autocommit=True) as conn:
        registered(database, "slow")
        for n in range(6):
            accepted(database, f"op-{n}")
            newest_tick(conn, 0)
        assert conn.execute(PURGE_TICKS, {"after": -1, "batch": 10}).fetchone() == (0, -1)
        relay_once(database, destination(MemoryBroker(), "slow"))
        relay_once(database, destination(broker))
        loop(database, NoRoute(), pace=PROMPT).run(once=True)
        stale = PageReader(conn, 1)
        # Slots without rows were noted only: they are recorded by a relay that has time.
        for name in ("slow", "memory"):
            accepted(database, f"more-{name}")
            loop(database, destination(broker, name), pace=PROMPT).run(once=True)
        needed = value(conn, "SELECT min(acked_tick) FROM fencepost._progress()")
        assert needed >= 6
        assert conn.execute(PURGE_TICKS, {"after": -1, "batch": 4}).fetchone() == (4, 3)
        purged = conn.execute(PURGE_TICKS, {"after": 3, "batch": 100}).fetchone()
        assert purged == (needed - 4, needed - 1)
        assert value(conn, "SELECT min(n) FROM fencepost.tick") == needed
        with pytest.raises(StaleSlot):
            stale.read({0: (1, Progress(0, needed, 0))})
        accepted(database, "after")
        relay_once(database, destination(broker))
        assert broker.operations()[-1] == "after"


def test_identities_are_forgotten_after_the_replay_window_unless_the_event_is_still_there(database: Database) -> None:
    keep(database)
    broker = MemoryBroker(
        lambda row: Outcome(Answer.REFUSED, ParkReason.TOO_LARGE) if row.operation == "parked" else CONFIRMED
    )
    with database.connect(autocommit=True) as conn:
        accepted(database, "a", "b", "c", "parked")
        settle(database, broker)
        conn.execute("UPDATE fencepost.event_key SET recorded_at = recorded_at - interval '8 days'")
        accepted(database, "young")
        assert conn.execute(PURGE_KEYS, {"batch": 10}).fetchone() == (0,), "the events are in the outbox"
        settle(database, broker)
        assert [step(conn).outcome, step(conn).outcome] == ["opened", "recycled"]
        keep(database, window="9 days")
        assert conn.execute(PURGE_KEYS, {"batch": 10}).fetchone() == (0,)
        with database.connect() as again:
            assert not outbox.enqueue(again, Changed(tenant="acme", operation="a")).created
        keep(database)
        assert conn.execute(PURGE_KEYS, {"batch": 2}).fetchone() == (2,)
        assert conn.execute(PURGE_KEYS, {"batch": 10}).fetchone() == (1,)
        assert conn.execute(KEYS).fetchall() == [("parked",), ("young",)]


def test_a_replay_window_shorter_than_the_retention_is_refused_and_decisions_are_kept(database: Database) -> None:
    keep(database, "1 day", "2 days")
    with pytest.raises(InvalidInput) as refused:
        keep(database, "3 days", "2 days")
    assert refused.value.field == "replay_window"
    with database.connect() as conn:
        assert value(conn, "SELECT actor || ': ' || verdict FROM fencepost.decision") == "ops: 1 day, 2 days"


def test_relay_work_updates_and_deletes_no_event_and_no_ack(database: Database) -> None:
    broker = MemoryBroker()
    accepted(database, *[f"op-{n}" for n in range(50)])
    with relaying(database, destination(broker)):
        accepted(database, *[f"op-{n}" for n in range(50, 100)])
        arrived(broker.operations, 100)
    with database.connect(autocommit=True) as conn:
        changes = "SELECT sum(n_tup_upd + n_tup_del) FROM pg_stat_user_tables WHERE relname ~ '^(outbox|ack)_[0-9]$'"
        until(conn, "SELECT sum(n_tup_ins) >= 100 FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'")
        until(conn, "SELECT sum(n_tup_ins) > 0 FROM pg_stat_user_tables WHERE relname ~ '^ack_[0-9]$'")
        assert value(conn, changes) == 0
        assert value(conn, "SELECT count(*) FROM fencepost.outbox WHERE xmax <> 0") == 0


def test_only_a_login_with_the_role_maintenance_recycles(
    empty_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    install = "recycling"
    migrate.apply(empty_database.dsn, state=empty_database.state, single_role=False, install=install)
    keep(empty_database)
    broker = MemoryBroker()
    accepted(empty_database, "a")
    settle(empty_database, broker)
    roles = [grants.role(install, name) for name in ("owner", *grants.ROLES)]
    with empty_database.connect(autocommit=True) as conn:
        try:
            for name in ("relay", "maintenance"):
                dsn = make_conninfo(empty_database.dsn, options=f"-c role={grants.role(install, name)}")
                recycler = Recycler(dsn, seconds=0.02, min_age=0.0)
                with caplog.at_level("INFO", "fencepost.relay.recycling"):
                    recycler.start()
                    try:
                        if name == "relay":
                            wait_for(lambda: "may not recycle" in caplog.text, 10, "the recycler to say so")
                            assert value(conn, EVENTS) == 1
                        else:
                            until(conn, "SELECT count(*) = 0 FROM fencepost.outbox")
                    finally:
                        recycler.stop()
        finally:
            conn.execute("DROP SCHEMA fencepost CASCADE")
            for role in map(sql.Identifier, roles):
                conn.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(role))
                conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
            for role in map(sql.Identifier, roles):
                conn.execute(sql.SQL("DROP ROLE {}").format(role))


@contextmanager
def whole_relay(database: Database, broker: MemoryBroker) -> Generator[Relay]:
    """A relay with everything that `relay run` has, recycling without rest."""
    pace = replace(PROMPT, recycle=0.1, batch=64)
    relay = Relay(database.dsn, [destination(broker)], pace=pace)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.timeout(240)
def test_nothing_is_lost_while_partitions_go_round_under_concurrent_writers(database: Database) -> None:
    keep(database)
    broker = MemoryBroker()
    committed: list[list[str]] = [[], [], []]
    failures: list[BaseException] = []
    over = threading.Event()
    levels = (psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.REPEATABLE_READ, None)

    def write(number: int) -> None:
        chance = random.Random(number)
        try:
            with database.connect() as conn:
                conn.isolation_level = levels[number]
                for n in range(250):
                    names = [f"w{number}-{n}-{m}" for m in range(chance.randint(1, 3))]
                    accept(conn, *names, key=f"w{number}-k{n % 7}")
                    over.wait(chance.random() * 0.02)
                    if chance.random() < 0.1:
                        conn.rollback()
                    else:
                        conn.commit()
                        committed[number] += names
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    def recycle() -> None:
        # Besides the recycler of the relay, which holds the duty: two at once must do no harm.
        after = -1
        try:
            with database.connect(autocommit=True) as conn:
                while not over.wait(0.05):
                    step(conn)
                    conn.execute(RECYCLE_ACKS)
                    row = conn.execute(PURGE_TICKS, {"after": after, "batch": 50}).fetchone()
                    assert row is not None
                    after = row[1]
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    with whole_relay(database, broker), database.connect(autocommit=True) as conn:
        recycling = threading.Thread(target=recycle, daemon=True)
        writers = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(3)]
        for thread in (*writers, recycling):
            thread.start()
        try:
            for thread in writers:
                thread.join(60)
            everything = {name for names in committed for name in names}
            wait_for(lambda: failures or set(broker.operations()) >= everything, 60, "every committed event")
            few = "SELECT count(*) < 200 FROM fencepost.outbox"
            wait_for(lambda: failures or value(conn, few), 60, "the partitions to be recycled")
        finally:
            over.set()
            recycling.join(20)
        assert not failures, failures
        assert value(conn, "SELECT seq > 0 FROM fencepost.recycled") is True
        until(conn, "SELECT count(*) < 500 FROM fencepost.tick")
    assert set(broker.operations()) == everything
    for names in committed:
        lanes: dict[str, list[str]] = {}
        for row in broker.arrived:
            if row.operation in names and row.operation not in lanes.setdefault(row.ordering_key, []):
                lanes[row.ordering_key].append(row.operation)
        for seen in lanes.values():
            assert seen == [name for name in names if name in set(seen)]
