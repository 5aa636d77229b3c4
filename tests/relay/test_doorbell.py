"""The doorbell: no event waits for the poll though the relay sleeps, and nobody is rung who does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.relay import doorbell
from fencepost.relay.doorbell import DOZE, RUNG, Doorbell
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.sidecar import Relay
from support.database import Database
from support.memory_broker import MemoryBroker
from support.processes import Child, wait_for
from support.proxy import Proxy
from support.relays import accept, accepted, destination, expire, owner_of, registered, until

# An event that is not rung for would be found after a minute.
SLOW = Pace(lease=150, refresh=60, confirm=2, poll_min=0.002, poll_max=60, drain=2)
SOON = 30.0
MARK: LiteralString = """
SELECT last_value FROM fencepost.doorbell WHERE last_value > extract(epoch FROM clock_timestamp()) * 1000000"""
WAITING: LiteralString = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%doze%%'"""
SHARED: LiteralString = """
SELECT count(DISTINCT s.owner), count(s.owner)
FROM fencepost.slot AS s JOIN fencepost.relay AS r USING (destination, owner)"""
GATE: LiteralString = "SELECT pg_advisory_lock(1179665234, 1)"
OPEN: LiteralString = "SELECT pg_advisory_unlock(1179665234, 1)"


@contextlib.contextmanager
def sleeping(database: Database, *brokers: MemoryBroker) -> Generator[None]:
    """One relay with a doorbell for each broker."""
    stop = threading.Event()
    bells = [Doorbell(database.dsn, answer=5) for _ in brokers]
    loops = [
        DestinationLoop(database.dsn, destination(broker), pace=SLOW, stop=stop, bell=bell)
        for broker, bell in zip(brokers, bells, strict=True)
    ]
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for bell in bells:
        bell.start()
    wait_for(lambda: all(bell.listening for bell in bells), SOON, "the doorbells to listen")
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for bell in bells:
            bell.stop()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def marked(conn: Connection[Any]) -> int:
    """Waits until a relay has marked itself asleep."""
    found = wait_for(lambda: conn.execute(MARK).fetchone(), SOON, "a relay to fall asleep")
    conn.rollback()
    return int(found[0])


def arrive(expected: int, *brokers: MemoryBroker) -> None:
    wait_for(lambda: sum(len(broker.arrived) for broker in brokers) >= expected, SOON, f"{expected} events")


@contextlib.contextmanager
def listener(database: Database) -> Generator[Connection[Any]]:
    with database.connect(autocommit=True) as conn:
        conn.execute("LISTEN fencepost")
        yield conn


def heard(conn: Connection[Any]) -> int:
    """How many rings arrived; a round trip to the server brings all that was sent before."""
    conn.execute("SELECT 1")
    return sum(1 for _ in conn.notifies(timeout=0))


def test_sleeping_relay_is_woken_by_a_commit(database18: Database) -> None:
    broker = MemoryBroker()
    with database18.connect() as conn, sleeping(database18, broker):
        for number in range(1, 4):
            marked(conn)
            accepted(database18, f"op-{number}")
            arrive(number, broker)


def test_event_committed_between_the_look_and_the_mark_is_found_by_the_second_look(database18: Database) -> None:
    broker = MemoryBroker()
    with database18.connect(autocommit=True) as gate, listener(database18) as ears:
        gate.execute(GATE)
        with sleeping(database18, broker):
            wait_for(lambda: gate.execute(WAITING).fetchone(), 10, "the relay to be about to mark")
            accepted(database18, "op-1")
            assert heard(ears) == 0  # nobody rang: only the second look can find it
            gate.execute(OPEN)
            arrive(1, broker)


def test_writer_that_looked_before_the_mark_and_commits_after_it_is_not_slept_over(database18: Database) -> None:
    broker = MemoryBroker()
    with database18.connect() as early, database18.connect() as conn, listener(database18) as ears:
        accept(early, "op-1")
        with sleeping(database18, broker):
            marked(conn)
            early.commit()
            assert heard(ears) == 0
            arrive(1, broker)


def test_writer_with_an_old_snapshot_sees_the_mark(database18: Database) -> None:
    broker = MemoryBroker()
    with database18.connect() as old, database18.connect() as conn:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT count(*) FROM fencepost.tick")
        with sleeping(database18, broker):
            marked(conn)
            accept(old, "op-1")
            old.commit()
            arrive(1, broker)


def test_two_relays_are_both_woken_and_a_ring_for_one_does_not_silence_the_other(database18: Database) -> None:
    brokers = MemoryBroker(), MemoryBroker()
    registered(database18)
    third = owner_of(database18, seconds=150)
    with database18.connect(autocommit=True) as conn, contextlib.ExitStack() as relays:
        # Both look for slots once a minute only: half of them are free for the first one, and half for the second.
        third.refresh(conn)
        third.release(conn, list(third.held)[::2])
        relays.enter_context(sleeping(database18, brokers[0]))
        until(conn, "SELECT count(*) = 16 AND count(DISTINCT owner) = 2 FROM fencepost.slot WHERE owner IS NOT NULL")
        expire(conn, third)
        relays.enter_context(sleeping(database18, brokers[1]))
        wait_for(lambda: conn.execute(SHARED).fetchone() == (2, 16), SOON, "both to own slots")
        for number in range(1, 5):
            marked(conn)
            for key in range(24):
                accepted(database18, f"op-{number}-{key}", key=f"key-{key}")
            arrive(24 * number, *brokers)
    assert brokers[0].arrived and brokers[1].arrived


def test_sleeping_sidecar_publishes_when_rung_and_leaves_at_once_when_stopped(database18: Database) -> None:
    broker = MemoryBroker()
    # Without being woken it would neither end by itself nor be left behind so soon.
    relay = Relay(database18.dsn, [destination(broker)], pace=replace(SLOW, drain=60), doorbell=True)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        with database18.connect() as conn:
            marked(conn)
            accepted(database18, "op-1")
            arrive(1, broker)
            marked(conn)
    finally:
        relay.stop()
        thread.join(SOON)
    assert not thread.is_alive()


END_LISTENER: LiteralString = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
AND (query LIKE 'LISTEN%' OR query LIKE '%fencepost.rung(%' OR query = 'SELECT')"""
HEARING: LiteralString = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
AND (query LIKE 'LISTEN%' OR query LIKE '%fencepost.rung(%' OR query = 'SELECT')"""


def test_a_listener_that_was_ended_listens_again_and_looks_for_what_came_in_between(database18: Database) -> None:
    broker = MemoryBroker()
    with database18.connect(autocommit=True) as conn, sleeping(database18, broker):
        marked(conn)
        accepted(database18, "op-1")
        arrive(1, broker)  # the control
        assert conn.execute(END_LISTENER).fetchone() == (1,)
        accepted(database18, "op-2")
        arrive(2, broker)
        wait_for(lambda: conn.execute(HEARING).fetchone(), SOON, "the doorbell to listen again")
        marked(conn)
        accepted(database18, "op-3")
        arrive(3, broker)


def test_a_listener_whose_connection_died_without_a_sign_is_noticed_and_events_wait_for_the_poll_at_most(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "ASK_SECONDS", 0.3)
    broker = MemoryBroker()
    stop = threading.Event()
    with Proxy(int(str(conninfo_to_dict(database18.dsn)["port"]))) as proxy, database18.connect() as conn:
        bell = Doorbell(make_conninfo(database18.dsn, port=proxy.port), answer=1)
        bell.start()
        wait_for(lambda: bell.listening, SOON, "the doorbell to listen")
        loop = DestinationLoop(
            database18.dsn, destination(broker), pace=replace(SLOW, poll_max=3), stop=stop, bell=bell
        )
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            marked(conn)
            accepted(database18, "op-1")
            arrive(1, broker)  # the control
            marked(conn)
            proxy.blackhole()
            accepted(database18, "op-2")
            arrive(2, broker)
            wait_for(lambda: not bell.listening, SOON, "the silence to be noticed")
            proxy.heal()
            wait_for(lambda: bell.listening, SOON, "the doorbell to listen again")
            marked(conn)
            accepted(database18, "op-3")
            arrive(3, broker)
        finally:
            stop.set()
            bell.stop()
            thread.join(20)
    assert not thread.is_alive()


def test_ring_clears_the_mark_it_was_for_and_no_later_one(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute(DOZE, {"seconds": 60})
        first = marked(conn)
        conn.execute(DOZE, {"seconds": 30})
        second = marked(conn)
        assert second > first
        conn.execute(RUNG, {"mark": first})
        assert marked(conn) == second
        conn.execute(RUNG, {"mark": second})
        assert conn.execute(MARK).fetchone() is None


def test_nobody_is_notified_without_a_sleeper_and_one_commit_notifies_with_one(database18: Database) -> None:
    with listener(database18) as ears:
        accepted(database18, "op-1", "op-2")
        assert heard(ears) == 0
        ears.execute(DOZE, {"seconds": 60})
        accepted(database18, "op-3")  # the control: these ears do hear
        assert heard(ears) == 1
        accepted(database18, "op-3")  # accepted before: nothing new is there
        assert heard(ears) == 0
        with database18.connect() as conn:
            accept(conn, "op-4")
            conn.rollback()
        assert heard(ears) == 0


CHILD = """
import sys, threading
from fencepost.relay.doorbell import Doorbell
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.sidecar import Relay
from support.memory_broker import MemoryBroker
from support.relays import destination
bell = Doorbell(sys.argv[1], answer=5)
bell.start()
pace = Pace(lease=30, refresh=5, confirm=2, poll_min=0.002, poll_max=5)
DestinationLoop(sys.argv[1], destination(MemoryBroker()), pace=pace, stop=threading.Event(), bell=bell).run()
"""


@pytest.mark.timeout(60)
def test_relay_killed_in_its_sleep_is_soon_not_rung_any_more(database18: Database, tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    start = f"import sys; sys.path[:0] = [{tests!r}, {str(Path(tests).parent / 'compose')!r}]\n"
    with listener(database18) as ears, database18.connect(autocommit=True) as conn:
        with Child.script(start + CHILD, folder=tmp_path, arguments=[database18.dsn]) as child:
            marked(conn)
            child.kill()
        marked(conn)
        accepted(database18, "op-1")
        assert heard(ears) == 1  # the control: the dead one is still rung
        wait_for(lambda: conn.execute(MARK).fetchone() is None, 20, "the mark to end")
        accepted(database18, "op-2")
        assert heard(ears) == 0
