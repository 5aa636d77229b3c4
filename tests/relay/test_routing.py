"""Every accepted event is somebody's business: published where it had a route when it was accepted, or visibly parked."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import replace
from typing import LiteralString

import psycopg
import pytest

from fencepost.relay import outbox
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, Route
from fencepost.relay.sidecar import Relay
from fencepost.relay.spans import Spans
from fencepost.schemas.errors import InvalidInput, RoutesChanged, Unreachable
from support.database import Database
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import BRISK, Other, accepted, arrived, destination, relay_once, relaying, until, value

PARKED: LiteralString = "SELECT destination, operation, reason FROM fencepost.parked ORDER BY seq, destination"
TAKES, ELSE, ALL = Route("relay.*", "here"), Route("other.*", "here"), Route("*", "here")
SPANS: LiteralString = "SELECT destination, match, since, until FROM fencepost.route ORDER BY destination, since, match"


def others(database: Database, *operations: str, key: str = "") -> None:
    with database.connect() as conn:
        for operation in operations:
            outbox.enqueue(conn, Other(tenant="acme", operation=operation, ordering_key=key or operation))


def changed(broker: MemoryBroker, *routes: Route, name: str = "memory") -> Destination:
    """The destination with new routes, accepted."""
    return Destination(name, "kafka", routes, lambda _: broker, accept_routes=True)


def parked(database: Database) -> list[tuple[str, str, str]]:
    with database.connect() as conn:
        return [(str(at), str(operation), str(reason)) for at, operation, reason in conn.execute(PARKED)]


@pytest.mark.parametrize("known", [True, False], ids=["seen-by-the-reserved-one", "seen-by-nobody"])
def test_backlog_whose_route_is_removed_is_parked_and_never_dropped(database: Database, known: bool) -> None:
    broker = MemoryBroker()
    relay_once(database, destination(broker, routes=[TAKES]))
    accepted(database, "a", "b", key="k")
    if known:
        relay_once(database, NoRoute())  # these have a route: nothing to park
    relay_once(database, changed(broker, ELSE))
    relay_once(database, NoRoute())
    accepted(database, "later")
    relay_once(database, destination(broker, routes=[ELSE]))
    relay_once(database, NoRoute())
    assert parked(database) == [("memory", "a", "no_route"), ("memory", "b", "no_route"), ("-", "later", "no_route")]
    assert broker.operations() == []


def test_routes_that_go_on_matching_publish_their_backlog_wherever_they_lead_now(database: Database) -> None:
    broker = MemoryBroker()
    relay_once(database, destination(broker, routes=[TAKES]))
    accepted(database, "a")
    relay_once(database, changed(broker, Route("relay.*", "there")))
    accepted(database, "b")
    relay_once(database, changed(broker, ALL))
    relay_once(database, NoRoute())
    assert broker.operations() == ["a", "b"] and parked(database) == []


def test_a_route_that_moves_to_another_destination_leaves_no_gap(database: Database) -> None:
    first, second = MemoryBroker(), MemoryBroker()
    relay_once(database, destination(first, "first", [TAKES]))
    relay_once(database, destination(second, "second", [ELSE]))
    accepted(database, "before")
    # The second one passes it by, the first one never gets to it.
    relay_once(database, destination(second, "second", [ELSE]))
    with database.connect() as conn:
        changed(first, ELSE, name="first").register(conn)
        changed(second, TAKES, name="second").register(conn)
    accepted(database, "after")
    relay_once(database, destination(first, "first", [ELSE]))
    relay_once(database, destination(second, "second", [TAKES]))
    relay_once(database, NoRoute())
    assert second.operations() == ["after"] and first.operations() == []
    assert parked(database) == [("first", "before", "no_route")]


@pytest.mark.parametrize("late", [True, False], ids=["new-destination", "new-route"])
def test_what_came_before_its_first_route_is_parked_although_there_is_one_now(database: Database, late: bool) -> None:
    first, second = MemoryBroker(), MemoryBroker()
    relay_once(database, destination(first, "first", [ELSE]))
    if not late:
        relay_once(database, destination(second, "second", [ELSE]))
    accepted(database, "before")
    relay_once(database, destination(first, "first", [ELSE]))
    if late:
        relay_once(database, destination(second, "second", [TAKES]))
    else:
        relay_once(database, destination(second, "second", [ELSE]))
        relay_once(database, changed(second, TAKES, name="second"))
    accepted(database, "after")
    relay_once(database, destination(second, "second", [TAKES]))
    relay_once(database, NoRoute())
    assert second.operations() == ["after"]
    assert parked(database) == [("-", "before", "no_route")]


def test_spans_of_routes_begin_and_end_where_they_were_accepted(database: Database) -> None:
    broker = MemoryBroker()
    with database.connect() as conn:
        destination(broker, routes=[TAKES]).register(conn)
        changed(broker, ALL).register(conn)  # no event in between: the first one never held
        assert conn.execute(SPANS).fetchall() == [("memory", "*", 0, None)]
        conn.commit()
        accepted(database, "a", "b")
        changed(broker, ALL, ELSE).register(conn)
        conn.commit()
        accepted(database, "c")
        changed(broker, ELSE).register(conn)
        assert conn.execute(SPANS).fetchall() == [("memory", "*", 0, 3), ("memory", "other.*", 2, None)]


def test_spans_hold_a_type_from_after_their_first_number_to_their_last(database: Database) -> None:
    spans = Spans()
    assert not spans.hold("a.b", 1)
    spans.set([("a.*", 0, 5), ("a.b", 7, None), ("c", 2, 3)])
    assert [n for n in range(1, 10) if spans.hold("a.b", n)] == [1, 2, 3, 4, 5, 8, 9]
    assert [n for n in range(1, 10) if spans.hold("c", n)] == [3]
    assert not spans.hold("ab", 1) and not spans.everything
    spans.set([("*", 1, None)])
    assert spans.hold("ab", 2) and not spans.everything
    spans.set([("*", 0, None)])
    assert spans.everything


def test_python_and_sql_agree_on_what_a_route_matches(database: Database) -> None:
    with database.connect() as conn:
        for match in ("*", "a", "a.*", "a.b", "a.b.*", "a.%", "a._", "ab*"):
            for type_ in ("a", "a.b", "a.b.c", "ab", "a.", "abc"):
                row = conn.execute("SELECT fencepost._matches(%(m)s, %(t)s)", {"m": match, "t": type_}).fetchone()
                assert row == (Route(match, "").matches(type_),), (match, type_)


def test_a_relay_with_the_old_routes_ends_once_others_are_accepted(database: Database) -> None:
    broker, other = MemoryBroker(), MemoryBroker()
    with (
        database.connect(autocommit=True) as conn,
        pytest.raises(RoutesChanged),
        relaying(database, destination(broker, routes=[ALL])),
    ):
        accepted(database, "a")
        arrived(broker.operations, 1)  # the control
        changed(other, TAKES).register(conn)
        until(conn, "SELECT count(*) = 0 FROM fencepost.slot WHERE destination = 'memory' AND owner IS NOT NULL")
    accepted(database, "b")
    relay_once(database, destination(other, routes=[TAKES]))
    assert (broker.operations(), other.operations()) == (["a"], ["b"])


def test_routes_are_read_again_for_every_page_and_not_only_now_and_then(database: Database) -> None:
    broker = MemoryBroker()
    relay_once(database, destination(broker, routes=[TAKES]))
    slow = replace(BRISK, lease=90.0, refresh=60.0)
    with relaying(database, NoRoute(), pace=slow), database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 16 FROM fencepost.slot WHERE destination = '-' AND owner IS NOT NULL")
        changed(broker, ELSE).register(conn)
        accepted(database, "a")
        until(conn, "SELECT count(*) = 1 FROM fencepost.parked")
        changed(broker, ELSE, TAKES).register(conn)
        accepted(database, "b")
        others(database, "c")
        relay_once(database, destination(broker, routes=[ELSE, TAKES]))
    assert broker.operations() == ["b", "c"] and parked(database) == [("-", "a", "no_route")]


def test_routes_may_change_while_events_are_accepted_and_every_one_is_published_or_parked(database18: Database) -> None:
    """Two destinations swap and narrow their routes over and over; the reserved one looks on; nothing is nobody's."""
    brokers = {"first": MemoryBroker(), "second": MemoryBroker()}
    choices = ([TAKES], [ELSE], [TAKES, ELSE], [ALL])
    dice = random.Random(7)
    enough = threading.Event()
    accepted_so_far: list[str] = []

    def write() -> None:
        with database18.connect() as conn:
            n = 0
            while not enough.is_set() and n < 3000:
                n += 1
                kind = Other if n % 2 else None
                operation = f"op-{n}"
                if kind is None:
                    accepted(database18, operation)
                else:
                    outbox.enqueue(conn, Other(tenant="acme", operation=operation, ordering_key=operation))
                    conn.commit()
                accepted_so_far.append(operation)

    relay_once(database18, changed(brokers["first"], TAKES, name="first"))
    relay_once(database18, changed(brokers["second"], ELSE, name="second"))
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with relaying(database18, NoRoute()):
        rounds = 0
        while rounds < 12 or len(accepted_so_far) <= 50:
            assert writer.is_alive() and rounds < 500
            rounds += 1
            for name, broker in brokers.items():
                routes = dice.choice(choices)
                if dice.random() < 0.5:
                    relay_once(database18, changed(broker, *routes, name=name))
                else:
                    with database18.connect(autocommit=True) as conn:
                        changed(broker, *routes, name=name).register(conn)
        enough.set()
        writer.join(20)
        for name, broker in brokers.items():
            relay_once(database18, changed(broker, ALL, name=name))
        accepted(database18, "last")

        def settled() -> set[str]:
            there = {o for b in brokers.values() for o in b.operations()} | {o for _, o, _ in parked(database18)}
            return set(accepted_so_far) - there

        wait_for(lambda: not settled(), 20, "every event to be published or parked")


@pytest.mark.parametrize("once", [True, False])
def test_destinations_served_by_one_relay_begin_together(database: Database, once: bool) -> None:
    one, two = MemoryBroker(), MemoryBroker()
    accepted(database, "a", "b", key="k")
    relay = Relay(database.dsn, [destination(one, "one"), destination(two, "two")], pace=BRISK)
    if once:
        relay.run_once()
    else:
        thread = threading.Thread(target=relay.run, daemon=True)
        thread.start()
        for broker in (one, two):
            arrived(broker.operations, 2)
        relay.stop()
        thread.join(20)
    assert one.operations() == two.operations() == ["a", "b"]
    assert parked(database) == []


def test_several_destinations_each_get_an_event_and_a_blocked_one_stops_no_other(database: Database) -> None:
    stuck = threading.Event()

    def verdict(row: OutboxRow) -> Outcome:
        return CONFIRMED if stuck.is_set() else Outcome(Answer.UNKNOWN, detail="no answer")

    good, bad = MemoryBroker(), MemoryBroker(verdict)
    with database.connect(autocommit=True) as conn:
        destination(bad, "bad").register(conn)
        destination(good, "good").register(conn)
    with relaying(database, destination(bad, "bad")), relaying(database, destination(good, "good")):
        accepted(database, *[f"e{n}" for n in range(10)], key="k")
        assert arrived(good.operations, 10) == [f"e{n}" for n in range(10)]
        accepted(database, *[f"e{n}" for n in range(10, 20)], key="k")
        assert arrived(good.operations, 20)[10:] == [f"e{n}" for n in range(10, 20)]
        stuck.set()
        with database.connect(autocommit=True) as conn:
            until(conn, "SELECT count(*) = 0 FROM fencepost.parked")
        wait_for(lambda: len(set(bad.operations())) == 20, 20, "the blocked destination to catch up")
    firsts = list(dict.fromkeys(bad.operations()))
    assert firsts == [f"e{n}" for n in range(20)]


@pytest.mark.parametrize("relays", [1, 2, 5])
def test_any_number_of_relays_makes_progress_on_two_destinations_in_order(database18: Database, relays: int) -> None:
    one, two = MemoryBroker(), MemoryBroker()
    # A lease that ends too soon on a busy machine makes copies, rightly.
    patient = replace(BRISK, lease=30.0)
    with contextlib.ExitStack() as stack:
        with database18.connect(autocommit=True) as conn:
            destination(one, "one").register(conn)
            destination(two, "two").register(conn)
            for _ in range(relays):
                stack.enter_context(relaying(database18, destination(one, "one"), pace=patient))
                stack.enter_context(relaying(database18, destination(two, "two"), pace=patient))
            wait_for(
                lambda: (
                    value(
                        conn, "SELECT count(DISTINCT (destination, owner)) FROM fencepost.slot WHERE owner IS NOT NULL"
                    )
                    == 2 * relays
                ),
                30,
                "every relay to own slots",
            )
        for n in range(10):
            accepted(database18, *[f"{k}-{n}" for k in range(8)], key=f"round-{n}")
        for broker in (one, two):
            found = arrived(broker.operations, 80)
            assert sorted(found) == sorted(f"{k}-{n}" for n in range(10) for k in range(8))
            for n in range(10):
                assert [o for o in found if o.endswith(f"-{n}")] == [f"{k}-{n}" for k in range(8)]


def test_a_destination_is_removed_when_it_is_done_and_not_before(database: Database) -> None:
    broker = MemoryBroker()
    remove = "SELECT unsent, parked FROM fencepost.remove_destination('old', 'ann', 'moved away', %(lose)s)"
    relay_once(database, destination(broker, "new", [ALL]))
    relay_once(database, destination(broker, "old", [TAKES]))
    accepted(database, "a")
    others(database, "not-its-business")
    with database.connect(autocommit=True) as conn:
        with pytest.raises(InvalidInput) as refused:
            conn.execute(remove, {"lose": False})
        assert refused.value.field == "lose" and "1 events are unsent and 0" in str(refused.value)
        with relaying(database, destination(broker, "old", [TAKES])):
            arrived(broker.operations, 1)
            until(conn, "SELECT fencepost._unsent('old', 10) = 0")
            with pytest.raises(InvalidInput) as refused:
                conn.execute(remove, {"lose": False})
            assert refused.value.field == "destination"
        assert conn.execute(remove, {"lose": False}).fetchone() == (0, 0)
        with pytest.raises(InvalidInput):
            conn.execute(remove, {"lose": False})
        found = conn.execute("SELECT actor, subject, evidence_ref FROM fencepost.decision").fetchall()
        assert found == [("ann", "old", "unsent 0, parked 0")]
    # The same name again is a new destination.
    relay_once(database, destination(broker, "old", [TAKES]))
    accepted(database, "b")
    relay_once(database, destination(broker, "old", [TAKES]))
    assert broker.operations() == ["a", "b"]


def test_unsent_events_are_lost_only_when_that_is_said_and_counted_in_the_decision(database: Database) -> None:
    broker = MemoryBroker()
    relay_once(database, destination(broker, "old", [TAKES]))
    accepted(database, "a", "b")
    with database.connect(autocommit=True) as conn:
        lost = conn.execute("SELECT unsent, parked FROM fencepost.remove_destination('old', 'ann', 'gone', true)")
        assert lost.fetchone() == (2, 0)
        assert value(conn, "SELECT evidence_ref FROM fencepost.decision") == "unsent 2, parked 0"
        for reserved in ("-", "nobody"):
            with pytest.raises(InvalidInput):
                conn.execute("SELECT fencepost.remove_destination(%(name)s, 'ann', 'gone', true)", {"name": reserved})
    # What the reserved one had not looked at yet is its business now: rather seen twice than never.
    relay_once(database, NoRoute())
    assert parked(database) == [("-", "a", "no_route"), ("-", "b", "no_route")]


def test_a_relay_that_comes_back_unchanged_waits_for_no_lock_on_the_destinations(database: Database) -> None:
    known, new = destination(MemoryBroker()), destination(MemoryBroker(), "new")
    with database.connect(autocommit=True) as conn, database.connect() as other:
        known.register(conn)
        conn.execute("SET lock_timeout = '100ms'")
        other.execute("LOCK TABLE fencepost.destination IN ROW EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            new.register(conn)  # the control
        known.register(conn)
        other.rollback()
        new.register(conn)


def test_a_closed_destination_tells_a_loop_that_is_late(database: Database) -> None:
    to = destination(MemoryBroker())
    with database.connect(autocommit=True) as conn:
        to.open(conn, time.monotonic() + 5)
    assert to.publisher.send([], time.monotonic() + 5).result(1) == []  # the control
    to.close(time.monotonic() + 5)
    with pytest.raises(Unreachable, match="was closed"):
        to.publisher.send([], time.monotonic() + 5)
