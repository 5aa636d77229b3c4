"""Health: liveness knows only whether the loops move, readiness says what is missing, and neither waits for anything."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from fencepost.relay import backlog
from fencepost.relay.loop import DestinationLoop
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Answer as BrokerAnswer
from fencepost.relay.publisher import OutboxRow, Outcome, ParkReason
from fencepost.relay.readiness import Watch
from fencepost.relay.sidecar import Relay
from fencepost.schemas import arming, migrate
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.health import CONNECTIONS_MAX, Answer, HealthAddress, HealthServer
from stack.places import free_port, listens
from stack.postgres import PostgresServer
from support.database import Database
from support.health import LOOPBACK, ask, becomes, metric, readiness, running
from support.memory_broker import Lossy, MemoryBroker, confirm
from support.processes import wait_for
from support.relays import BRISK, accept, accepted, destination, relay_once

HERE = HealthAddress(LOOPBACK, 0)


def relay(database: Database, broker: MemoryBroker, *, pace: Pace = BRISK, **more: float) -> Relay:
    return Relay(database.dsn, [destination(broker)], state=database.state, pace=pace, health=HERE, look=0.1, **more)  # type: ignore[arg-type]


def nacked(row: OutboxRow) -> Outcome:
    return Outcome(BrokerAnswer.NACKED, detail="full")


# -- what the paths say ----------------------------------------------------------------------------------------------


def test_a_relay_that_publishes_is_alive_and_ready(database18: Database) -> None:
    broker = MemoryBroker()
    accepted(database18, "a", "b")
    with running(relay(database18, broker)) as made:
        document = becomes(made, "ready")
        wait_for(lambda: len(broker.arrived) == 2, 20, "the events")
        found = document["destinations"]["memory"]
        assert (document["ready"], document["database"]) == (True, "ready")
        assert (found["broker"], found["leased"]) == ("connected", True)
        wait_for(lambda: readiness(made)["destinations"]["memory"]["slots_held"] == 16, 20, "every slot to be held")
        assert ask(made.health_port, "/readyz").content_type == "application/json"
        assert ask(made.health_port, "/livez").status == 200
        assert ask(made.health_port, "/readyz?verbose=1", "HEAD").text == ""
        assert ask(made.health_port, "/").status == 404
        assert ask(made.health_port, "/livez", "POST").status == 405
        port = made.health_port
    assert not listens(port)


def test_a_disarmed_database_is_not_ready_and_armed_again_it_is(database18: Database, tmp_path: Path) -> None:
    broker = MemoryBroker()
    made = Relay(database18.dsn, [destination(broker)], pace=BRISK, health=HERE, look=0.1)
    with running(made):
        becomes(made, "ready")
        with database18.connect() as conn:
            conn.execute("DELETE FROM fencepost.ticket")
        document = becomes(made, "disarmed")
        assert ask(made.health_port, "/readyz").status == 503
        assert document["database"] == "disarmed"
        assert ask(made.health_port, "/livez").status == 200
        arming.arm(database18.dsn, database18.state)
        becomes(made, "ready")


def test_a_broker_that_is_away_is_not_ready_and_says_so(database18: Database) -> None:
    class Away(MemoryBroker):
        def inspect(self, names: object, deadline: float) -> dict[str, object]:
            from fencepost.schemas.errors import Unreachable

            if away.is_set():
                raise Unreachable("away")
            return {}

    away = threading.Event()
    with running(relay(database18, Away())) as made:
        becomes(made, "ready")
        away.set()
        assert becomes(made, "broker")["destinations"]["memory"]["broker"] == "unreachable"
        assert ask(made.health_port, "/livez").status == 200
        away.clear()
        becomes(made, "ready")


def test_a_draining_relay_is_alive_and_no_longer_ready(database18: Database) -> None:
    broker = MemoryBroker()
    with running(relay(database18, broker, pace=replace(BRISK, drain=30.0))) as made:
        becomes(made, "ready")
        broker.answering.clear()
        accepted(database18, "a")
        wait_for(lambda: broker.sends > 0, 20, "the event to be sent")
        made.stop()
        assert becomes(made, "draining")["ready"] is False
        assert ask(made.health_port, "/livez").status == 200
        broker.answering.set()


def test_a_loop_that_stands_still_is_not_alive(database18: Database) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Stuck(MemoryBroker):
        def send(self, batch: object, deadline: float) -> object:  # type: ignore[override]
            entered.set()
            go_on.wait(30)
            return super().send(batch, deadline)  # type: ignore[arg-type]

    with running(relay(database18, Stuck(), stalled=1.0)) as made:
        becomes(made, "ready")
        wait_for(lambda: ask(made.health_port, "/livez").status == 200, 10, "the control")
        accepted(database18, "a")
        assert entered.wait(20)
        wait_for(lambda: ask(made.health_port, "/livez").status == 503, 10, "/livez to say no")
        go_on.set()
        wait_for(lambda: ask(made.health_port, "/livez").status == 200, 10, "/livez to say yes again")


def test_what_was_seen_too_long_ago_counts_as_unknown(database18: Database) -> None:
    made = DestinationLoop(database18.dsn, destination(MemoryBroker()), pace=BRISK, stop=threading.Event())
    watch = Watch(database18.dsn, [made], threading.Event(), look=60)
    watch.start()
    try:
        wait_for(lambda: watch.report().database == "ready", 10, "the first look")
        watch.stale = 0.0
        assert watch.report().database == "unknown"
    finally:
        watch.stop()


def test_a_restart_of_the_database_is_seen_and_recovers_by_itself(tmp_path: Path) -> None:
    server = PostgresServer("18")
    server.start()
    try:
        migrate.apply(server.dsn, state=tmp_path)
        database = Database(server.dsn, tmp_path)
        broker = MemoryBroker()
        with running(relay(database, broker)) as made:
            becomes(made, "ready")
            server.stop()
            assert becomes(made, "database")["database"] == "unreachable"
            assert ask(made.health_port, "/livez").status == 200
            server.start()
            becomes(made, "ready", 60)
            accepted(database, "after")
            wait_for(lambda: broker.operations() == ["after"], 20, "the event")
    finally:
        server.close()


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_count_what_happened_by_destination_and_reason_and_name_no_tenant(database18: Database) -> None:
    def verdict(row: OutboxRow) -> Outcome:
        if row.operation == "huge":
            return Outcome(BrokerAnswer.REFUSED, ParkReason.TOO_LARGE)
        return Outcome(BrokerAnswer.CONFIRMED)

    accepted(database18, "a", "b", "huge", tenant="secretive")
    with running(relay(database18, MemoryBroker(verdict))) as made:
        name = '{destination="memory"}'
        wait_for(lambda: metric(made, f"fencepost_relay_published_total{name}") == 2, 20, "two published events")
        parked = 'fencepost_relay_parked_total{destination="memory",reason="too_large"}'
        wait_for(lambda: metric(made, parked) == 1, 20, "one parked event")
        assert metric(made, 'fencepost_relay_parked_total{destination="memory",reason="no_such_topic"}') == 0
        assert (metric(made, f"fencepost_relay_acks_total{name}") or 0) >= 1
        assert metric(made, f"fencepost_relay_resent_total{name}") == 0
        assert metric(made, f"fencepost_relay_lost_slots_total{name}") == 0
        wait_for(lambda: metric(made, f"fencepost_relay_slots_held{name}") == 16, 20, "the slots")
        wait_for(lambda: metric(made, f"fencepost_relay_in_flight{name}") == 0, 20, "nothing in flight")
        wait_for(lambda: metric(made, f"fencepost_relay_oldest_unsent_seconds{name}") == 0, 20, "nothing unsent")
        wait_for(lambda: metric(made, "fencepost_relay_ready") == 1, 20, "the gauge")
        text = ask(made.health_port, "/metrics").text
        assert "secretive" not in text and "huge" not in text


def test_overtaken_events_are_counted(database18: Database) -> None:
    broker = MemoryBroker(Lossy("b-1"), withholding=False)
    overtaken = 'fencepost_relay_overtaken_total{destination="memory"}'
    published = 'fencepost_relay_published_total{destination="memory"}'
    accepted(database18, "a-1", "a-2", key="a")
    with running(relay(database18, broker)) as made:
        wait_for(lambda: metric(made, published) == 2, 20, "the control")
        assert metric(made, overtaken) == 0
    # Committed while no relay takes a tick in between: both are read together and sent together.
    accepted(database18, "b-1", "b-2", key="b")
    with running(relay(database18, broker)) as made:
        wait_for(lambda: metric(made, published) == 2, 20, "both events")
        wait_for(lambda: metric(made, overtaken) == 1, 20, "one overtaken event")
    assert broker.operations() == ["a-1", "a-2", "b-2", "b-1"]


def test_the_age_of_the_oldest_unsent_event_grows_until_it_is_sent(database18: Database) -> None:
    broker = MemoryBroker(nacked)
    accepted(database18, "a")
    with running(relay(database18, broker)) as made:

        def age() -> float:
            return metric(made, 'fencepost_relay_oldest_unsent_seconds{destination="memory"}') or 0.0

        wait_for(lambda: age() > 1, 20, "the age to grow")
        broker.verdict = confirm
        wait_for(lambda: age() == 0, 20, "the age to end")
        assert (metric(made, 'fencepost_relay_resent_total{destination="memory"}') or 0) > 0


def test_the_oldest_unsent_event_is_found_also_when_it_was_committed_late(database18: Database) -> None:
    broker = MemoryBroker()
    accepted(database18, "first")
    with database18.connect() as late, database18.connect(autocommit=True) as looking:
        accept(late, "late", key="late")
        accepted(database18, "second")
        relay_once(database18, destination(broker))
        assert broker.operations() == ["first", "second"]
        assert backlog.oldest(looking) == {"memory": None}
        late.commit()
        assert (backlog.oldest(looking)["memory"] or 0) > 0
        relay_once(database18, destination(broker))
        assert backlog.oldest(looking) == {"memory": None}


# -- the server ------------------------------------------------------------------------------------------------------


def said(path: str) -> Answer | None:
    if path == "/broken":
        raise RuntimeError("hunter2")
    return Answer(200, "text/plain", b"here\n") if path == "/here" else None


@pytest.fixture
def port() -> Iterator[int]:
    server = HealthServer(HERE, said)
    server.start()
    yield server.port
    server.stop()


def test_a_server_that_is_stopped_before_its_thread_has_begun_gives_its_port_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, run = threading.Event(), HealthServer._run  # pyright: ignore[reportPrivateUsage]

    def late(server: HealthServer, listener: socket.socket) -> None:
        assert go.wait(60)
        run(server, listener)

    monkeypatch.setattr(HealthServer, "_run", late)
    server = HealthServer(HERE, said)
    server.start()
    server.stop()
    go.set()
    wait_for(lambda: not listens(server.port), 20, "the port to be free")


def test_a_client_that_says_nothing_is_dropped_and_keeps_nobody_waiting(port: int) -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection((LOOPBACK, port), timeout=10))
            for _ in range(CONNECTIONS_MAX - 1)
        ]
        for conn in silent:
            conn.sendall(b"GET /he")
        assert ask(port, "/here", within=0).text == "here\n"
        assert silent[-1].recv(100) == b""
        assert time.monotonic() - began < 8
    assert ask(port, "/here").status == 200


def test_more_connections_than_allowed_are_closed_and_the_server_goes_on(port: int) -> None:
    with contextlib.ExitStack() as opened:
        for _ in range(CONNECTIONS_MAX):
            opened.enter_context(socket.create_connection((LOOPBACK, port), timeout=10)).sendall(b"GET ")
        with contextlib.suppress(OSError):
            extra = opened.enter_context(socket.create_connection((LOOPBACK, port), timeout=10))
            assert extra.recv(100) == b""
    wait_for(lambda: ask(port, "/here").status == 200, 10, "the server to go on")


@pytest.mark.parametrize("sent", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET /here\r\n\r\n", b"\x00\xff\xfe\r\n\r\n"])
def test_what_is_no_request_is_refused(port: int, sent: bytes) -> None:
    assert ask(port, "/here").status == 200
    with socket.create_connection((LOOPBACK, port), timeout=5) as conn:
        conn.sendall(sent)
        assert conn.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_request_that_is_too_long_is_dropped(port: int) -> None:
    with socket.create_connection((LOOPBACK, port), timeout=5) as conn, contextlib.suppress(OSError):
        conn.sendall(b"GET /" + b"x" * 100_000)
        assert conn.recv(100) == b""
    assert ask(port, "/here").status == 200


def test_an_answer_that_fails_is_503_without_its_reason(port: int) -> None:
    found = ask(port, "/broken")
    assert (found.status, found.text) == (503, "failed\n")


def test_off_loopback_is_refused_unless_told() -> None:
    assert HealthAddress.parse("127.0.0.1:80") == ("127.0.0.1", 80)
    assert HealthAddress.parse("[::1]:80") == ("::1", 80)
    assert HealthAddress.parse("0.0.0.0:80", exposed=True) == ("0.0.0.0", 80)
    for text in ("0.0.0.0:80", "health.example:80", "127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:70000"):
        with pytest.raises(ConfigError) as caught:
            HealthAddress.parse(text)
        assert caught.value.field == "health_address"


def test_an_address_that_is_taken_is_an_error_or_lived_with_as_told(database18: Database) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        taken = HealthAddress(LOOPBACK, other.getsockname()[1])
        broker = MemoryBroker()
        with pytest.raises(ConfigError):
            Relay(database18.dsn, [destination(broker)], pace=BRISK, health=taken).run()
        accepted(database18, f"op-{uuid4()}")
        lenient = Relay(database18.dsn, [destination(broker)], pace=BRISK, health=taken, health_required=False)
        thread = threading.Thread(target=lenient.run, daemon=True)
        thread.start()
        wait_for(lambda: len(broker.arrived) > 0, 20, "the event")
        lenient.stop()
        thread.join(20)
        assert not thread.is_alive()
    assert free_port()
