"""The relay as people run it, on every broker: what is committed arrives, what is refused is set aside, nothing else moves."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aio_pika.abc import AbstractChannel

from conformance.conftest import BROKERS
from conformance.harness import Arrived, Broker
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.relay.publisher import Route
from fencepost.relay.sidecar import Relay
from fencepost.schemas import migrate
from fencepost.schemas.errors import NotArmed, Unreachable
from fencepost.schemas.event import Event
from stack.postgres import PostgresServer
from support.database import Database
from support.processes import wait_for
from support.relaying import PACE, PATIENT, Noted, child, enqueue, relay
from support.services import Services


class Lost(Event, type="test.lost", version=1):
    """An event of another type."""


@pytest.fixture(params=sorted(BROKERS))
def broker(request: pytest.FixtureRequest, services: Services) -> Broker:
    name: str = request.param
    return BROKERS[name](services)


@contextmanager
def running(under_test: Relay) -> Generator[Relay]:
    thread = threading.Thread(target=under_test.run, daemon=True)
    thread.start()
    try:
        yield under_test
    finally:
        under_test.stop()
        thread.join(30)
        assert not thread.is_alive()


def operations(arrived: list[Arrived]) -> list[str]:
    return [a.envelope.operation for a in arrived]


def count(database: Database, query: str) -> int:
    with database.connect(autocommit=True) as conn:
        row = conn.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


def in_key_order(arrived: list[Arrived]) -> bool:
    """First arrivals of every key, as each message says which one it is."""
    seen: set[str] = set()
    last: dict[str, int] = {}
    for a in arrived:
        if a.envelope.operation in seen:
            continue
        seen.add(a.envelope.operation)
        if a.envelope.sequence < last.get(a.envelope.ordering_key, 0):
            return False
        last[a.envelope.ordering_key] = a.envelope.sequence
    return True


def test_what_is_committed_arrives_verified_and_what_is_rolled_back_does_not(
    database: Database, broker: Broker, services: Services
) -> None:
    route = broker.destination()
    committed = enqueue(database, 40)
    with database.connect() as conn:
        outbox.enqueue(conn, Noted(tenant="acme", operation="rolled-back", n=0))
        conn.rollback()

    summary = relay(database.dsn, broker, services, [route]).run_once()

    arrived = broker.read(route, 40)
    assert sorted(operations(arrived)) == sorted(committed)
    assert in_key_order(arrived)
    for a in arrived:
        a.envelope.verify()
    assert summary.published == 40
    assert relay(database.dsn, broker, services, [route]).run_once().published == 0


def test_a_killed_relay_loses_nothing_and_repeats_only_what_was_not_acked(
    database18: Database, broker: Broker, services: Services, tmp_path: Path
) -> None:
    route = broker.destination()
    first = enqueue(database18, 20)
    relay(database18.dsn, broker, services, [route]).run_once()  # the control: these are acked
    second = enqueue(database18, 20, first=20)
    with database18.connect() as conn, child(database18.dsn, broker, services, route, tmp_path, pace=PATIENT) as victim:
        wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the victim to work")
        # Nobody can record an ack while these rows are locked, so the kill falls between confirm and ack.
        conn.execute("SELECT FROM fencepost.slot WHERE destination = 'events' FOR UPDATE")
        third = enqueue(database18, 20, first=40)
        wait_for(lambda: count(database18, WAITING) or None, 20, "the ack to wait for the lock")
        victim.kill()  # Crash here: [A]
        # The session of the dead process would still record the ack once the rows are free.
        count(database18, END_WAITING)
    with database18.connect(autocommit=True) as conn:
        conn.execute(LAPSE)

    with running(relay(database18.dsn, broker, services, [route])):
        wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the successor to be done")

    arrived = broker.read(route, 60)
    everything = operations(arrived)
    assert set(everything) == {*first, *second, *third}
    assert in_key_order(arrived)
    repeated = {o for o in everything if everything.count(o) > 1}
    assert repeated and repeated <= set(third)
    wires: dict[str, set[tuple[object, ...]]] = {}
    for a in arrived:
        wires.setdefault(a.envelope.operation, set()).add(a.wire)
    assert all(len(copies) == 1 for copies in wires.values()), "copies differ"


LAPSE = "UPDATE fencepost.relay SET lease_until = clock_timestamp() - interval '1 ms'"
WAITING = """SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%fencepost.ack(%'
             AND datname = current_database()"""
END_WAITING = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event_type = 'Lock'
                 AND query LIKE '%fencepost.ack(%' AND datname = current_database()"""
BACKLOG = """SELECT count(*) FROM fencepost.outbox o WHERE NOT EXISTS (
    SELECT FROM fencepost.ack a JOIN fencepost.tick t ON t.era = a.era AND t.n = a.acked_tick
    WHERE a.destination = 'events' AND a.slot = o.slot AND pg_visible_in_snapshot(o.xid, t.snap) AND o.seq <= t.hint)"""


def test_a_paused_relay_that_wakes_after_its_lease_changes_nothing_its_successor_recorded(
    database18: Database, broker: Broker, services: Services, tmp_path: Path
) -> None:
    route = broker.destination()
    enqueue(database18, 10)
    short = replace(PACE, lease=3.5)
    with child(database18.dsn, broker, services, route, tmp_path, pace=short) as sleeper:
        wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the first relay to work")  # the control
        sleeper.pause()
        enqueue(database18, 10, first=10)
        with running(relay(database18.dsn, broker, services, [route])):
            wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the second relay to take over")
            generations = count(database18, "SELECT max(generation) FROM fencepost.ack WHERE destination = 'events'")
            sleeper.resume()
            wait_for(lambda: count(database18, TWO_RELAYS) == 2 or None, 20, "the sleeper to lease again")
            enqueue(database18, 10, first=20)
            wait_for(lambda: count(database18, BACKLOG) == 0, 30, "both to finish")
            assert count(database18, "SELECT max(generation) FROM fencepost.ack") >= generations
            assert sleeper.terminate() == 0

    arrived = broker.read(route, 30)
    assert set(operations(arrived)) == {f"op-{n}" for n in range(30)}
    assert in_key_order(arrived)
    assert count(database18, BACKWARDS) == 0


TWO_RELAYS = "SELECT count(DISTINCT owner) FROM fencepost.slot WHERE destination = 'events' AND owner IS NOT NULL"
BACKWARDS = """SELECT count(*) FROM (SELECT generation, lag(generation) OVER (PARTITION BY destination, slot ORDER BY n) AS before
               FROM fencepost.ack) AS a WHERE generation < before"""


def test_a_refused_event_is_set_aside_with_its_reason_and_goes_out_once_it_can(
    database18: Database, broker: Broker, services: Services
) -> None:
    good, gone = broker.destination(), broker.missing()
    routes = [Route("test.noted", good.to, good.routing_key), Route("test.lost", gone.to, gone.routing_key)]
    with database18.connect() as conn:
        for n in range(3):
            outbox.enqueue(conn, Noted(tenant="acme", operation=f"good-{n}", ordering_key=f"g{n}", n=n))
        outbox.enqueue(conn, Lost(tenant="acme", operation="lost-0", ordering_key="shared"))
        outbox.enqueue(conn, Noted(tenant="acme", operation="behind", ordering_key="shared", n=9))

    summary = relay(database18.dsn, broker, services, routes).run_once()

    assert operations(sorted(broker.read(good, 3), key=lambda a: a.envelope.sequence)) == ["good-0", "good-1", "good-2"]
    assert summary.published == 3 and summary.parked == 2
    assert parked(database18) == [("lost-0", broker.features.missing.value), ("behind", "behind")]


def test_an_event_without_any_route_is_parked_and_never_silently_acked(
    database18: Database, broker: Broker, services: Services
) -> None:
    good = broker.destination()
    with database18.connect() as conn:
        outbox.enqueue(conn, Noted(tenant="acme", operation="routed", n=1))
        outbox.enqueue(conn, Lost(tenant="acme", operation="unrouted"))

    relay(database18.dsn, broker, services, [Route("test.noted", good.to, good.routing_key)]).run_once()

    assert operations(broker.read(good, 1)) == ["routed"]
    assert parked(database18) == [("unrouted", "no_route")]


def test_an_event_that_is_too_large_for_the_broker_is_parked_and_its_neighbours_pass(
    database18: Database, broker: Broker, services: Services
) -> None:
    route = broker.destination()
    with database18.connect() as conn:
        outbox.enqueue(conn, Noted(tenant="acme", operation="a", ordering_key="a", n=1))
        outbox.enqueue(conn, Noted(tenant="acme", operation="huge", ordering_key="b", n=1, pad="x" * 400_000))
        outbox.enqueue(conn, Noted(tenant="acme", operation="c", ordering_key="c", n=1))

    relay(database18.dsn, broker, services, [route]).run_once()

    assert sorted(operations(broker.read(route, 2))) == ["a", "c"]
    assert parked(database18) == [("huge", "too_large")]


def parked(database: Database) -> list[tuple[str, str]]:
    with database.connect(autocommit=True) as conn:
        return [(r[0], r[1]) for r in conn.execute("SELECT operation, reason FROM fencepost.parked ORDER BY seq")]


@pytest.mark.parametrize("pool_size", [1, 4])
def test_a_single_run_works_behind_a_transaction_pooler(
    database18: Database, broker: Broker, services: Services, pool_size: int
) -> None:
    route = broker.destination()
    pooled = services.pgbouncer("18", pool_size=pool_size).dsn(database18.dsn)
    committed = enqueue(database18, 30)

    relay(pooled, broker, services, [route]).run_once()

    assert sorted(operations(broker.read(route, 30))) == sorted(committed)


def test_no_transaction_stays_open_while_the_broker_is_silent_and_everything_arrives_afterwards(
    database18: Database, broker: Broker, services: Services
) -> None:
    if not broker.features.pausable:
        pytest.skip("the broker is not ours to pause")
    route = broker.destination()
    enqueue(database18, 5)
    # A transaction that is open while the broker is silent is as old as a confirm timeout in the end.
    pace = replace(PACE, lease=30.0, confirm=12.0)
    with running(relay(database18.dsn, broker, services, [route], pace=pace)) as under_test:
        wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the control")
        under_test.loops[0].counters.trouble = ""
        broker.pause()

        def waits() -> str:
            assert count(database18, OLD_TRANSACTIONS) == 0
            return under_test.loops[0].counters.trouble

        try:
            enqueue(database18, 10, first=5)
            wait_for(lambda: waits() or None, 60, "the relay to say why it waits")
            assert count(database18, BACKLOG) == 10
        finally:
            broker.resume()
        wait_for(lambda: count(database18, BACKLOG) == 0, 60, "the backlog to go out")
    assert set(operations(broker.read(route, 15))) == {f"op-{n}" for n in range(15)}


OLD_TRANSACTIONS = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost'
                      AND xact_start < clock_timestamp() - interval '6 seconds'"""


def test_a_relay_that_is_told_to_stop_during_an_outage_leaves_within_its_drain_time(
    database18: Database, broker: Broker, services: Services, tmp_path: Path
) -> None:
    if not broker.features.pausable:
        pytest.skip("the broker is not ours to pause")
    route = broker.destination()
    enqueue(database18, 5)
    with child(database18.dsn, broker, services, route, tmp_path) as under_test:
        wait_for(lambda: count(database18, BACKLOG) == 0, 30, "the control")
        broker.pause()
        try:
            enqueue(database18, 5, first=5)
            under_test.says("waits", 30)
            assert under_test.terminate(PACE.drain + PACE.confirm + 20) == 0
        finally:
            broker.resume()
    assert count(database18, BACKLOG) == 5
    relay(database18.dsn, broker, services, [route]).run_once()
    assert set(operations(broker.read(route, 10))) == {f"op-{n}" for n in range(10)}


@pytest.mark.parametrize("major", ["18", "15"])
def test_after_a_restart_of_the_database_the_relay_arms_it_again_and_goes_on(
    major: str, broker: Broker, services: Services, tmp_path: Path
) -> None:
    route = broker.destination()
    server = PostgresServer(major)
    server.start()
    try:
        migrate.apply(server.dsn, state=tmp_path)
        database = Database(server.dsn, tmp_path)
        enqueue(database, 5)
        with running(relay(server.dsn, broker, services, [route], state=tmp_path)):
            wait_for(lambda: count(database, BACKLOG) == 0, 30, "the control")
            server.restart()
            enqueue(database, 5, first=5)
            wait_for(lambda: count(database, BACKLOG) == 0, 30, "the relay to go on")
    finally:
        server.close()
    assert set(operations(broker.read(route, 10))) == {f"op-{n}" for n in range(10)}


def test_a_disarmed_database_publishes_nothing(database18: Database, broker: Broker, services: Services) -> None:
    route = broker.destination()
    enqueue(database18, 3)
    relay(database18.dsn, broker, services, [route]).run_once()  # the control
    enqueue(database18, 3, first=3)
    with database18.connect() as conn:
        conn.execute("DELETE FROM fencepost.ticket")

    with pytest.raises(NotArmed):
        relay(database18.dsn, broker, services, [route]).run_once()

    assert len(broker.read(route, 3)) == 3


def test_an_event_bound_by_a_reference_is_verified_by_it(
    database18: Database, broker: Broker, services: Services
) -> None:
    route = broker.destination()
    with database18.connect() as conn:
        outbox.enqueue(conn, Noted(tenant="acme", operation="by-reference", n=1), reference="s3://bucket/object@7")

    relay(database18.dsn, broker, services, [route]).run_once()

    (arrived,) = broker.read(route, 1)
    assert arrived.envelope.reference == "ref:s3://bucket/object@7"
    arrived.envelope.verify()


def test_a_single_run_against_a_silent_broker_ends_with_an_error_and_keeps_what_was_not_confirmed(
    database18: Database, broker: Broker, services: Services
) -> None:
    if not broker.features.pausable:
        pytest.skip("the broker is not ours to pause")
    route = broker.destination()
    enqueue(database18, 5)
    impatient = relay(database18.dsn, broker, services, [route], pace=PACE)
    impatient.loops[0].run(once=True)  # the control
    enqueue(database18, 5, first=5)
    broker.pause()
    try:
        with pytest.raises(Unreachable):
            impatient.run_once()
    finally:
        broker.resume()
    assert count(database18, BACKLOG) == 5
    relay(database18.dsn, broker, services, [route]).run_once()
    assert set(operations(broker.read(route, 10))) == {f"op-{n}" for n in range(10)}


def test_a_returned_event_is_shown_and_goes_out_exactly_once_after_its_binding_exists(
    database18: Database, services: Services
) -> None:
    on = OnRabbit(services.rabbitmq())
    route = on.route("test.noted")
    with database18.connect() as conn:
        outbox.enqueue(conn, Noted(tenant="acme", operation="first", ordering_key="a", n=1))
        outbox.enqueue(conn, Lost(tenant="acme", operation="nowhere", ordering_key="b"))
        outbox.enqueue(conn, Noted(tenant="acme", operation="third", ordering_key="c", n=3))
    relay(database18.dsn, on, services, [route]).run_once()
    assert sorted(operations(on.read(route, 2))) == ["first", "third"]
    assert parked(database18) == [("nowhere", "unroutable")]
    with database18.connect() as conn:
        shown = conn.execute("SELECT reason, count FROM fencepost.status WHERE state = 'parked'").fetchall()
    assert shown == [("unroutable", 1)]

    async def bind(channel: AbstractChannel) -> None:
        await (await channel.get_queue(route.to)).bind(route.to, "test.lost")

    on.on_channel(bind)
    with running(relay(database18.dsn, on, services, [route])):
        wait_for(lambda: parked(database18) == [], 30, "the parked event to go out")

    assert operations(on.read(route, 1)) == ["nowhere"]
