"""A slot has one owner; progress outlives owners; a refused ack changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from fencepost.relay import acks
from fencepost.relay.delivery import Settled
from fencepost.relay.destination import Destination
from fencepost.relay.pages import PageReader, Part, newest_tick
from fencepost.relay.parking import RetryPolicy
from fencepost.relay.publisher import Route
from fencepost.relay.slots import SlotLease
from fencepost.schemas.errors import InvalidInput, NotArmed, RoutesChanged, StaleSlot
from fencepost.schemas.keeper import Keeper
from stack.postgres import PostgresServer
from support.database import Database, Databases
from support.memory_broker import MemoryBroker
from support.plans import WHOLE, pages
from support.processes import wait_for
from support.relays import (
    BRISK,
    WITHIN_SECONDS,
    accept,
    accepted,
    arrived,
    destination,
    expire,
    loop,
    owner_of,
    registered,
    relay_once,
    relaying,
    until,
    value,
)
from support.restores import copy_database

SLOTS = 16
ACKS: LiteralString = "SELECT array_agg(a ORDER BY a.n) FROM fencepost.ack AS a"
OWNED: LiteralString = "SELECT count(*) FROM fencepost.slot WHERE owner IS NOT NULL"


def settle(conn: psycopg.Connection[Any], leases: list[SlotLease]) -> list[int]:
    """How many slots each holds once every relay has renewed often enough."""
    for _ in range(4):
        for lease in leases:
            _, surplus = lease.refresh(conn)
            lease.release(conn, surplus)
    return sorted(len(lease.held) for lease in leases)


def parts_of(conn: psycopg.Connection[Any], lease: SlotLease, *, rows: int = 500) -> list[Part]:
    """The next part of every slot's page, its end chosen as the loop does."""
    _, newest = newest_tick(conn, 0)
    for held in lease.held.values():
        if held.progress.between_pages:
            held.progress.end = newest
    reader = PageReader(conn, lease.era, rows_per_slot=rows)
    return reader.read(
        {s: (h.generation, h.progress.copy()) for s, h in lease.held.items() if h.progress.acked != h.progress.end}
    )


def ack(conn: psycopg.Connection[Any], lease: SlotLease, parts: list[Part]) -> list[str]:
    """Records the parts as published; returns their operations in order."""
    acks.record(conn, lease, parts, Settled(), RetryPolicy())
    return [row.operation for part in parts for row in part.rows]


@pytest.mark.parametrize(("owners", "shares"), [(1, [16]), (2, [8, 8]), (5, [3, 3, 3, 3, 4])])
def test_live_relays_share_the_slots_evenly(database: Database, owners: int, shares: list[int]) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        leases: list[SlotLease] = []
        for _ in range(owners):
            leases.append(owner_of(database))
            settle(conn, leases)
        assert settle(conn, leases) == shares
        taken = [slot for lease in leases for slot in lease.held]
        assert sorted(taken) == list(range(SLOTS))


def test_slots_of_a_dead_relay_are_taken_over_after_its_lease_and_not_before(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        dead, heir = owner_of(database), owner_of(database)
        dead.refresh(conn)
        heir.refresh(conn)
        assert (len(dead.held), len(heir.held)) == (SLOTS, 0)
        expire(conn, dead)
        heir.refresh(conn)
        assert len(heir.held) == SLOTS
        assert all(heir.held[s].generation == dead.held[s].generation + 1 for s in dead.held)


def test_a_relay_that_comes_back_before_anybody_noticed_keeps_its_slots(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        lease = owner_of(database)
        lease.refresh(conn)
        before = {slot: held.generation for slot, held in lease.held.items()}
        expire(conn, lease)
        fresh, _ = lease.refresh(conn)
        assert {slot: held.generation for slot, held in lease.held.items()} == before
        assert fresh == set()


def test_released_slots_change_hands_at_once(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        first, second = owner_of(database), owner_of(database)
        first.refresh(conn)
        first.release(conn, list(first.held))
        assert value(conn, OWNED) == 0
        second.refresh(conn)
        assert len(second.held) == SLOTS


def test_releasing_what_belongs_to_another_changes_nothing(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        lost, heir = owner_of(database), owner_of(database)
        lost.refresh(conn)
        expire(conn, lost)
        heir.refresh(conn)
        lost.release(conn, list(lost.held))
        fresh, _ = heir.refresh(conn)
        assert fresh == set() and len(heir.held) == SLOTS


def test_a_lease_is_trusted_from_before_the_round_trip_and_never_after_it_was_forgotten(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        lease = owner_of(database, seconds=60)
        assert lease.seconds_left() <= 0
        lease.refresh(conn)
        assert 30 < lease.seconds_left() <= 60
        lease.forget()
        assert lease.seconds_left() <= 0 and not lease.held


@pytest.mark.parametrize("seconds", [0.5, 601.0])
def test_a_lease_out_of_bounds_is_refused(database: Database, seconds: float) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        owner_of(database, seconds=600).refresh(conn)
        with pytest.raises(InvalidInput) as refused:
            owner_of(database, seconds=seconds).refresh(conn)
        assert refused.value.field == "lease"


def test_an_ack_under_an_old_slot_generation_is_refused_and_changes_nothing(database: Database) -> None:
    registered(database)
    accepted(database, "a", "b", key="k")
    with database.connect(autocommit=True) as conn:
        lost, heir = owner_of(database), owner_of(database)
        lost.refresh(conn)
        assert ack(conn, lost, parts_of(conn, lost, rows=1)) == ["a"]
        late = parts_of(conn, lost, rows=1)
        expire(conn, lost)
        heir.refresh(conn)
        before = value(conn, ACKS)
        standing = {s: (h.progress.acked, h.progress.position) for s, h in lost.held.items()}
        with pytest.raises(StaleSlot) as refused:
            ack(conn, lost, late)
        assert refused.value.field == "slot"
        assert value(conn, ACKS) == before
        assert {s: (h.progress.acked, h.progress.position) for s, h in lost.held.items()} == standing
        # The heir begins where the last good ack left off.
        assert ack(conn, heir, parts_of(conn, heir, rows=5)) == ["b"]


def test_an_ack_for_slots_of_which_one_was_lost_is_refused_as_a_whole(database: Database) -> None:
    registered(database)
    accepted(database, *[f"e{n}" for n in range(40)])
    with database.connect(autocommit=True) as conn:
        first, second = owner_of(database), owner_of(database)
        first.refresh(conn)
        parts = parts_of(conn, first)
        slot = next(part.slot for part in parts if part.rows)
        first_again = dict(first.held)
        first.release(conn, [slot])
        second.refresh(conn)
        first.held = first_again
        with pytest.raises(StaleSlot):
            ack(conn, first, parts)
        assert value(conn, "SELECT count(*) FROM fencepost.ack") == 0


def test_a_page_once_begun_is_finished_against_its_own_end_by_the_next_owner(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn, database.connect() as late:
        accept(late, "late", key="k")
        accepted(database, "a", "b", "c", key="k")
        first, second = owner_of(database), owner_of(database)
        first.refresh(conn)
        assert ack(conn, first, parts_of(conn, first, rows=2)) == ["a", "b"]
        expire(conn, first)
        # Below the position, and visible to every tick from now on.
        late.commit()
        accepted(database, "d", key="k")
        second.refresh(conn)
        sent: list[str] = []
        while True:
            published = ack(conn, second, parts_of(conn, second, rows=2))
            sent += published
            if not published and all(held.progress.between_pages for held in second.held.values()):
                break
        assert sent == ["c", "late", "d"]


def test_a_new_owner_resends_only_what_was_not_acked(database: Database) -> None:
    registered(database)
    accepted(database, "a", "b", "c", key="k")
    with database.connect(autocommit=True) as conn:
        first, second = owner_of(database), owner_of(database)
        first.refresh(conn)
        assert ack(conn, first, parts_of(conn, first, rows=1)) == ["a"]
        expire(conn, first)
        second.refresh(conn)
        assert ack(conn, second, parts_of(conn, second)) == ["b", "c"]
        assert ack(conn, second, parts_of(conn, second)) == []


def test_progress_without_rows_is_kept_in_memory_and_costs_no_ack(database: Database) -> None:
    registered(database)
    with database.connect(autocommit=True) as conn:
        lease = owner_of(database)
        lease.refresh(conn)
        for n in range(5):
            accepted(database, f"e{n}", key="k")
            ack(conn, lease, parts_of(conn, lease))
        assert value(conn, "SELECT count(*) FROM fencepost.ack") == 5
        assert {held.progress.acked for held in lease.held.values()} == {5}


def test_the_first_destination_starts_at_the_beginning_and_a_later_one_at_the_newest_tick(database: Database) -> None:
    accepted(database, "a", "b")
    first, second = MemoryBroker(), MemoryBroker()
    relay_once(database, destination(first, "first"))
    assert sorted(first.operations()) == ["a", "b"]
    relay_once(database, destination(second, "second"))
    assert second.operations() == []
    accepted(database, "c")
    relay_once(database, destination(first, "first"))
    relay_once(database, destination(second, "second"))
    assert first.operations()[2:] == second.operations() == ["c"]


def test_other_routes_are_refused_unless_they_are_accepted_and_that_is_recorded(database: Database) -> None:
    broker = MemoryBroker()
    old, new = [Route("relay.*", "here")], [Route("relay.*", "there")]
    with database.connect(autocommit=True) as conn:
        destination(broker, routes=old).register(conn)
        destination(broker, routes=old).register(conn)
        with pytest.raises(RoutesChanged) as refused:
            destination(broker, routes=new).register(conn)
        assert refused.value.field == "routes"
        destination(broker, routes=old).register(conn)
        Destination("memory", "kafka", new, lambda _: broker, accept_routes=True).register(conn)
        assert value(conn, "SELECT count(*) FROM fencepost.decision WHERE kind = 'routes'") == 1
        destination(broker, routes=new).register(conn)


def test_a_relay_survives_the_loss_of_its_database_connection(database: Database) -> None:
    broker = MemoryBroker()
    accepted(database, "a")
    with relaying(database, destination(broker)) as relay, database.connect(autocommit=True) as conn:
        arrived(broker.operations, 1)
        until(conn, "SELECT count(*) = 1 FROM fencepost.ack")
        ended = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert value(conn, ended) >= 1
        accepted(database, "b")
        assert arrived(broker.operations, 2) == ["a", "b"]
        until(conn, "SELECT count(*) = 2 FROM fencepost.ack")
    assert relay.counters.lost_slots == 0


def test_no_transaction_stays_open_while_the_broker_is_silent(database: Database) -> None:
    broker = MemoryBroker()
    broker.answering.clear()
    accepted(database, *[f"e{n}" for n in range(20)])
    pace = replace(BRISK, confirm=25.0, lease=60.0)
    with relaying(database, destination(broker), pace=pace), database.connect(autocommit=True) as conn:
        arrived(broker.operations, 20)
        # It looks for new events in short transactions; a lock that they would block for long is free soon.
        with conn.transaction():
            conn.execute("SET LOCAL lock_timeout = '20s'")
            conn.execute("LOCK TABLE fencepost.outbox, fencepost.slot, fencepost.ack IN ACCESS EXCLUSIVE MODE")
        assert value(conn, "SELECT count(*) FROM fencepost.ack") == 0
        broker.answering.set()
        until(conn, "SELECT count(*) > 0 FROM fencepost.ack")


def test_a_restarted_or_copied_database_publishes_nothing_until_its_witness_is_found_equal(tmp_path: Path) -> None:
    broker, stray = MemoryBroker(), MemoryBroker()
    with PostgresServer("18") as server:
        databases = Databases(server.dsn, tmp_path)
        database = databases.migrated()
        accepted(database, "a")
        relay_once(database, destination(broker))
        assert broker.operations() == ["a"]
        accepted(database, "b")
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            copy_database(conn, database.state.name, "copied")
        copied = Database(make_conninfo(server.dsn, dbname="copied"), tmp_path / "copied")
        with pytest.raises(NotArmed):
            relay_once(copied, destination(stray))
        server.restart()
        with pytest.raises(NotArmed):
            relay_once(database, destination(broker))
        with relaying(database, destination(broker)) as waiting:
            wait_for(lambda: "not armed" in waiting.counters.trouble, 10, "the loop to say why it waits")
            assert broker.operations() == ["a"]
            keeper = Keeper(database.dsn, database.state)
            keeper.start()
            try:
                assert arrived(broker.operations, 2) == ["a", "b"]
            finally:
                keeper.stop()
        with pytest.raises(NotArmed):
            relay_once(copied, destination(stray))
        assert stray.operations() == []


def test_a_new_era_makes_every_slot_begin_anew(database18: Database) -> None:
    registered(database18)
    with database18.connect(autocommit=True) as conn:
        lease = owner_of(database18)
        lease.refresh(conn)
        assert lease.refresh(conn)[0] == set()
        conn.execute("UPDATE fencepost.destination SET start_era = 2")
        assert lease.refresh(conn)[0] == set(range(SLOTS))
        assert lease.refresh(conn)[0] == set()


def test_a_single_run_sees_what_was_committed_a_moment_after_the_last_tick(database18: Database) -> None:
    broker = MemoryBroker()
    patient = replace(BRISK, poll_min=30.0)
    accepted(database18, "a")
    with database18.connect(autocommit=True) as conn:
        newest_tick(conn, 0)
    accepted(database18, "b")
    loop(database18, destination(broker), pace=patient).run(once=True)
    assert sorted(broker.operations()) == ["a", "b"]


def test_a_single_run_waits_for_the_slots_of_a_dead_relay(database18: Database) -> None:
    broker = MemoryBroker()
    registered(database18)
    accepted(database18, "a")
    with database18.connect(autocommit=True) as conn:
        owner_of(database18, seconds=1).refresh(conn)
    loop(database18, destination(broker), pace=replace(BRISK, lease=10.0)).run(once=True)
    assert broker.operations() == ["a"]


def test_a_single_run_beside_a_live_relay_ends_and_leaves_that_one_its_slots(database18: Database) -> None:
    broker, other = MemoryBroker(), MemoryBroker()
    with relaying(database18, destination(other)), database18.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 16 FROM fencepost.slot WHERE owner IS NOT NULL")
        accepted(database18, *[f"e{n}" for n in range(20)])
        loop(database18, destination(broker), pace=replace(BRISK, lease=1.0, confirm=0.5)).run(once=True)
        everything = {f"e{n}" for n in range(20)}
        wait_for(lambda: {*broker.operations(), *other.operations()} >= everything, WITHIN_SECONDS, "every event")
    assert {*broker.operations(), *other.operations()} == everything


UPDATED: LiteralString = """
SELECT sum(n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables
WHERE schemaname = 'fencepost' AND relname IN ('slot', 'tick', 'destination', 'ack_0', 'ack_1', 'installation')"""


def test_acks_under_a_pinned_snapshot_update_no_row_and_touch_no_more_pages_than_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(database)
    accepted(database, "a", "b", key="k")
    with (
        database.connect(autocommit=True) as conn,
        database.connect() as pin,
        database.connect(autocommit=True) as look,
    ):
        lease = owner_of(database)
        lease.refresh(conn)
        (part,) = (part for part in parts_of(conn, lease, rows=1) if part.rows)
        pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        value(pin, "SELECT count(*) FROM fencepost.outbox")

        def counted(query: LiteralString) -> int:
            conn.execute("SELECT pg_stat_force_next_flush()")
            conn.execute("SELECT 1")
            return value(look, query)  # type: ignore[no-any-return]

        def acked(times: int) -> float:
            touched: list[int] = []
            execute = conn.execute

            def looked_at(statement: LiteralString, parameters: dict[str, object]) -> None:
                touched.append(pages(execute(WHOLE + statement, parameters)))

            with monkeypatch.context() as patched:
                patched.setattr(conn, "execute", looked_at)
                for _ in range(times):
                    ack(conn, lease, [part])
            assert len(touched) == times
            return sum(touched) / times

        acked(50)
        rows, first = counted(UPDATED), acked(100)
        acked(1500)
        last = acked(100)
        assert last <= first + 4, (first, last)
        assert counted(UPDATED) == rows


def test_what_was_read_is_not_sent_while_the_lease_may_end_before_its_confirm(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    with relaying(database18, destination(broker)) as made, database18.connect(autocommit=True) as conn:
        accepted(database18, "control")
        arrived(broker.operations, 1)
        with monkeypatch.context() as patched:
            patched.setattr(SlotLease, "seconds_left", _too_few)
            accepted(database18, "late")
            until(conn, "SELECT max(t.hint) = (SELECT max(o.seq) FROM fencepost.outbox AS o) FROM fencepost.tick AS t")
            steps: set[float] = set()

            def many() -> bool:
                steps.add(made.progressed_at)
                return len(steps) > 50

            wait_for(many, 20, "many steps of the loop")
            assert broker.operations() == ["control"]
        assert arrived(broker.operations, 2) == ["control", "late"]


def _too_few(lease: SlotLease) -> float:
    return BRISK.confirm - 0.1
