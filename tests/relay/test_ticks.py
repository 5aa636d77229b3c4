"""A tick is taken when something became visible, and only then; whoever commits late is found by the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, LiteralString

import psycopg
import pytest

from fencepost.relay.pages import PageReader, Progress, newest_tick
from fencepost.schemas.errors import WrongTransaction
from support.database import Database, Databases
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import accept, accepted, arrived, destination, relay_once, relaying, value

TICKS: LiteralString = "SELECT count(*) FROM fencepost.tick"
TICK: LiteralString = "SELECT n, fresh FROM fencepost.tick()"
SLOW_TICK: LiteralString = """
INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
SELECT 1, max(n) + 1, %(snap)s::pg_snapshot, (SELECT last_value FROM fencepost.outbox_seq), pg_current_xact_id(),
       pg_snapshot_xmax(%(snap)s::pg_snapshot), ARRAY(SELECT pg_snapshot_xip(%(snap)s::pg_snapshot))
FROM fencepost.tick"""


def slow_tick(database: Database, between: Callable[[], None]) -> None:
    """A tick whose ticker is held up between its snapshot and its look at the sequence."""
    with database.connect() as conn:
        snap = value(conn, "SELECT pg_current_snapshot()::text")
        between()
        conn.execute(SLOW_TICK, {"snap": snap})


def on_page(conn: psycopg.Connection[Any], start: int, end: int) -> list[str]:
    """The operations of all slots between two ticks, late ones only where there are any."""
    parts = PageReader(conn, 1).read({slot: (1, Progress(start, end, 0)) for slot in range(16)})
    return [row.operation for part in parts for row in part.rows]


def test_an_event_makes_one_tick_and_an_idle_tick_takes_none_and_no_transaction_id(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        accepted(database, "a")
        assert conn.execute(TICK).fetchone() == (1, True)
        with conn.transaction():
            assert conn.execute(TICK).fetchone() == (1, False)
            assert value(conn, "SELECT pg_current_xact_id_if_assigned() IS NULL") is True
        assert value(conn, TICKS) == 2


def test_a_tick_waits_for_its_interval(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        accepted(database, "a")
        newest_tick(conn, 0)
        accepted(database, "b")
        assert newest_tick(conn, 60) == (1, 1)
        assert newest_tick(conn, 0) == (1, 2)


def test_a_rolled_back_number_costs_one_tick_and_no_more(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as writer:
        accept(writer, "a")
        writer.rollback()
        assert conn.execute(TICK).fetchone() == (1, True)
        assert conn.execute(TICK).fetchone() == (1, False)


def test_a_tick_outside_read_committed_is_refused(database: Database) -> None:
    accepted(database, "a")
    with database.connect() as conn:
        assert conn.execute(TICK).fetchone() == (1, True)
        conn.rollback()
        for level in (psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE):
            conn.isolation_level = level
            with pytest.raises(WrongTransaction) as refused:
                conn.execute(TICK)
            assert refused.value.field == "isolation"
            conn.rollback()
        assert value(conn, TICKS) == 1


def test_a_late_commit_alone_makes_a_tick_once(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as late:
        accept(late, "late")
        accepted(database, "b")
        assert conn.execute(TICK).fetchone() == (1, True)
        assert conn.execute(TICK).fetchone() == (1, False)
        late.commit()
        assert conn.execute(TICK).fetchone() == (2, True)
        assert conn.execute(TICK).fetchone() == (2, False)


def test_a_commit_whose_number_was_drawn_while_the_ticker_was_held_up_makes_a_tick_and_is_on_its_page(
    database: Database,
) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as late:
        accepted(database, "a")
        assert newest_tick(conn, 0) == (1, 1)
        slow_tick(database, lambda: accept(late, "late"))
        # Its number is below the hint, and its transaction is not among those that the snapshot saw open.
        writer = value(late, "SELECT pg_current_xact_id()::text")
        seen = "SELECT %(xid)s::xid8 = ANY (snap_xip), hint FROM fencepost.tick WHERE n = 2"
        assert conn.execute(seen, {"xid": writer}).fetchone() == (False, 2)
        assert on_page(conn, 0, 1) == ["a"]
        assert on_page(conn, 1, 2) == []
        assert newest_tick(conn, 0) == (1, 2)
        late.commit()
        assert newest_tick(conn, 0) == (1, 3)
        assert on_page(conn, 2, 3) == ["late"]


def test_the_ticker_locks_before_it_looks(database: Database) -> None:
    with (
        database.connect(autocommit=True) as first,
        database.connect() as second,
        database.connect(autocommit=True) as look,
    ):
        accepted(database, "a")
        second.execute("LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE")
        waiting = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        pid = first.info.backend_pid
        found: list[Any] = []

        def tick() -> None:
            found.append(first.execute(TICK).fetchone())

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        wait_for(lambda: look.execute(waiting, (pid,)).fetchone() == (True,), 10, "the ticker to wait for the lock")
        # Committed while the ticker waits: its snapshot must see it, since it is taken after the lock.
        accepted(database, "b")
        second.commit()
        thread.join(10)
        assert found == [(1, True)]
        seen = "SELECT bool_and(pg_visible_in_snapshot(o.xid, t.snap)) FROM fencepost.outbox AS o, fencepost.tick AS t WHERE t.n = 1"
        assert value(look, seen) is True


def test_an_event_that_commits_late_arrives_without_stall_gap_or_copy(database: Database) -> None:
    broker = MemoryBroker()
    with database.connect() as a, database.connect() as c, relaying(database, destination(broker)):
        accept(a, "a", key="k")
        accept(c, "c")
        accepted(database, "b", key="k")
        arrived(broker.operations, 1)
        c.rollback()
        a.commit()
        assert arrived(broker.operations, 2) == ["b", "a"]
        accepted(database, "d")
        assert arrived(broker.operations, 3) == ["b", "a", "d"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_prepared_transaction_delays_only_itself(database: Database, committed: bool) -> None:
    broker = MemoryBroker()
    with database.connect() as writer, relaying(database, destination(broker)):
        writer.tpc_begin(writer.xid(1, f"ticks-{database.state.name}", "b"))
        accept(writer, "prepared")
        writer.tpc_prepare()
        accepted(database, "b")
        assert arrived(broker.operations, 1) == ["b"]
        if committed:
            writer.tpc_commit()
        else:
            writer.tpc_rollback()
        accepted(database, "c")
        expected = ["b", "c", "prepared"] if committed else ["b", "c"]
        assert sorted(arrived(broker.operations, len(expected))) == expected


def test_open_writers_here_and_in_another_database_hold_nobody_up(database: Database, databases: Databases) -> None:
    broker = MemoryBroker()
    other = databases.empty()
    try:
        with other.connect() as elsewhere, database.connect() as here, database.connect() as reader:
            elsewhere.execute("CREATE TABLE open_writer ()")
            accept(here, "open")
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            value(reader, "SELECT count(*) FROM fencepost.outbox")
            accepted(database, *[f"e{n}" for n in range(20)], key="k")
            relay_once(database, destination(broker))
            assert broker.operations() == [f"e{n}" for n in range(20)]
            here.commit()
            relay_once(database, destination(broker))
            assert broker.operations()[20:] == ["open"]
            elsewhere.rollback()
    finally:
        databases.drop(other)


def test_a_clock_that_was_set_back_stops_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        before = newest_tick(conn, 0)
        accepted(database, "a")
        conn.execute("UPDATE fencepost.tick SET taken_at = clock_timestamp() + interval '1 hour'")

        assert newest_tick(conn, 1.0) == (before[0], before[1] + 1)
