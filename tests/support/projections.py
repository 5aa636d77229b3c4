"""A projection for tests: how many events and which amount, by account; and histories for it, on Kafka and in the outbox."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from confluent_kafka import Producer
from psycopg import Connection

from fencepost.consumer.projection import Projection, projection
from fencepost.relay import outbox
from fencepost.schemas import kafka_binding
from fencepost.schemas.content import binding
from fencepost.schemas.digest import digest
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.event import Event
from support.deliveries import envelope
from support.roles import Roles

TABLES = """
CREATE TABLE totals (account text PRIMARY KEY, events bigint NOT NULL, amount bigint NOT NULL);
CREATE INDEX totals_amount ON totals (amount);
"""
ADD = """
INSERT INTO totals AS t (account, events, amount) VALUES (%s, %s, %s)
ON CONFLICT (account) DO UPDATE SET events = t.events + excluded.events, amount = t.amount + excluded.amount"""


class Paid(Event, type="test.paid", version=1):
    """What the projection sums up; the ordering key is the account."""

    amount: int


@projection(name="totals", tables=("totals",))
def totals(tx: Connection[Any], events: Sequence[Paid]) -> None:
    for event in events:
        tx.execute(ADD, (event.ordering_key, 1, event.amount))


def paid(n: int, *, accounts: int = 3, amount: int | None = None) -> Paid:
    return Paid(
        tenant="acme", operation=f"op-{n}", ordering_key=f"a{n % accounts}", amount=n if amount is None else amount
    )


def sent(n: int, **changes: Any) -> Envelope:
    """The n-th event as its relay would send it."""
    return envelope(paid(n), sequence=n, **changes)


def newer_version(n: int) -> Envelope:
    """The same type in a version that this program does not know."""
    raw = b'{"amount":1,"currency":"EUR"}'
    return replace(sent(n), version=2, payload=raw, digest=digest("acme", f"op-{n}", "test.paid", 2, 1, binding(raw)))


def produce(
    bootstrap: str, topic: str, envelopes: Iterable[Envelope | tuple[Envelope, bytes]], partition: int = 0
) -> None:
    """Puts them into one partition; a pair replaces the payload behind the envelope's back."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    for each in envelopes:
        one, payload = each if isinstance(each, tuple) else (each, each.payload)
        producer.produce(
            topic,
            value=payload,
            key=kafka_binding.key(one.tenant, one.ordering_key),
            headers=list(kafka_binding.encode(one)),
            partition=partition,
        )
    assert producer.flush(30) == 0


def accept(conn: Connection[Any], *numbers: int) -> None:
    """Accepts these events in the caller's transaction."""
    for n in numbers:
        outbox.enqueue(conn, paid(n))


def projector(roles: Roles, tables: str = TABLES) -> str:
    """The address for a login of the projector role that owns the projection's tables and may make schemas."""
    login = roles.login("projector")
    name = roles.name("projector")
    with roles.database.connect(autocommit=True) as conn:
        conn.execute(tables.encode())
        conn.execute(f"ALTER TABLE totals OWNER TO {name}".encode())
        conn.execute(f"GRANT CREATE ON SCHEMA public TO {name}".encode())
        conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {name}".encode())
    return login.dsn


def rows(conn: Connection[Any], schema: str = "public") -> dict[str, tuple[int, int]]:
    """Account to events and amount."""
    found = conn.execute(f"SELECT account, events, amount FROM {schema}.totals".encode()).fetchall()
    return {row[0]: (row[1], row[2]) for row in found}


def expected(numbers: Iterable[int], accounts: int = 3) -> dict[str, tuple[int, int]]:
    """What the projection must say about these events."""
    found: dict[str, tuple[int, int]] = {}
    for n in numbers:
        events, amount = found.get(f"a{n % accounts}", (0, 0))
        found[f"a{n % accounts}"] = (events + 1, amount + n)
    return found


__all__ = [
    "Paid",
    "Projection",
    "accept",
    "expected",
    "newer_version",
    "paid",
    "produce",
    "projector",
    "rows",
    "sent",
    "totals",
]
