"""Operators retry and skip parked events; the slot's owner notices, and the order of the key stays whole."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest

from fencepost.relay import outbox, parking
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, ParkReason, Route
from fencepost.schemas import grants
from fencepost.schemas.errors import InvalidInput, NotArmed, RoutesChanged
from support.database import Database
from support.memory_broker import MemoryBroker
from support.processes import wait_for
from support.relays import (
    BRISK,
    EVERYTHING,
    Other,
    accept,
    accepted,
    arrived,
    destination,
    owner_of,
    registered,
    relay_once,
    relaying,
    until,
    value,
)

RETRY: LiteralString = (
    "SELECT verdict, destinations FROM fencepost.retry_parked(%(destination)s, %(seq)s, %(actor)s, %(why)s)"
)
SKIP: LiteralString = "SELECT fencepost.skip_parked(%(destination)s, %(seq)s, %(actor)s, %(why)s)"
PARKED: LiteralString = "SELECT destination, operation, reason FROM fencepost.parked ORDER BY destination, seq"
DECISIONS: LiteralString = "SELECT kind, actor, reason, operation, verdict FROM fencepost.decision ORDER BY id"
SEQ: LiteralString = "SELECT seq FROM fencepost.outbox WHERE operation = %(operation)s"
NONE: LiteralString = "SELECT count(*) = 0 FROM fencepost.parked"
TOO_LARGE = Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, "9 bytes")
TAKES, ELSE = Route("relay.*", "here"), Route("other.*", "here")


class Picky:
    """Refuses these operations until it is told otherwise."""

    def __init__(self, *operations: str) -> None:
        self.refused = set(operations)

    def __call__(self, row: OutboxRow) -> Outcome:
        return TOO_LARGE if row.operation in self.refused else CONFIRMED


def act(
    conn: psycopg.Connection[Any],
    statement: LiteralString,
    operation: str,
    *,
    at: str = "memory",
    actor: str = "ann",
    why: str = "mended",
) -> tuple[Any, ...]:
    """What an operator does about one parked event."""
    found = conn.execute(SEQ, {"operation": operation}).fetchone()
    seq = 0 if found is None else found[0]
    row = conn.execute(statement, {"destination": at, "seq": seq, "actor": actor, "why": why}).fetchone()
    assert row is not None
    return tuple(row)


def test_a_retried_event_and_those_behind_it_are_published_in_order_by_the_owner(database: Database) -> None:
    picky = Picky("k-2")
    broker = MemoryBroker(picky)
    accepted(database, *[f"k-{n}" for n in range(1, 5)], key="k")
    with relaying(database, destination(broker)), database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 3 FROM fencepost.parked")
        assert broker.operations() == ["k-1"]  # too large: no automatic retry
        assert act(conn, RETRY, "k-2") == ("due", ["memory"])
        until(conn, "SELECT max(attempts) = 2 FROM fencepost.parked")  # refused again, and waits again
        picky.refused.clear()
        act(conn, RETRY, "k-2")
        until(conn, NONE)
        accepted(database, "k-5", key="k")
        assert arrived(broker.operations, 5) == [f"k-{n}" for n in range(1, 6)]
        assert conn.execute(DECISIONS).fetchall() == [("retry_parked", "ann", "mended", "k-2", "due")] * 2


def test_an_event_behind_another_stays_behind_it_when_it_is_retried(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1"))
    accepted(database, "k-1", "k-2", key="k")
    accepted(database, "other")
    relay_once(database, destination(broker))
    with database.connect(autocommit=True) as conn:
        act(conn, RETRY, "k-2")
        relay_once(database, destination(broker))
        assert broker.operations() == ["other"]
        assert [r[1] for r in conn.execute(PARKED)] == ["k-1", "k-2"]


def test_a_skipped_event_leaves_for_good_and_its_key_flows_again(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1", "k-3"))
    accepted(database, "k-1", "k-2", "k-3", "k-4", key="k")
    with relaying(database, destination(broker)), database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 4 FROM fencepost.parked")
        act(conn, SKIP, "k-1", why="a test event")
        assert arrived(broker.operations, 1) == ["k-2"]
        until(conn, "SELECT count(*) = 2 FROM fencepost.parked")
        act(conn, SKIP, "k-3")
        until(conn, NONE)
        accepted(database, "k-5", key="k")
        assert arrived(broker.operations, 3) == ["k-2", "k-4", "k-5"]
        found = conn.execute(DECISIONS).fetchall()
        assert found[0] == ("skip_parked", "ann", "a test event", "k-1", "skipped") and len(found) == 2
        ref = str(value(conn, "SELECT min(evidence_ref) FROM fencepost.decision"))
        assert ref.startswith("memory/") and ref.endswith("relay.changed.v1 too_large")


def test_what_an_owner_sets_aside_behind_an_event_that_was_just_skipped_is_not_stuck(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1"))
    # Nothing is looked up again for a minute: the owner still believes that the key waits.
    slow = replace(BRISK, lease=90.0, refresh=60.0)
    accepted(database, "k-1", key="k")
    with relaying(database, destination(broker), pace=slow), database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 1 FROM fencepost.parked")
        act(conn, SKIP, "k-1")
        accepted(database, "k-2", "k-3", key="k")
        until(conn, NONE)
        accepted(database, "k-4", key="k")
        assert arrived(broker.operations, 3) == ["k-2", "k-3", "k-4"]


def test_a_late_event_with_a_lower_number_than_the_parked_head_of_its_key_is_not_stuck(database: Database) -> None:
    broker = MemoryBroker(Picky("second"))
    with database.connect() as late, database.connect(autocommit=True) as conn:
        accept(late, "first", key="k")
        accepted(database, "second", key="k")
        with relaying(database, destination(broker)):
            until(conn, "SELECT count(*) = 1 FROM fencepost.parked")
            late.commit()
            assert arrived(broker.operations, 1) == ["first"]
            until(conn, "SELECT count(*) = 1 FROM fencepost.parked")


def test_an_event_without_a_route_goes_to_every_destination_that_has_one_now(database: Database) -> None:
    one, two = MemoryBroker(Picky("k-2")), MemoryBroker()
    relay_once(database, destination(one, "one", [ELSE]))
    relay_once(database, destination(two, "two", [ELSE]))
    accepted(database, "k-1", key="k")
    relay_once(database, NoRoute())
    with database.connect(autocommit=True) as conn:
        assert conn.execute(PARKED).fetchall() == [("-", "k-1", "no_route")]
        with pytest.raises(InvalidInput) as refused:
            act(conn, RETRY, "k-1", at="-")
        assert refused.value.field == "type" and "relay.changed" in str(refused.value)
        for name, broker in (("one", one), ("two", two)):
            Destination(name, "kafka", [TAKES], lambda _, b=broker: b, accept_routes=True).register(conn)  # type: ignore[misc]
        accepted(database, "k-2", "k-3", key="k")
        relay_once(database, destination(one, "one", [TAKES]))
        assert [r[1] for r in conn.execute(PARKED)] == ["k-1", "k-2", "k-3"]
        assert act(conn, RETRY, "k-1", at="-") == ("moved", ["one", "two"])
        # At the first one it goes before what is parked of its key there, for its number is lower.
        assert conn.execute(PARKED).fetchall() == [
            ("one", "k-1", "no_route"),
            ("one", "k-2", "too_large"),
            ("one", "k-3", "behind"),
            ("two", "k-1", "no_route"),
        ]
        with pytest.raises(InvalidInput) as refused:
            act(conn, RETRY, "k-1", at="-")
        assert refused.value.field == "seq"
        relay_once(database, destination(one, "one", [TAKES]))
        relay_once(database, destination(two, "two", [TAKES]))
        assert one.operations() == ["k-1"] and sorted(two.operations()) == ["k-1", "k-2", "k-3"]
        assert conn.execute(DECISIONS).fetchall()[-1] == ("retry_parked", "ann", "mended", "k-1", "moved to one, two")


def test_a_running_owner_notices_events_that_were_moved_to_it(database: Database) -> None:
    broker = MemoryBroker()
    relay_once(database, destination(broker, routes=[ELSE]))
    accepted(database, "a")
    relay_once(database, NoRoute())
    with database.connect(autocommit=True) as conn:
        Destination("memory", "kafka", [TAKES], lambda _: broker, accept_routes=True).register(conn)
        with relaying(database, destination(broker, routes=[TAKES])):
            accepted(database, "b")
            arrived(broker.operations, 1)
            act(conn, RETRY, "a", at="-")
            assert arrived(broker.operations, 2) == ["b", "a"]
            until(conn, NONE)


def test_an_event_parked_where_its_route_was_removed_stays_until_a_route_comes_back(database: Database) -> None:
    broker, other = MemoryBroker(), MemoryBroker()
    relay_once(database, destination(broker, routes=[TAKES]))
    accepted(database, "a", "b", key="k")
    relay_once(database, Destination("memory", "kafka", [ELSE], lambda _: broker, accept_routes=True))
    with database.connect(autocommit=True) as conn:
        assert conn.execute(PARKED).fetchall() == [("memory", "a", "no_route"), ("memory", "b", "no_route")]
        with pytest.raises(InvalidInput) as refused:
            act(conn, RETRY, "a")
        assert refused.value.field == "type"
        # Another destination has a route: the first event goes there; the second one where its own route comes back.
        relay_once(database, destination(other, "other", [TAKES]))
        assert act(conn, RETRY, "a") == ("moved", ["other"])
        relay_once(database, destination(other, "other", [TAKES]))
        assert other.operations() == ["a"]
        # The next of the key was tried, and still has no route.
        relay_once(database, destination(broker, routes=[ELSE]))
        assert conn.execute(PARKED).fetchall() == [("memory", "b", "no_route")]
        relay_once(database, Destination("memory", "kafka", [TAKES], lambda _: broker, accept_routes=True))
        assert act(conn, RETRY, "b") == ("due", ["memory"])
        relay_once(database, destination(broker, routes=[TAKES]))
        assert broker.operations() == ["b"] and value(conn, NONE)


def test_a_destination_that_answers_for_an_event_gets_no_second_copy_of_it(database: Database) -> None:
    one, two = MemoryBroker(), MemoryBroker()
    relay_once(database, destination(one, "one", [TAKES]))
    relay_once(database, destination(two, "two", [TAKES]))
    accepted(database, "a")
    relay_once(database, Destination("one", "kafka", [ELSE], lambda _: one, accept_routes=True))
    with database.connect(autocommit=True) as conn:
        assert conn.execute(PARKED).fetchall() == [("one", "a", "no_route")]
        with pytest.raises(InvalidInput) as refused:
            act(conn, RETRY, "a", at="one")
        assert refused.value.field == "type"
        relay_once(database, destination(two, "two", [TAKES]))
        assert two.operations() == ["a"]
        act(conn, SKIP, "a", at="one")
        assert value(conn, NONE)


def test_due_events_whose_route_has_gone_keep_nothing_else_waiting(database: Database) -> None:
    """More of them than are looked at together: they become no_route, and what has a route is tried."""
    broken = threading.Event()
    broken.set()

    def verdict(row: OutboxRow) -> Outcome:
        if broken.is_set() and row.type != "other.thing":
            return Outcome(Answer.REFUSED, ParkReason.NO_SUCH_TOPIC)
        return TOO_LARGE if broken.is_set() else CONFIRMED

    broker = MemoryBroker(verdict)
    accepted(database, *[f"e{n}" for n in range(120)])
    with database.connect() as writer:
        outbox.enqueue(writer, Other(tenant="acme", operation="wanted"))
    relay_once(database, destination(broker, routes=[TAKES, ELSE]))
    broken.clear()
    with database.connect(autocommit=True) as conn:
        act(conn, RETRY, "wanted")
        conn.execute("UPDATE fencepost.parked SET next_try_at = now() - interval '1 hour' WHERE operation <> 'wanted'")
        relay_once(database, Destination("memory", "kafka", [ELSE], lambda _: broker, accept_routes=True))
        assert broker.operations() == ["wanted"]
        assert (
            value(conn, "SELECT count(*) FROM fencepost.parked WHERE reason = 'no_route' AND next_try_at IS NULL")
            == 120
        )


@pytest.mark.parametrize("statement", [RETRY, SKIP])
def test_acts_are_refused_without_an_event_an_actor_or_a_reason(database: Database, statement: LiteralString) -> None:
    broker = MemoryBroker(Picky("a"))
    accepted(database, "a")
    relay_once(database, destination(broker))
    with database.connect(autocommit=True) as conn:
        for operation, at, actor, why, field in (
            ("nobody", "memory", "ann", "mended", "seq"),
            ("a", "nowhere", "ann", "mended", "seq"),
            ("a", "memory", "", "mended", "actor"),
            ("a", "memory", "ann", " padded", "reason"),
        ):
            with pytest.raises(InvalidInput) as refused:
                act(conn, statement, operation, at=at, actor=actor, why=why)
            assert refused.value.field == field
        assert value(conn, "SELECT count(*) FROM fencepost.decision") == 0
        act(conn, statement, "a")  # the control
        assert value(conn, "SELECT count(*) FROM fencepost.decision") == 1


@pytest.mark.parametrize("statement", [RETRY, SKIP])
def test_a_disarmed_database_takes_no_act(database: Database, statement: LiteralString) -> None:
    broker = MemoryBroker(Picky("a"))
    accepted(database, "a")
    relay_once(database, destination(broker))
    with database.connect() as conn:
        with conn.transaction(force_rollback=True):
            act(conn, statement, "a")  # the control
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
        with pytest.raises(NotArmed):
            act(conn, statement, "a")


def passing(broker: MemoryBroker, *, accept: bool = False) -> Destination:
    """A destination whose refused events let their key pass."""
    return Destination("memory", "kafka", EVERYTHING, lambda _: broker, on_refusal="pass", accept_routes=accept)


def test_where_keys_pass_a_refused_event_is_parked_and_later_ones_of_its_key_go_on(database: Database) -> None:
    picky = Picky("k-2", "k-4")
    broker = MemoryBroker(picky)
    accepted(database, *[f"k-{n}" for n in range(1, 6)], key="k")
    with relaying(database, passing(broker)), database.connect(autocommit=True) as conn:
        assert arrived(broker.operations, 3) == ["k-1", "k-3", "k-5"]
        until(conn, "SELECT count(*) = 2 FROM fencepost.parked")
        accepted(database, "k-6", key="k")
        assert arrived(broker.operations, 4)[3:] == ["k-6"]
        assert [r[1:] for r in conn.execute(PARKED)] == [("k-2", "too_large"), ("k-4", "too_large")]
        # Each is retried on its own: the first one need not get through.
        picky.refused = {"k-2"}
        act(conn, RETRY, "k-4")
        assert arrived(broker.operations, 5)[4:] == ["k-4"]
        until(conn, "SELECT count(*) = 1 FROM fencepost.parked")


def test_the_policy_is_registered_with_the_routes_and_changes_only_when_it_is_accepted(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1"))
    accepted(database, "k-1", "k-2", "k-3", key="k")
    relay_once(database, destination(broker))
    assert broker.operations() == []
    with database.connect(autocommit=True) as conn:
        with pytest.raises(RoutesChanged) as refused:
            passing(broker).register(conn)
        assert refused.value.field == "on_refusal"
        # Accepted: what waited behind waits no longer.
        relay_once(database, passing(broker, accept=True))
        assert broker.operations() == ["k-2", "k-3"]
        assert [r[1] for r in conn.execute(PARKED)] == ["k-1"]
        with pytest.raises(InvalidInput) as wrong:
            conn.execute(
                "SELECT fencepost.register_destination('m', 'kafka', '[{\"match\": \"*\"}]', false, 'perhaps')"
            )
        assert wrong.value.field == "on_refusal"


def test_relays_may_not_act_and_operators_may_not_relay() -> None:
    assert grants.FUNCTIONS["retry_parked"] == grants.FUNCTIONS["skip_parked"] == ("reconciler",)
    assert grants.FUNCTIONS["remove_destination"] == ("reconciler",)
    assert "reconciler" not in grants.FUNCTIONS["retried"] + grants.FUNCTIONS["ack"]


def test_an_owner_looks_at_keys_again_only_where_an_operator_acted(database: Database) -> None:
    registered(database)
    broker = MemoryBroker(Picky("k-1"))
    accepted(database, "k-1", key="k")
    relay_once(database, destination(broker))
    with database.connect(autocommit=True) as conn:
        lease = owner_of(database)
        lease.refresh(conn)
        first = parking.held_keys(conn, "memory", {s: h.acts for s, h in lease.held.items()})
        assert len(first) == 16 and [k for _, keys in first.values() for k in keys] == [("acme", "k")]
        known = {slot: acts for slot, (acts, _) in first.items()}
        assert parking.held_keys(conn, "memory", known) == {}
        act(conn, SKIP, "k-1")
        ((slot, (acts, keys)),) = parking.held_keys(conn, "memory", known).items()
        assert (acts, keys) == (known[slot] + 1, set())


def test_an_act_waits_for_an_ack_of_its_slot_and_sees_what_that_parked(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1"))
    accepted(database, "k-1", key="k")
    relay_once(database, destination(broker))
    with database.connect() as ack, database.connect(autocommit=True) as conn:
        ack.execute("SELECT FROM fencepost.slot WHERE destination = 'memory' ORDER BY slot FOR NO KEY UPDATE")
        done = threading.Event()

        def skip() -> None:
            with database.connect(autocommit=True) as operator:
                act(operator, SKIP, "k-1")
            done.set()

        thread = threading.Thread(target=skip, daemon=True)
        thread.start()
        until(
            conn,
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%skip_parked%'"
            " AND datname = current_database()",
        )
        assert not done.is_set()
        ack.commit()
        thread.join(10)
    wait_for(done.is_set, 1, "the act")


RENEWED: LiteralString = """
SELECT bool_and(r.lease_until - interval '4 seconds' > (SELECT max(d.at) FROM fencepost.decision AS d))
FROM fencepost.relay AS r"""


def test_what_was_set_aside_and_is_not_recorded_yet_still_holds_its_key(database: Database) -> None:
    broker = MemoryBroker(Picky("k-1"))
    accepted(database, "k-1", key="k")
    with relaying(database, destination(broker)), database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) = 1 FROM fencepost.parked")
        broker.answering.clear()
        with database.connect() as writer:  # one page: k-2 is set aside behind k-1, and that cannot be recorded yet
            accept(writer, "k-2", key="k")
            accept(writer, "x")
        arrived(broker.operations, 1)
        act(conn, SKIP, "k-1")
        until(conn, RENEWED)
        with database.connect() as writer:
            accept(writer, "k-3", key="k")
            accept(writer, "y")
        arrived(broker.operations, 2)
        broker.answering.set()
        until(conn, NONE)
        assert [o for o in arrived(broker.operations, 4) if o.startswith("k")] == ["k-2", "k-3"]
