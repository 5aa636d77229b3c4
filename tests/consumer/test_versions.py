"""What a consumer does not know yet is held with its bytes, blocks nobody, and is handled after an upgrade."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import Connection
from psycopg.rows import dict_row

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.outcomes import Outcome
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Event
from fencepost.schemas.upcasts import upcast
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka

Tx = Connection[Any]


class Filed(Event, type="test.filed", version=1):
    document: str


class FiledTwo(Event, type="test.filed", version=2):
    document: str
    kind: str


class FiledThree(Event, type="test.filed", version=3):
    document: str
    kind: str
    pages: int


class Ninth(Event, type="test.submitted", version=9):
    pass


@upcast(Filed, FiledTwo)
def with_kind(old: Filed) -> FiledTwo:
    if old.document == "bad":
        raise ValueError("SECRET")
    return FiledTwo(
        tenant=old.tenant,
        operation=old.operation,
        ordering_key=old.ordering_key,
        document=old.document,
        kind="unknown",
    )


@upcast(FiledTwo, FiledThree)
def with_pages(old: FiledTwo) -> FiledThree:
    return FiledThree(
        tenant=old.tenant if old.document != "stolen" else "other",
        operation=old.operation,
        ordering_key=old.ordering_key,
        document=old.document,
        kind=old.kind,
        pages=0,
    )


def insert(tx: Tx, operation: str, document: str) -> None:
    tx.execute("INSERT INTO done (operation, document) VALUES (%s, %s)", (operation, document))


@inbox(consumer="reports")
def only_first(tx: Tx, event: Filed) -> None:
    insert(tx, event.operation, event.document)


@inbox(consumer="reports")
def only_second(tx: Tx, event: FiledTwo) -> None:
    insert(tx, event.operation, f"{event.document} {event.kind}")


@inbox(consumer="reports")
def third_or_submitted(tx: Tx, event: FiledThree | Submitted) -> None:
    shown = f"{event.kind} {event.pages} {event.event_id}" if isinstance(event, FiledThree) else ""
    insert(tx, event.operation, f"{event.document} {shown}".rstrip())


def done(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT operation, document FROM done ORDER BY n").fetchall()


def dead(database: Database) -> list[dict[str, Any]]:
    with database.connect() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM fencepost.dead_letter ORDER BY id").fetchall()


def filed(version: int = 1, operation: str = "op-1", document: str = "a") -> Envelope:
    event: Event
    match version:
        case 1:
            event = Filed(tenant="acme", operation=operation, document=document)
        case 2:
            event = FiledTwo(tenant="acme", operation=operation, document=document, kind="k")
        case _:
            event = FiledThree(tenant="acme", operation=operation, document=document, kind="k", pages=2)
    return envelope(event)


@pytest.mark.parametrize(
    ("unknown", "reason", "field", "upgraded"),
    [
        (envelope(operation="op-9"), "unknown_type", "type", third_or_submitted),
        (filed(2, "op-9"), "newer_version", "version", only_second),
        (envelope(type="test.nobody", operation="op-9"), "unknown_type", "type", None),
        (envelope(filed_event := FiledThree(tenant="acme", operation="op-9", document="a", kind="k", pages=1), version=9),
         "newer_version", "version", None),
    ],
)  # fmt: skip
def test_an_unknown_type_or_newer_version_is_held_once_and_handled_after_an_upgrade(
    domain: Database, unknown: Envelope, reason: str, field: str, upgraded: Inbox[Any] | None
) -> None:
    deliveries = [from_kafka(filed(operation="op-1")), from_kafka(unknown, 1), from_kafka(filed(operation="op-2"), 2)]
    handled = [only_first.handle(domain.dsn, each) for each in [*deliveries, deliveries[1]]]

    assert [each.outcome for each in handled] == [
        Outcome.HANDLED,
        Outcome.UNDECODABLE,
        Outcome.HANDLED,
        Outcome.UNDECODABLE,
    ]
    assert (handled[1].reason, handled[1].field, handled[1].operation) == (reason, field, "op-9")
    assert done(domain) == [("op-1", "a"), ("op-2", "a")]
    (kept,) = dead(domain)
    assert (kept["reason"], kept["detail"], kept["attempts"]) == (reason, reason, 2)
    assert (kept["tenant"], kept["operation"], kept["type"]) == ("acme", "op-9", unknown.type)
    assert (kept["version"], kept["event_id"], kept["payload"]) == (unknown.version, unknown.id, unknown.payload)

    if upgraded is not None:
        assert upgraded.handle(domain.dsn, deliveries[1]).outcome is Outcome.HANDLED
        assert done(domain)[-1][0] == "op-9"


def test_a_version_below_all_that_a_handler_takes_is_undecodable(domain: Database) -> None:
    @inbox(consumer="reports")
    def ninth(tx: Tx, event: Ninth) -> None:
        insert(tx, event.operation, "ninth")

    assert ninth.handle(domain.dsn, from_kafka(envelope(version=9, payload=b"{}"))).outcome is Outcome.HANDLED
    handled = ninth.handle(domain.dsn, from_kafka(envelope(operation="op-2"), 1))

    assert (handled.outcome, handled.reason) == (Outcome.UNDECODABLE, "unknown_version")
    assert [kept["reason"] for kept in dead(domain)] == ["undecodable"]


def test_older_versions_are_lifted_step_by_step_and_stay_the_event_that_arrived(domain: Database) -> None:
    first, second, third = filed(1, "op-1"), filed(2, "op-2"), filed(3, "op-3")
    for offset, each in enumerate([first, second, third]):
        assert third_or_submitted.handle(domain.dsn, from_kafka(each, offset)).outcome is Outcome.HANDLED

    assert done(domain) == [
        ("op-1", f"a unknown 0 {first.id}"),
        ("op-2", f"a k 0 {second.id}"),
        ("op-3", f"a k 2 {third.id}"),
    ]
    with domain.connect() as conn:
        found = conn.execute("SELECT version, meaning FROM fencepost.reservation ORDER BY operation").fetchall()
    assert found == [(each.version, each.meaning.raw) for each in (first, second, third)]
    assert third_or_submitted.handle(domain.dsn, from_kafka(first, 9)).outcome is Outcome.DUPLICATE


def test_an_upcast_that_fails_or_makes_another_event_leaves_nothing(domain: Database) -> None:
    with pytest.raises(ValueError, match="SECRET"):
        third_or_submitted.handle(domain.dsn, from_kafka(filed(1, document="bad")))
    with pytest.raises(ConfigError) as caught:
        third_or_submitted.handle(domain.dsn, from_kafka(filed(2, document="stolen"), 1))
    assert caught.value.field == "tenant"
    assert (done(domain), dead(domain)) == ([], [])


def test_an_upcast_leads_to_a_newer_version_of_the_same_type_and_only_there() -> None:
    assert upcast(Filed, FiledTwo)(with_kind) is with_kind  # the allowed control: the same once more

    with pytest.raises(ConfigError, match="newer"):
        upcast(FiledTwo, Filed)
    with pytest.raises(ConfigError, match="newer"):
        upcast(Filed, Filed)
    with pytest.raises(ConfigError, match="one type"):
        upcast(Filed, Submitted)
    with pytest.raises(ConfigError, match="led on"):

        @upcast(Filed, FiledThree)
        def other(old: Filed) -> FiledThree:  # pyright: ignore[reportUnusedFunction]
            raise AssertionError


def structured(sent: Envelope, broker: str, number: int = 0) -> Delivery:
    """The delivery of an event in structured mode."""
    if broker == "kafka":
        headers, value = kafka_binding.encode_structured(sent)
        key = kafka_binding.key(sent.tenant, sent.ordering_key)
        return Delivery.from_kafka(
            cluster_id="c", topic="t", partition=0, offset=number, headers=headers, key=key, value=value
        )
    body, content_type = amqp_binding.encode_structured(sent)
    return Delivery.from_rabbitmq(
        cluster="c", vhost="/", queue="q", message_id=str(sent.id), headers=None, content_type=content_type, body=body
    )


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq"])
def test_an_event_is_one_event_in_either_mode(domain: Database, broker: str) -> None:
    sent = filed()

    assert only_first.handle(domain.dsn, structured(sent, broker)).outcome is Outcome.HANDLED
    assert only_first.handle(domain.dsn, from_kafka(sent, 7)).outcome is Outcome.DUPLICATE
    assert done(domain) == [("op-1", "a")]


@pytest.mark.parametrize("broker", ["kafka", "rabbitmq"])
def test_what_is_set_aside_of_structured_mode_can_be_read_again(domain: Database, broker: str) -> None:
    assert only_first.handle(domain.dsn, structured(filed(), broker)).outcome is Outcome.HANDLED
    other, newer = filed(document="b"), filed(2, "op-9")
    outcomes = [only_first.handle(domain.dsn, structured(each, broker, 5)).outcome for each in (other, newer)]
    assert outcomes == [Outcome.CONFLICT, Outcome.UNDECODABLE]

    for kept, sent in zip(dead(domain), (other, newer), strict=True):
        headers = {name: value for name, value in kept["headers"]}
        if broker == "kafka":
            kafka = [(name, value) for name, value in headers.items() if not name.startswith(":")]
            again = kafka_binding.decode(kafka, headers[":key"].encode(), kept["payload"])
        else:
            again = amqp_binding.decode(None, headers[":content-type"], kept["payload"])
        assert again == sent
        assert json.loads(kept["payload"])["id"] == str(sent.id)
