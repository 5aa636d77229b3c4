"""A restored outbox goes on in a new era: what was not acked is sent, in order, whatever server the copy came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import LiteralString

import pytest

from fencepost.relay.destination import NoRoute
from fencepost.relay.pages import newest_tick
from fencepost.relay.publisher import CONFIRMED, Answer, Outcome, ParkReason
from fencepost.relay.recycling import recycle_outbox
from fencepost.schemas.errors import NotArmed, StaleSlot
from support.database import Database, Databases
from support.memory_broker import MemoryBroker
from support.relays import BRISK, accept, accepted, destination, loop, owner_of, relay_once, value
from support.restores import Restores, recovered, restores

# What a dump brings along from a server that was much further: its transaction ids are of no server's here.
ELSEWHERE: tuple[LiteralString, ...] = (
    "UPDATE fencepost.outbox SET xid = (xid::text::bigint + 1000000)::text::xid8",
    """UPDATE fencepost.tick SET next = (next::text::bigint + 1000000)::text::xid8,
       snap_xmax = (snap_xmax::text::bigint + 1000000)::text::xid8,
       snap_xip = ARRAY(SELECT (x::text::bigint + 1000000)::text::xid8 FROM unnest(snap_xip) AS x),
       snap = format('%s:%s:%s', pg_snapshot_xmin(snap)::text::bigint + 1000000, pg_snapshot_xmax(snap)::text::bigint + 1000000,
                     (SELECT string_agg((x::text::bigint + 1000000)::text, ',') FROM unnest(snap_xip) AS x))::pg_snapshot""",
)
NUMBERS: LiteralString = "SELECT max(seq) FROM fencepost.outbox"


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def moved_from_elsewhere(database: Database) -> None:
    with database.connect() as conn:
        for statement in ELSEWHERE:
            conn.execute(statement)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_restored_outbox_had_not_acked_is_sent_once_and_new_events_after_it(
    made: Restores, *, elsewhere: bool
) -> None:
    before = MemoryBroker()
    accepted(made.live, "acked", key="k")
    relay_once(made.live, destination(before))
    accepted(made.live, "unsent-1", "unsent-2", key="k")
    backup = made.backup()
    relay_once(made.live, destination(before))
    accepted(made.live, "lost", key="k")
    relay_once(made.live, destination(before))
    assert before.operations() == ["acked", "unsent-1", "unsent-2", "lost"]  # the control
    old = made.restored(backup)
    if elsewhere:
        moved_from_elsewhere(old)
    after = MemoryBroker()
    with pytest.raises(NotArmed):
        relay_once(old, destination(after))
    with made.live.connect(autocommit=True) as conn:
        newest = value(conn, NUMBERS)

    done = recovered(old, numbers=1000)

    assert (done.era, done.unsent) == (2, 2)
    relay_once(old, destination(after))
    accepted(old, "new", key="k")
    relay_once(old, destination(after))
    assert after.operations() == ["unsent-1", "unsent-2", "new"]
    with old.connect(autocommit=True) as conn:
        assert value(conn, NUMBERS) > newest
        # Nothing of the old era is needed any more.
        conn.execute("SELECT fencepost.set_retention('0', '7 days', 'ops', 'a test')")
        loop_of_no_route(old)
        assert [recycle_outbox(conn, min_age=0).outcome, recycle_outbox(conn, min_age=0).outcome] == [
            "opened",
            "recycled",
        ]


def loop_of_no_route(database: Database) -> None:
    """The destination of what has no route acks too."""
    loop(database, NoRoute(), pace=replace(BRISK, record=0.0)).run(once=True)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_late_event_below_what_was_acked_is_not_lost(made: Restores, *, elsewhere: bool) -> None:
    with made.live.connect() as late:
        accept(late, "late", key="k")
        accepted(made.live, "early", key="k")
        relay_once(made.live, destination(MemoryBroker()))
        late.commit()
    old = made.restored(made.backup())
    if elsewhere:
        moved_from_elsewhere(old)
    recovered(old)
    after = MemoryBroker()

    relay_once(old, destination(after))

    # From the late one on everything is sent again: it is older than what was acked.
    assert after.operations() == ["late", "early"]


def test_parked_events_stay_parked_and_those_that_are_sent_again_are_parked_once(made: Restores) -> None:
    refusing = MemoryBroker(
        lambda row: CONFIRMED if row.operation != "bad" else Outcome(Answer.REFUSED, ParkReason.TOO_LARGE)
    )
    with made.live.connect() as late:
        accept(late, "late", key="other")
        accepted(made.live, "bad", "behind", key="k")
        relay_once(made.live, destination(refusing))
        late.commit()
    old = made.restored(made.backup())
    with old.connect(autocommit=True) as conn:
        assert value(conn, "SELECT count(*) FROM fencepost.parked") == 2
    recovered(old)

    relay_once(old, destination(refusing))

    with old.connect(autocommit=True) as conn:
        assert value(conn, "SELECT array_agg(operation ORDER BY seq) FROM fencepost.parked") == ["bad", "behind"]
    assert refusing.operations().count("late") == 1


def test_a_relay_of_before_the_restore_acks_nothing_and_a_new_one_does(made: Restores) -> None:
    relay_once(made.live, destination(MemoryBroker()))
    lease = owner_of(made.live)
    with made.live.connect(autocommit=True) as conn:
        lease.refresh(conn)
    old = made.restored(made.backup())
    recovered(old)
    slots = list(lease.held)
    arguments = {
        "slots": slots,
        "generations": [lease.held[s].generation for s in slots],
        "owner": lease.owner,
        "era": 2,
        "ticks": [1 for _ in slots],
        "none": [0 for _ in slots],
    }
    ack: LiteralString = (
        "SELECT fencepost.ack('memory', %(owner)s, %(slots)s::integer[], %(generations)s::bigint[], %(era)s,"
        " %(ticks)s::bigint[], %(ticks)s::bigint[], %(none)s::bigint[])"
    )
    with old.connect(autocommit=True) as conn:
        with pytest.raises(StaleSlot):
            conn.execute(ack, arguments)
        fresh = owner_of(old)
        fresh.refresh(conn)
        assert fresh.era == 2 and fresh.held
        era, newest = newest_tick(conn, 0)
        assert era == 2
        slots = list(fresh.held)
        conn.execute(
            ack,
            arguments
            | {
                "slots": slots,
                "generations": [fresh.held[s].generation for s in slots],
                "owner": fresh.owner,
                "ticks": [newest for _ in slots],
                "none": [0 for _ in slots],
            },
        )
