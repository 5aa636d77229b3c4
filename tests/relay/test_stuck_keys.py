"""A queue that takes nothing keeps its own keys waiting and no others; it mends itself, in order, and nothing is lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import LiteralString

import pytest

from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome
from support.database import Database
from support.memory_broker import MemoryBroker
from support.relays import BRISK, accepted, arrived, destination, relaying, until, value

# A lease that ends too soon on a busy machine makes copies, rightly.
PATIENT = replace(BRISK, lease=60.0)
PARKED: LiteralString = "SELECT operation, reason FROM fencepost.parked ORDER BY seq"
SET_ASIDE: LiteralString = "SELECT count(*) > 0 FROM fencepost.parked"
NONE_PARKED: LiteralString = "SELECT count(*) = 0 FROM fencepost.parked"

# What a restore will do: the same progress, under ticks of a new era, and none of the old one's left.
NEW_ERA: LiteralString = """
DO $$ BEGIN
    PERFORM FROM fencepost.slot FOR UPDATE;
    UPDATE fencepost.installation SET era = era + 1;
    INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    SELECT 1 + era, n, snap, hint, next, snap_xmax, snap_xip FROM fencepost.tick;
    INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
    SELECT k.child, k.destination, k.slot, nextval('fencepost.ack_seq'), 1 + k.era, k.acked_tick, k.end_tick, k.position,
           k.generation
    FROM (SELECT DISTINCT ON (a.destination, a.slot) a.* FROM fencepost.ack AS a
          ORDER BY a.destination, a.slot, a.n DESC) AS k;
    UPDATE fencepost.destination SET start_era = start_era + 1;
    DELETE FROM fencepost.tick WHERE era < (SELECT i.era FROM fencepost.installation AS i);
END $$"""


class Stuck:
    """Answers like this for the events of a key until `mended`."""

    def __init__(self, answer: Answer, key: str = "full") -> None:
        self.answer = answer
        self.key = key
        self.mended = threading.Event()

    def __call__(self, row: OutboxRow) -> Outcome:
        if row.ordering_key == self.key and not self.mended.is_set():
            return Outcome(self.answer, detail="full")
        return CONFIRMED


@pytest.mark.parametrize("answer", [Answer.NACKED, Answer.UNKNOWN, Answer.WITHHELD])
def test_a_key_that_is_never_confirmed_keeps_no_other_waiting(database: Database, answer: Answer) -> None:
    broker = MemoryBroker(Stuck(answer))

    def flowing() -> list[str]:
        return [row.operation for row in broker.arrived if row.ordering_key != "full"]

    with relaying(database, destination(broker), pace=PATIENT):
        accepted(database, "control", key="good")
        arrived(flowing, 1)
        accepted(database, "stuck", key="full")
        for n in range(1, 4):
            accepted(database, f"a{n}", key="good")
            accepted(database, f"b{n}", key="other")
            arrived(flowing, 1 + 2 * n)
    assert [o for o in flowing() if o.startswith("a")] == ["a1", "a2", "a3"]
    assert len(flowing()) == len(set(flowing()))


@pytest.mark.parametrize("answer", [Answer.NACKED, Answer.UNKNOWN])
def test_where_others_get_through_a_stuck_key_is_set_aside_and_flows_again_in_order(
    database: Database, answer: Answer
) -> None:
    stuck = Stuck(answer)
    broker = MemoryBroker(stuck)
    reason = "nacked" if answer is Answer.NACKED else "unanswered"

    def flowing() -> list[str]:
        return [row.operation for row in broker.arrived if row.ordering_key != "full"]

    with relaying(database, destination(broker), pace=PATIENT) as loop, database.connect(autocommit=True) as conn:
        accepted(database, "s1", "s2", "s3", key="full")
        sent = 0
        while not value(conn, SET_ASIDE):
            accepted(database, *[f"g{sent + n}" for n in range(20)])
            sent += 20
            arrived(flowing, sent)
        until(conn, "SELECT max(attempts) > 2 FROM fencepost.parked")
        assert conn.execute(PARKED).fetchall() == [("s1", reason), ("s2", "behind"), ("s3", "behind")]
        accepted(database, "s4", key="full")
        until(conn, "SELECT count(*) = 4 FROM fencepost.parked")
        before = broker.sends
        accepted(database, *[f"h{n}" for n in range(20)])
        arrived(flowing, sent + 20)
        broker.arrived = [row for row in broker.arrived if row.ordering_key != "full"]
        stuck.mended.set()
        until(conn, NONE_PARKED)
        accepted(database, "s5", key="full")

        def firsts() -> list[str]:
            return list(dict.fromkeys(row.operation for row in broker.arrived if row.ordering_key == "full"))

        # The one that was on its way when it mended may have come twice; first arrivals are in order.
        assert arrived(firsts, 5) == ["s1", "s2", "s3", "s4", "s5"]
        assert broker.sends > before
    assert sorted(flowing()) == sorted({*flowing()}) and len(flowing()) == sent + 20
    assert loop.counters.published == sent + 25


def test_a_broker_that_confirms_nothing_is_waited_for_and_nothing_is_set_aside(database: Database) -> None:
    away = threading.Event()
    broker = MemoryBroker(lambda row: Outcome(Answer.NACKED, detail="away") if away.is_set() else CONFIRMED)
    # One send at a time: this broker withholds a refused event's key within a send only, real publishers until it is seen.
    pace = replace(PATIENT, ahead=1)
    with relaying(database, destination(broker), pace=pace) as loop, database.connect(autocommit=True) as conn:
        accepted(database, *[f"a{n}" for n in range(20)])
        arrived(broker.operations, 20)  # the control
        away.set()
        accepted(database, *[f"k{n}" for n in range(40)], key="k")
        accepted(database, *[f"b{n}" for n in range(20)])
        sends = broker.sends
        arrived(lambda: ["sent"] * (broker.sends - sends), 25)
        away.clear()
        found = arrived(broker.operations, 80)
        assert value(conn, NONE_PARKED) is True
    assert [o for o in found if o.startswith("k")] == [f"k{n}" for n in range(40)]
    assert len(found) == 80 and loop.counters.parked == 0


def test_what_got_through_in_front_of_a_stuck_event_of_its_slot_is_not_sent_again(database: Database) -> None:
    stuck = Stuck(Answer.UNKNOWN, "k0")
    broker = MemoryBroker(stuck)
    with relaying(database, destination(broker), pace=PATIENT):
        # So many keys that some of them share the stuck one's slot.
        accepted(database, "first", key="k0")
        accepted(database, *[f"o{n}" for n in range(300)])
        arrived(lambda: [o for o in broker.operations() if o != "first"], 300)
        stuck.mended.set()
        accepted(database, "last", key="k0")
        arrived(lambda: [o for o in broker.operations() if o == "last"], 1)
    others = [o for o in broker.operations() if o not in ("first", "last")]
    assert len(others) == len(set(others)) == 300


def test_a_new_era_that_is_noticed_while_something_is_sent_again_has_its_own_ticks(database: Database) -> None:
    stuck = Stuck(Answer.NACKED)
    broker = MemoryBroker(stuck)
    with relaying(database, destination(broker), pace=PATIENT), database.connect(autocommit=True) as conn:
        accepted(database, "control", key="good")
        arrived(broker.operations, 1)
        accepted(database, "stuck", key="full")
        before = broker.sends
        arrived(lambda: ["sent"] * (broker.sends - before), 4)
        conn.execute(NEW_ERA)
        arrived(lambda: ["sent"] * (broker.sends - before), 12)
        stuck.mended.set()
        arrived(broker.operations, 2)
        accepted(database, "later", key="good")
        found = arrived(broker.operations, 3)
    assert sorted(set(found)) == ["control", "later", "stuck"]
