"""Faults of the database's and the broker's connection: our own deadlines fire, the loops move, and nothing is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conformance.harness import Arrived
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.relay.destination import Destination
from fencepost.relay.outbox import Accepted
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Answer, OutboxRow, Outcome, Publisher, Route
from fencepost.relay.rabbitmq import RabbitPublisher
from fencepost.relay.recycling import Recycler
from fencepost.relay.sidecar import Relay
from fencepost.schemas import migrate
from fencepost.schemas.health import HealthAddress
from stack.postgres import PostgresServer
from support.brokers import left
from support.database import Database
from support.health import LOOPBACK, ask, becomes, metric, readiness, running
from support.memory_broker import MemoryBroker, confirm
from support.processes import wait_for
from support.proxy import Proxy
from support.relaying import Noted, enqueue
from support.relays import BRISK, destination, relay_once, unacked, value
from support.services import Services

HERE = HealthAddress(LOOPBACK, 0)
# A silent database is left after a second.
PACE = replace(BRISK, answer=1.0)
# Where neither the database nor the broker is away: nobody waits for one of these.
PATIENT = replace(BRISK, confirm=20.0, lease=60.0)
DUTY: LiteralString = "SELECT count(*) = 1 FROM fencepost.duty WHERE name = 'recycling'"
READERS: LiteralString = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'fencepost' AND query = 'COMMIT'"""
OWNERS: LiteralString = (
    "SELECT count(DISTINCT owner) FROM fencepost.slot WHERE destination = 'memory' AND owner IS NOT NULL"
)
END_OTHERS: LiteralString = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"""
LEFT_OPEN: LiteralString = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'
AND state_change < clock_timestamp() - interval '1 second'"""


@pytest.fixture
def proxy(database18: Database) -> Iterator[Proxy]:
    """In front of the database."""
    with Proxy(int(str(conninfo_to_dict(database18.dsn)["port"]))) as made:
        yield made


def relay(dsn: str, to: Destination, *, state: Path | None = None, pace: Pace = PACE) -> Relay:
    return Relay(dsn, [to], state=state, pace=pace, health=HERE, look=0.1, stalled=20)


def through(proxy: Proxy, database: Database) -> str:
    return make_conninfo(database.dsn, port=proxy.port)


def alive_until(made: Relay, found: Callable[[], bool], within: float, what: str) -> None:
    """Waits, and insists that `/livez` says yes all the time."""

    def look() -> bool:
        assert ask(made.health_port, "/livez").status == 200
        return found()

    wait_for(look, within, what)


def acked(made: Relay) -> int:
    """How many events this relay has published and recorded."""
    return made.loops[0].counters.published


def in_key_order(rows: list[OutboxRow]) -> bool:
    """First arrivals of every key."""
    seen: set[str] = set()
    last: dict[str, int] = {}
    for row in rows:
        if row.operation not in seen:
            seen.add(row.operation)
            if row.seq < last.get(row.ordering_key, 0):
                return False
            last[row.ordering_key] = row.seq
    return True


# -- the database ----------------------------------------------------------------------------------------------------


def test_a_black_holed_database_ends_the_lease_by_our_own_deadline_and_another_relay_goes_on(
    database18: Database, proxy: Proxy
) -> None:
    first, second = MemoryBroker(), MemoryBroker()
    before = enqueue(database18, 10)
    with running(relay(through(proxy, database18), destination(first))) as made:
        becomes(made, "ready")
        wait_for(lambda: {*first.operations()} == {*before} and unacked(database18, "memory") == 0, 20, "the control")
        # A relay whose database was slow may have sent some again, but nothing that is recorded as published.
        sent = first.operations()
        proxy.blackhole()
        alive_until(made, lambda: not made.loops[0].leased, 15, "the lease to be given up")
        # The second connection may still wait for its own answer: what went wrong is told once both are closed.
        alive_until(made, lambda: made.loops[0].counters.trouble != "", 15, "the relay to say why")
        alive_until(made, lambda: readiness(made)["database"] == "unreachable", 20, "/readyz to say so")
        with running(relay(database18.dsn, destination(second))) as other:
            after = enqueue(database18, 10, first=10)
            alive_until(made, lambda: {*second.operations()} >= {*after}, 30, "the other relay to take over")
            assert set(second.operations()) == set(after)
            proxy.heal()
            becomes(made, "ready")
            becomes(other, "ready")
            last = enqueue(database18, 20, first=20)
            wait_for(lambda: {*last} <= {*first.operations(), *second.operations()}, 30, "both to share the rest")
    found = [*first.operations(), *second.operations()]
    assert {*found} == {*before, *after, *last}
    assert all(found.count(operation) == sent.count(operation) for operation in before)


def test_a_recycler_whose_database_is_silent_leaves_that_connection(
    database18: Database, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    recycler = Recycler(through(proxy, database18), seconds=0.05, answer=1.0)
    with database18.connect(autocommit=True) as conn, caplog.at_level("WARNING", "fencepost.relay.recycling"):
        recycler.start()
        try:
            wait_for(lambda: value(conn, DUTY), 10, "the control: it holds the duty")
            proxy.blackhole()
            wait_for(lambda: "NoAnswer" in caplog.text, 15, "the deadline")
            proxy.heal()
            conn.execute("DELETE FROM fencepost.duty WHERE name = 'recycling'")
            wait_for(lambda: value(conn, DUTY), 15, "another turn")
        finally:
            recycler.stop()


def test_an_idle_relay_whose_connections_died_without_a_sign_publishes_what_comes_next(
    database18: Database, proxy: Proxy
) -> None:
    broker = MemoryBroker()
    with running(relay(through(proxy, database18), destination(broker))) as made:
        becomes(made, "ready")
        proxy.blackhole()
        alive_until(made, lambda: not made.loops[0].leased, 15, "the deadline")
        proxy.cut()
        proxy.heal()
        committed = enqueue(database18, 3)
        alive_until(made, lambda: {*broker.operations()} == {*committed}, 30, "the events")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_connections_that_are_cut_again_and_again_lose_nothing_and_keep_the_order(
    database18: Database, proxy: Proxy, reset: bool
) -> None:
    broker = MemoryBroker()
    committed: list[str] = []
    with running(relay(through(proxy, database18), destination(broker))) as made:
        becomes(made, "ready")
        for round_ in range(5):
            committed += enqueue(database18, 20, first=20 * round_)
            wait_for(lambda: len(broker.arrived) > 0, 20, "something to be under way")
            proxy.cut(reset=reset)
        alive_until(made, lambda: {*committed} <= {*broker.operations()}, 30, "everything to arrive")
    assert {*broker.operations()} == {*committed}
    assert in_key_order(broker.arrived)


def test_an_ack_whose_answer_is_lost_is_neither_believed_nor_repeated_as_something_else(
    database18: Database, proxy: Proxy
) -> None:
    broker = MemoryBroker()
    # Each commit may be sent by itself, and none of these sends is answered.
    pace = replace(PACE, ahead=20)
    with running(relay(through(proxy, database18), destination(broker), pace=pace)) as made:
        becomes(made, "ready")
        before = enqueue(database18, 5)
        wait_for(lambda: {*broker.operations()} == {*before} and unacked(database18, "memory") == 0, 20, "the control")
        broker.answering.clear()
        under_way = enqueue(database18, 5, first=5)
        wait_for(lambda: {*broker.operations()} == {*before, *under_way}, 20, "the events to be sent")
        sent = broker.operations()
        broker.answering.set()
        proxy.drop_replies()
        alive_until(made, lambda: made.loops[0].counters.trouble == "NoAnswer", 15, "the deadline")
        proxy.cut()
        proxy.heal()
        becomes(made, "ready")
        enqueue(database18, 5, first=10)
        everything = {f"op-{n}" for n in range(15)}
        wait_for(lambda: {*broker.operations()} >= everything, 20, "the relay to go on")
    # Only what was not known to be acked may have come again.
    found = broker.operations()
    assert {*found} == everything
    assert all(found.count(operation) == sent.count(operation) for operation in before)
    assert in_key_order(broker.arrived)


def test_an_accepted_event_whose_commit_was_not_answered_is_accepted_once(database18: Database, proxy: Proxy) -> None:
    def accept(conn: psycopg.Connection[Any], n: int) -> Accepted:
        return outbox.enqueue(conn, Noted(tenant="acme", operation=f"op-{n}", n=n))

    def lose() -> None:
        wait_for(lambda: proxy.dropped_bytes > 0, 20, "the answer to be lost")
        proxy.cut()

    with psycopg.connect(through(proxy, database18), connect_timeout=5) as conn:
        assert accept(conn, 1).created  # the control: a commit that is answered
        conn.commit()
        unknown = accept(conn, 2)
        proxy.drop_replies()
        ending = threading.Thread(target=lose)
        ending.start()
        with pytest.raises(psycopg.OperationalError):
            conn.commit()
        ending.join(20)
    proxy.heal()
    with psycopg.connect(through(proxy, database18), connect_timeout=5) as conn:
        again = accept(conn, 2)
        conn.commit()
    assert again == Accepted(unknown.event_id, created=False)
    broker = MemoryBroker()
    relay_once(database18, destination(broker))
    assert sorted(broker.operations()) == ["op-1", "op-2"]


@pytest.mark.parametrize("pool_size", [1, 4])
def test_relays_behind_a_transaction_pooler_share_its_connections_and_survive_the_loss_of_all_of_them(
    database18: Database, services: Services, pool_size: int
) -> None:
    pooled = services.pgbouncer("18", pool_size=pool_size).dsn(database18.dsn)
    brokers = MemoryBroker(), MemoryBroker()
    first, second = (relay(pooled, destination(broker)) for broker in brokers)

    def arrived() -> list[str]:
        return [operation for broker in brokers for operation in broker.operations()]

    with running(first), running(second), database18.connect(autocommit=True) as conn:
        wait_for(lambda: value(conn, OWNERS) == 2, 30, "both to own slots")
        before = enqueue(database18, 30)
        wait_for(lambda: {*arrived()} == {*before} and unacked(database18, "memory") == 0, 30, "the control")
        # A relay that had to wait for the pool may have sent some again, but nothing that is recorded as published.
        sent = arrived()
        assert value(conn, END_OTHERS) > 0
        after = enqueue(database18, 30, first=30)
        wait_for(lambda: {*arrived()} == {*before, *after}, 40, "the rest")
        becomes(first, "ready")
        becomes(second, "ready")
        wait_for(lambda: value(conn, LEFT_OPEN) == 0, 20, "no transaction to be left open")
    assert all(arrived().count(operation) == sent.count(operation) for operation in before)
    assert all(in_key_order(broker.arrived) for broker in brokers)


def test_a_slow_database_only_makes_it_slower(database18: Database, proxy: Proxy) -> None:
    broker = MemoryBroker()
    committed = enqueue(database18, 30)
    proxy.delay(0.05)
    with running(relay(through(proxy, database18), destination(broker), pace=PATIENT)) as made:
        alive_until(made, lambda: len(broker.arrived) == 30, 40, "everything to arrive")
    assert sorted(broker.operations()) == sorted(committed)
    assert in_key_order(broker.arrived)


def test_a_reader_that_dies_alone_is_noticed(database18: Database) -> None:
    broker = MemoryBroker()
    with running(relay(database18.dsn, destination(broker))) as made, database18.connect(autocommit=True) as conn:
        enqueue(database18, 5)
        wait_for(lambda: len(broker.arrived) >= 5 and unacked(database18, "memory") == 0, 20, "the control")
        assert value(conn, READERS) >= 1
        enqueue(database18, 5, first=5)
        alive_until(made, lambda: len({*broker.operations()}) == 10, 20, "the relay to go on")
    assert {*broker.operations()} == {f"op-{n}" for n in range(10)}


def test_a_relay_told_to_stop_while_the_database_is_silent_leaves_within_its_drain_time(
    database18: Database, proxy: Proxy
) -> None:
    # It recycles in its own time.
    made = relay(through(proxy, database18), destination(MemoryBroker()), pace=replace(PACE, recycle=600.0))
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    wait_for(lambda: made.health_port > 0, 10, "health to be served")
    becomes(made, "ready")
    proxy.blackhole()
    began = time.monotonic()
    made.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert time.monotonic() - began < PACE.drain + PACE.confirm + 6


# -- the broker ------------------------------------------------------------------------------------------------------


class Behind:
    """RabbitMQ behind a proxy."""

    def __init__(self, services: Services) -> None:
        self._rabbit = services.rabbitmq()
        self.oracle = OnRabbit(self._rabbit)
        self.route: Route = self.oracle.destination()
        parts = urlsplit(self._rabbit.url)
        assert parts.port is not None
        self.proxy = Proxy(parts.port)
        self._through = self._rabbit.url.replace(f":{parts.port}", f":{self.proxy.port}")

    def destination(self) -> Destination:
        """A destination that leads through the proxy."""
        return Destination("events", "rabbitmq", [self.route], self._made)

    def read(self, count: int) -> list[Arrived]:
        """What arrived, read past the proxy."""
        return self.oracle.read(self.route, count)

    def queued(self) -> int:
        """How many messages are stored."""
        return left(self._rabbit, self.route.to)

    def _made(self, source: str) -> Publisher:
        return RabbitPublisher(self._through, source=source)


@pytest.fixture
def behind(services: Services) -> Iterator[Behind]:
    made = Behind(services)
    with made.proxy:
        yield made


def arrived_in_order(found: list[Arrived]) -> bool:
    """First arrivals of every key."""
    seen: set[str] = set()
    last: dict[str, int] = {}
    for one in found:
        e = one.envelope
        if e.operation not in seen:
            seen.add(e.operation)
            if e.sequence < last.get(e.ordering_key, 0):
                return False
            last[e.ordering_key] = e.sequence
    return True


def published(made: Relay) -> float:
    return metric(made, 'fencepost_relay_published_total{destination="events"}') or 0


def test_a_broker_that_never_answers_is_given_up_by_our_own_deadline_and_nothing_counts_as_published(
    database18: Database, behind: Behind
) -> None:
    with running(relay(database18.dsn, behind.destination(), pace=BRISK)) as made:
        becomes(made, "ready")
        enqueue(database18, 5)
        wait_for(lambda: published(made) == 5, 20, "the control")
        behind.proxy.blackhole()
        enqueue(database18, 10, first=5)
        alive_until(made, lambda: made.loops[0].counters.trouble != "", 20, "the deadline of the confirm")
        alive_until(made, lambda: readiness(made)["state"] == "broker", 20, "/readyz to say so")
        document = readiness(made)["destinations"]["events"]
        assert (document["broker"], document["leased"]) == ("unreachable", True)
        assert published(made) == 5
        behind.proxy.heal()
        alive_until(made, lambda: published(made) == 15, 60, "everything to be confirmed")
        becomes(made, "ready")
    found = behind.read(15)
    assert {one.envelope.operation for one in found} == {f"op-{n}" for n in range(15)}
    assert arrived_in_order(found)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_broker_connection_that_is_cut_again_and_again_loses_nothing_and_keeps_the_order(
    database18: Database, behind: Behind, reset: bool
) -> None:
    with running(relay(database18.dsn, behind.destination(), pace=BRISK)) as made:
        becomes(made, "ready")
        for round_ in range(4):
            enqueue(database18, 20, first=20 * round_)
            behind.proxy.cut(reset=reset)
        alive_until(made, lambda: published(made) == 80, 60, "everything to be confirmed")
    found = behind.read(80)
    assert {one.envelope.operation for one in found} == {f"op-{n}" for n in range(80)}
    assert arrived_in_order(found)


def test_confirms_that_are_lost_on_their_way_are_asked_for_again_with_the_same_bytes(
    database18: Database, behind: Behind
) -> None:
    with running(relay(database18.dsn, behind.destination(), pace=BRISK)) as made:
        becomes(made, "ready")
        enqueue(database18, 5)
        wait_for(lambda: published(made) == 5, 20, "the control")
        behind.proxy.drop_replies()
        enqueue(database18, 5, first=5)
        wait_for(lambda: behind.queued() == 10, 20, "the events to be stored")
        wait_for(lambda: behind.proxy.dropped_bytes > 0, 20, "confirms to be lost")
        alive_until(made, lambda: made.loops[0].counters.trouble != "", 20, "the deadline of the confirm")
        behind.proxy.cut()
        behind.proxy.heal()
        alive_until(made, lambda: published(made) == 10, 60, "everything to be confirmed")
    found = behind.read(10)
    wires: dict[str, set[tuple[object, ...]]] = {}
    for one in found:
        wires.setdefault(one.envelope.operation, set()).add(one.wire)
    assert set(wires) == {f"op-{n}" for n in range(10)}
    assert all(len(copies) == 1 for copies in wires.values())
    assert len(found) > 10 and arrived_in_order(found)


def test_a_slow_broker_only_makes_it_slower(database18: Database, behind: Behind) -> None:
    behind.proxy.delay(0.03)
    with running(relay(database18.dsn, behind.destination(), pace=PATIENT)) as made:
        enqueue(database18, 30)
        alive_until(made, lambda: published(made) == 30, 40, "everything to be confirmed")
        assert metric(made, 'fencepost_relay_resent_total{destination="events"}') == 0
    assert arrived_in_order(behind.read(30))


# -- failover --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("major", ["18", "15"])
def test_a_promoted_standby_publishes_nothing_and_says_that_it_is_disarmed(major: str, tmp_path: Path) -> None:
    blocked = threading.Event()

    def verdict(row: OutboxRow) -> Outcome:
        return Outcome(Answer.NACKED, detail="blocked") if blocked.is_set() else confirm(row)

    broker = MemoryBroker(verdict)
    with PostgresServer(major) as primary, PostgresServer(major, standby_of=primary) as standby:
        migrate.apply(primary.dsn, state=tmp_path)
        either = make_conninfo(
            primary.dsn,
            host=f"{LOOPBACK},{LOOPBACK}",
            port=f"{primary.port},{standby.port}",
            target_session_attrs="read-write",
        )
        with running(relay(either, destination(broker), state=tmp_path, pace=PATIENT)) as made:
            becomes(made, "ready", 60)
            enqueue(Database(primary.dsn, tmp_path), 5)
            wait_for(lambda: acked(made) == 5, 30, "the control")
            blocked.set()
            enqueue(Database(primary.dsn, tmp_path), 5, first=5)
            with Database(standby.dsn, tmp_path).connect(autocommit=True) as conn:
                wait_for(
                    lambda: value(conn, "SELECT count(*) FROM fencepost.outbox") == 10, 30, "the standby to follow"
                )
            primary.kill()
            standby.promote()
            blocked.clear()
            document = becomes(made, "disarmed", 60)
            assert document["database"] == "disarmed"
            assert ask(made.health_port, "/readyz").status == 503
            alive_until(made, lambda: "not armed" in made.loops[0].counters.trouble, 30, "the loop to be refused")
            with Database(standby.dsn, tmp_path).connect(autocommit=True) as conn:
                assert value(conn, "SELECT count(*) FROM fencepost.outbox") == 10
                assert value(conn, "SELECT NOT fencepost.armed()") is True
            assert len(broker.arrived) == 5
