"""`fencepost relay check`: one line for each thing the relay needs, exit code 1 when one is missing, nothing sent or written."""

import json
from urllib.parse import urlsplit

import pytest

from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from stack.places import free_port
from support.command_line import PASSWORD, Fencepost, Result
from support.database import Database
from support.services import Kafka, Pooler, Rabbit, unique

NO_DATABASE = f"postgresql://app:{PASSWORD}@127.0.0.1:1/app"


def kafka_table(kafka: Kafka, to: str, **more: object) -> dict[str, object]:
    routes = [{"match": "operate.*", "to": to}]
    return {"name": "here", "kind": "kafka", "address": kafka.bootstrap, "routes": routes, **more}


def rabbit_table(rabbit: Rabbit, to: str, **more: object) -> dict[str, object]:
    routes = [{"match": "operate.*", "to": to}]
    return {"name": "there", "kind": "rabbitmq", "address": rabbit.url, "routes": routes, **more}


def checked(fencepost: Fencepost, database: Database, *tables: dict[str, object], **more: str) -> Result:
    return fencepost(database, "relay", "check", FENCEPOST_DESTINATIONS=json.dumps(tables), **more)


def failing(result: Result) -> list[str]:
    return [line for line in result.out.splitlines() if line.startswith("fail ")]


def test_what_is_right_is_said_line_by_line_and_nothing_is_sent_or_written(
    database18: Database, kafka: Kafka, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    on_kafka, on_rabbit = OnKafka(kafka), OnRabbit(rabbitmq)
    topic, exchange = on_kafka.destination(), on_rabbit.destination()

    done = checked(fencepost, database18, kafka_table(kafka, topic.to), rabbit_table(rabbitmq, exchange.to))

    assert (done.code, failing(done)) == (0, []), done.out
    for words in ("settings here", "database", "migrations", "privileges", "armed", "routes here", "broker there"):
        assert f"ok    {words} " in done.out, words
    assert "not registered yet" in done.out
    assert f"here {topic.to}" in done.out and f"there {exchange.to}" in done.out
    assert on_kafka.read(topic, 0, within=1) == [] and on_rabbit.read(exchange, 0, within=1) == []
    with database18.connect() as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.destination").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM fencepost.relay").fetchone() == (0,)
    found = json.loads(checked_json(fencepost, database18, kafka_table(kafka, topic.to)))
    assert {f["level"] for f in found} <= {"ok", "warn"}


def checked_json(fencepost: Fencepost, database: Database, table: dict[str, object]) -> str:
    text: str = fencepost(database, "relay", "check", "--json", FENCEPOST_DESTINATIONS=json.dumps([table])).out
    return text


def test_a_topic_or_exchange_that_is_not_there_fails(
    database18: Database, kafka: Kafka, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    topic = kafka.topic()
    assert checked(fencepost, database18, kafka_table(kafka, topic), rabbit_table(rabbitmq, "amq.topic")).code == 0

    missing = unique("missing")
    done = checked(fencepost, database18, kafka_table(kafka, missing), rabbit_table(rabbitmq, missing))

    assert done.code == 1
    (first, second) = failing(done)
    assert "no_such_topic" in first and missing in first
    assert "no_such_exchange" in second and missing in second


def test_a_broker_that_does_not_answer_fails_with_its_address_and_the_rest_is_still_looked_at(
    database18: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    good = kafka_table(kafka, kafka.topic())
    assert checked(fencepost, database18, good).code == 0
    port = free_port()
    silent = {**good, "name": "silent", "kind": "rabbitmq", "address": f"amqp://app:{PASSWORD}@127.0.0.1:{port}/"}

    done = checked(fencepost, database18, silent, good)

    assert done.code == 1
    (line,) = failing(done)
    assert "broker silent" in line and str(port) in line
    assert "ok    broker here " in done.out


def test_other_routes_than_the_registered_ones_fail(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    first, second = kafka_table(kafka, kafka.topic()), kafka_table(kafka, kafka.topic())
    once = fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=json.dumps([first]))
    assert once.code == 0
    done = checked(fencepost, database18, first)
    assert done.code == 0 and "as registered" in done.out

    changed = checked(fencepost, database18, second)

    assert changed.code == 1
    (line,) = failing(changed)
    assert "routes here" in line and "--accept-routes" in line


def test_another_policy_for_refusals_than_the_registered_one_fails(
    database18: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    topic = kafka.topic()
    blocks = kafka_table(kafka, topic)
    assert fencepost(database18, "relay", "run", "--once", FENCEPOST_DESTINATIONS=json.dumps([blocks])).code == 0
    assert checked(fencepost, database18, kafka_table(kafka, topic, on_refusal="block")).code == 0  # the control

    changed = checked(fencepost, database18, kafka_table(kafka, topic, on_refusal="pass"))

    assert changed.code == 1
    (line,) = failing(changed)
    assert "routes here" in line and "on_refusal block" in line and "say pass" in line and "--accept-routes" in line


def test_a_disarmed_database_fails(database18: Database, kafka: Kafka, fencepost: Fencepost) -> None:
    good = kafka_table(kafka, kafka.topic())
    assert checked(fencepost, database18, good).code == 0
    with database18.connect() as conn:
        conn.execute("DELETE FROM fencepost.ticket")

    done = checked(fencepost, database18, good)

    assert done.code == 1
    assert "DISARMED" in "".join(failing(done))


def test_a_database_without_the_contract_or_without_an_answer_fails_and_brokers_are_still_looked_at(
    empty_database: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    good = kafka_table(kafka, kafka.topic())

    bare = checked(fencepost, empty_database, good)
    assert bare.code == 1
    assert "fencepost migrate" in "".join(failing(bare)) and "ok    broker here " in bare.out

    away = fencepost(None, "relay", "check", FENCEPOST_DATABASE=NO_DATABASE, FENCEPOST_DESTINATIONS=json.dumps([good]))
    assert away.code == 1
    assert "127.0.0.1:1/app" in "".join(failing(away)) and "ok    broker here " in away.out


def test_settings_of_one_destination_that_are_refused_are_a_line_of_their_own(
    database18: Database, kafka: Kafka, fencepost: Fencepost
) -> None:
    topic = kafka.topic()
    assert checked(fencepost, database18, kafka_table(kafka, topic)).code == 0

    done = checked(
        fencepost,
        database18,
        kafka_table(kafka, topic, name="wrong", options={"acks": "0"}),
        kafka_table(kafka, topic),
    )

    assert done.code == 1
    (line,) = failing(done)
    assert "destinations.wrong.options.acks" in line
    assert "ok    broker here " in done.out


def test_a_login_without_the_relay_role_fails(
    database18: Database, kafka: Kafka, fencepost: Fencepost, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("stranger").replace("-", "_")
    good = kafka_table(kafka, kafka.topic())
    assert checked(fencepost, database18, good).code == 0
    with database18.connect(autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {name} LOGIN".encode())
        conn.execute(f"GRANT USAGE ON SCHEMA fencepost TO {name}".encode())
        conn.execute(f"GRANT SELECT ON fencepost.installation TO {name}".encode())
        conn.execute(f"GRANT EXECUTE ON FUNCTION fencepost.armed TO {name}".encode())
        try:
            stranger = f"{database18.dsn} user={name}" if "://" not in database18.dsn else database18.dsn
            assert urlsplit(stranger).scheme == ""
            done = fencepost(
                None, "relay", "check", FENCEPOST_DATABASE=stranger, FENCEPOST_DESTINATIONS=json.dumps([good])
            )
            assert done.code == 1
            assert "lease_slots" in "".join(failing(done))
        finally:
            conn.execute(f"DROP OWNED BY {name}".encode())
            conn.execute(f"DROP ROLE {name}".encode())


def test_doorbell_behind_a_pooler_in_transaction_mode_is_refused_and_passes_on_the_server_itself(
    database18: Database, pgbouncer18: Pooler, kafka: Kafka, fencepost: Fencepost
) -> None:
    table = kafka_table(kafka, kafka.topic())
    direct = checked(fencepost, database18, table, FENCEPOST_RELAY_DOORBELL="true")
    assert (direct.code, failing(direct)) == (0, [])
    assert "ok    doorbell " in direct.out
    pooled = Database(pgbouncer18.dsn(database18.dsn), database18.state)
    assert checked(fencepost, pooled, table).code == 0  # without a doorbell a pooler is no matter

    done = checked(fencepost, pooled, table, FENCEPOST_RELAY_DOORBELL="true")

    assert done.code == 1
    (line,) = failing(done)
    assert "doorbell" in line and "pooler" in line
