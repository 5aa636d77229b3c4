"""`fencepost relay run`: publishes, drains on a signal, leaves at a second one, and says who does not answer."""

import json
import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conformance.on_rabbitmq import OnRabbit
from fencepost.relay import outbox
from fencepost.schemas.event import Event
from stack.places import free_port
from support.command_line import PASSWORD, Fencepost, running
from support.database import Database
from support.health import ask
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Kafka, Rabbit

ACK_WAITS = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
               AND query LIKE '%fencepost.ack(%' AND pid <> pg_backend_pid()"""


UNACKED = """SELECT count(*) FROM fencepost.outbox AS o
             WHERE NOT EXISTS (SELECT FROM fencepost.ack AS a WHERE a.destination = 'here' AND a.slot = o.slot)"""


class Told(Event, type="operate.told", version=1):
    number: int


def tell(database: Database, *numbers: int) -> None:
    for number in numbers:
        with database.connect() as conn:
            outbox.enqueue(conn, Told(tenant="acme", operation=f"op-{number}", number=number))


def table(kind: str, address: str, to: str, **more: object) -> str:
    routes = [{"match": "operate.*", "to": to}]
    return json.dumps([{"name": "here", "kind": kind, "address": address, "routes": routes, **more}])


def number(database: Database, statement: str) -> int:
    with database.connect(autocommit=True) as conn:
        row = conn.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_once_publishes_what_is_committed_and_ends(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    tell(database18, 1, 2, 3)

    done = fencepost(
        database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=table("kafka", kafka.bootstrap, kafka.topic())
    )

    assert done.code == 0
    assert done.out.startswith("published 3, parked 0, "), done.out


def test_once_gives_up_on_a_silent_broker_with_its_address(
    database18: Database, kafka: Kafka, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    good = table("kafka", kafka.bootstrap, kafka.topic())
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=good).code == 0
    patience = {"FENCEPOST_RELAY_PATIENCE": "1.5", "FENCEPOST_RELAY_CONFIRM": "1"}
    for kind, address in (
        ("kafka", f"127.0.0.1:{free_port()}"),
        ("rabbitmq", f"amqp://app:{PASSWORD}@127.0.0.1:{free_port()}/"),
    ):
        started = time.monotonic()
        silent = table(kind, address, "nowhere").replace('"here"', f'"{kind}"')
        done = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=silent, **patience)
        assert done.code == 3
        last = done.err.splitlines()[-1]
        assert last.startswith("fencepost: ") and address.rpartition("@")[2].strip("/") in last
        assert time.monotonic() - started < 15


def test_once_gives_up_on_a_silent_database(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=destinations).code == 0

    done = fencepost(
        None,
        "relay",
        "run",
        "--once",
        FENCEPOST_DATABASE=f"postgresql://app:{PASSWORD}@127.0.0.1:1/app",
        FENCEPOST_STATE=str(database18.state),
        FENCEPOST_DESTINATIONS=destinations,
        FENCEPOST_RELAY_PATIENCE="1",
    )

    assert done.code == 3
    assert "127.0.0.1:1/app" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "address", "more", "field"),
    [
        ("kafka", "127.0.0.1:9092", {"options": {"acks": "0"}}, "destinations.here.options.acks"),
        ("kafka", "broker.example:9092", {"options": {"security.protocol": "SASL_PLAINTEXT"}}, "security.protocol"),
        ("rabbitmq", f"amqp://app:{PASSWORD}@broker.example/", {}, "destinations.here.url"),
        ("rabbitmq", "http://127.0.0.1/", {}, "destinations.here.url"),
        ("rabbitmq", "amqp://127.0.0.1/", {"options": {"window": PASSWORD}}, "destinations.here.options.window"),
        ("rabbitmq", "amqp://127.0.0.1/", {"options": {"mandatory": "no"}}, "destinations.here.options.mandatory"),
    ],
)
def test_unsafe_destination_is_refused_before_anything_connects(
    database18: Database, fencepost: Fencepost, kind: str, address: str, more: dict[str, object], field: str
) -> None:
    done = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=table(kind, address, "there", **more))

    assert done.code == 2
    assert field in done.line


def test_times_that_do_not_fit_together_are_refused(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=destinations).code == 0

    done = fencepost(
        database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=destinations, FENCEPOST_RELAY_LEASE="5"
    )

    assert done.code == 2
    assert "[relay.lease]" in done.line


def test_relay_without_a_destination_is_refused(database18: Database, fencepost: Fencepost) -> None:
    done = fencepost(database18, "relay", "run")

    assert done.code == 2
    assert "[destinations]" in done.line


def test_changed_routes_are_refused_until_they_are_accepted(
    database18: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    first, second = (table("kafka", kafka.bootstrap, kafka.topic()) for _ in range(2))
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=first).code == 0

    changed = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=second)
    assert changed.code == 1
    assert "[routes]" in changed.line and "--accept-routes" in changed.line

    accepted = fencepost(database18, "relay", "run", "--once", "--accept-routes", FENCEPOST_DESTINATIONS=second)
    assert accepted.code == 0


def test_sigterm_drains_and_gives_the_slots_back(database18: Database, kafka: Kafka, tmp_path: Path) -> None:
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    tell(database18, *range(5))
    with running(database18, "relay", "run", folder=tmp_path, FENCEPOST_DESTINATIONS=destinations) as relay:
        relay.says("the relay runs")
        wait_for(lambda: number(database18, UNACKED) == 0, 30, "every event to be acked")
        assert relay.terminate() == 0
        assert "draining" in relay.text and "published 5, parked 0" in relay.text
    assert number(database18, "SELECT count(*) FROM fencepost.slot WHERE owner IS NOT NULL") == 0


def test_second_signal_leaves_at_once(database18: Database, kafka: Kafka, tmp_path: Path) -> None:
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    with running(database18, "relay", "run", folder=tmp_path, FENCEPOST_DESTINATIONS=destinations) as relay:
        wait_for(
            lambda: number(database18, "SELECT count(*) FROM fencepost.slot WHERE owner IS NOT NULL") == 32,
            30,
            "the relay to own its slots",
        )
        with database18.connect() as holder:
            holder.execute("SELECT FROM fencepost.slot FOR UPDATE")
            tell(database18, 1)
            wait_for(lambda: number(database18, ACK_WAITS) > 0, 30, "an ack to wait")
            os.kill(relay.pid, signal.SIGTERM)
            relay.says("draining")
            assert relay.alive
            os.kill(relay.pid, signal.SIGTERM)
            assert relay.wait(30) == 128 + signal.SIGTERM


def test_run_keeps_trying_while_the_broker_is_silent(database18: Database, tmp_path: Path) -> None:
    silent = table("rabbitmq", f"amqp://app:{PASSWORD}@127.0.0.1:{free_port()}/", "nowhere")
    with running(
        database18, "relay", "run", folder=tmp_path, FENCEPOST_DESTINATIONS=silent, FENCEPOST_RELAY_CONFIRM="1"
    ) as relay:
        relay.says("destination here waits: RabbitMQ does not answer")
        assert relay.alive
        assert relay.terminate() == 0
        assert PASSWORD not in relay.text


def behind(proxy: Proxy, rabbitmq: Rabbit) -> str:
    """RabbitMQ's address through the proxy."""
    return rabbitmq.url.replace(f":{urlsplit(rabbitmq.url).port}", f":{proxy.port}")


def test_signals_during_an_outage_of_the_broker_drain_within_the_deadline_or_leave_at_once_and_nothing_is_lost(
    database18: Database, rabbitmq: Rabbit, tmp_path: Path
) -> None:
    on_rabbit = OnRabbit(rabbitmq)
    route = on_rabbit.destination()
    times = {"FENCEPOST_RELAY_CONFIRM": "2", "FENCEPOST_RELAY_DRAIN": "3", "FENCEPOST_RELAY_HEALTH_ADDRESS": "off"}
    port = urlsplit(rabbitmq.url).port
    assert port is not None
    with Proxy(port) as proxy:
        where = table("rabbitmq", behind(proxy, rabbitmq), route.to)
        with running(database18, "relay", "run", folder=tmp_path, FENCEPOST_DESTINATIONS=where, **times) as relay:
            tell(database18, 1, 2)
            wait_for(lambda: number(database18, UNACKED) == 0, 30, "the control")
            proxy.blackhole()
            tell(database18, 3, 4)
            relay.says("destination here waits", 30)
            began = time.monotonic()
            assert relay.terminate(30) == 0
            assert time.monotonic() - began < 30
            relay.start()
            wait_for(lambda: relay.text.count("the relay runs") == 2, 30, "the relay to run again")
            os.kill(relay.pid, signal.SIGTERM)
            wait_for(lambda: relay.text.count("draining") == 2, 30, "the drain to begin")
            if relay.alive:
                os.kill(relay.pid, signal.SIGTERM)
            assert relay.wait(30) in (0, 128 + signal.SIGTERM)
            proxy.heal()
            relay.start()
            wait_for(lambda: number(database18, UNACKED) == 0, 60, "the rest to be published after a restart")
            assert relay.terminate(30) == 0
    found = [one.envelope.operation for one in on_rabbit.read(route, 4)]
    assert set(found) == {"op-1", "op-2", "op-3", "op-4"}


def test_run_serves_health_where_it_is_told_to(database18: Database, kafka: Kafka, tmp_path: Path) -> None:
    port = free_port()
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    with running(
        database18,
        "relay",
        "run",
        folder=tmp_path,
        FENCEPOST_DESTINATIONS=destinations,
        FENCEPOST_RELAY_HEALTH_ADDRESS=f"127.0.0.1:{port}",
    ) as relay:
        relay.says("health is served")
        wait_for(lambda: ask(port, "/readyz").status == 200, 40, "/readyz to say yes")
        assert ask(port, "/livez").status == 200
        assert "fencepost_relay_slots_held" in ask(port, "/metrics").text
        assert relay.terminate() == 0


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"FENCEPOST_RELAY_HEALTH_ADDRESS": "0.0.0.0:8089"}, "relay.health_address"),
        ({"FENCEPOST_RELAY_HEALTH_ADDRESS": "nowhere"}, "relay.health_address"),
        ({"FENCEPOST_RELAY_STALLED": "20"}, "relay.stalled"),
        ({"FENCEPOST_RELAY_AHEAD": "0"}, "FENCEPOST_RELAY_AHEAD"),
        ({"FENCEPOST_DATABASE": f"postgresql://app:{PASSWORD}@db.example/app"}, "database"),
    ],
)
def test_settings_of_the_sidecar_that_are_not_safe_are_refused(
    database18: Database, kafka: Kafka, fencepost: Fencepost, variables: dict[str, str], field: str
) -> None:
    destinations = table("kafka", kafka.bootstrap, kafka.topic())
    assert fencepost(database18, "relay", "check", FENCEPOST_DESTINATIONS=destinations).code == 0

    done = fencepost(database18, "relay", "run", FENCEPOST_DESTINATIONS=destinations, **variables)

    assert done.code == 2
    assert f"[{field}]" in done.line


def test_files_for_tls_that_cannot_be_used_are_refused_by_name(
    database18: Database, rabbitmq: Rabbit, fencepost: Fencepost, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for options, field in (
        ({"tls_ca": str(tmp_path / "ca.pem")}, "tls_ca"),
        ({"tls_ca": str(tmp_path / "nowhere.pem")}, "tls_ca"),
        ({"tls_key": str(tmp_path / "key.pem")}, "tls_certificate"),
    ):
        where = table("rabbitmq", "amqps://127.0.0.1/", "amq.topic", options=options)
        done = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=where)
        assert done.code == 2
        assert f"[destinations.here.options.{field}]" in done.line
