"""Acceptance commits with the domain change or not at all; a refusal writes nothing and names its field."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from fencepost.relay import outbox
from fencepost.relay.outbox import Accepted
from fencepost.schemas.errors import InvalidInput, OperationConflict, WrongTransaction
from fencepost.schemas.event import Event
from support.database import Database
from support.processes import wait_for
from support.relays import Changed, accept, value

EVENTS: LiteralString = "SELECT count(*) FROM fencepost.outbox"
KEYS: LiteralString = "SELECT count(*) FROM fencepost.event_key"
DOMAIN: LiteralString = "CREATE TABLE thing (name text PRIMARY KEY)"


class Stored(Event, type="relay.stored", version=1):
    """An event with every kind of text in it."""

    note: str = ""
    count: int = 0


@contextmanager
def things(database: Database) -> Generator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection beside a domain table."""
    with database.connect(autocommit=True) as conn:
        conn.execute(DOMAIN)
    with database.connect() as conn:
        yield conn


def counts(database: Database) -> tuple[int, int, int]:
    """Domain rows, outbox rows and keys as another session sees them."""
    with database.connect(autocommit=True) as conn:
        return value(conn, "SELECT count(*) FROM thing"), value(conn, EVENTS), value(conn, KEYS)


def test_a_domain_change_and_its_event_commit_together_or_not_at_all(database: Database) -> None:
    with things(database) as conn:
        conn.execute("INSERT INTO thing VALUES ('a')")
        accept(conn, "a")
        assert counts(database) == (0, 0, 0)
        conn.commit()
        assert counts(database) == (1, 1, 1)
        conn.execute("INSERT INTO thing VALUES ('b')")
        accept(conn, "b")
        conn.rollback()
        assert counts(database) == (1, 1, 1)
        with pytest.raises(psycopg.errors.UniqueViolation), conn.transaction():
            accept(conn, "c")
            conn.execute("INSERT INTO thing VALUES ('a')")
        assert counts(database) == (1, 1, 1)
        # A rolled back acceptance leaves the operation free.
        with conn.transaction():
            conn.execute("INSERT INTO thing VALUES ('b')")
            accept(conn, "b")
        assert counts(database) == (2, 2, 2)


def test_enqueue_never_commits_and_leaves_the_session_as_it_was(database: Database) -> None:
    with database.connect() as conn:
        settings = "SELECT string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_settings"
        # The first call of a session loads PL/pgSQL, which adds its own settings to the list.
        accept(conn, "a")
        conn.rollback()
        before = value(conn, settings)
        conn.commit()
        accept(conn, "a")
        assert conn.info.transaction_status is TransactionStatus.INTRANS
        assert value(conn, settings) == before
        conn.rollback()
        assert value(conn, EVENTS) == 0


def test_autocommit_is_refused_outside_a_transaction_and_allowed_inside_one(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        with conn.transaction():
            accept(conn, "a")
        conn.execute("BEGIN")
        accept(conn, "b")
        conn.execute("COMMIT")
        assert value(conn, EVENTS) == 2
        with pytest.raises(WrongTransaction) as refused:
            accept(conn, "c")
        assert refused.value.field == "autocommit" and "conn.transaction()" in str(refused.value)
        assert value(conn, EVENTS) == 2


def test_an_asyncio_caller_has_the_same_promises(database: Database) -> None:
    async def caller() -> None:
        async with await psycopg.AsyncConnection.connect(database.dsn) as conn:
            first = await outbox.enqueue(conn, Changed(tenant="acme", operation="a"))
            again = await outbox.enqueue(conn, Changed(tenant="acme", operation="a"))
            assert first.created and again == Accepted(first.event_id, created=False)
            assert conn.info.transaction_status is TransactionStatus.INTRANS
            await conn.rollback()
            await outbox.enqueue(conn, Changed(tenant="acme", operation="b"))
            await conn.commit()
            with pytest.raises(OperationConflict):
                await outbox.enqueue(conn, Changed(tenant="acme", operation="b", note="other"))
            await conn.rollback()
            await conn.set_autocommit(True)
            async with conn.transaction():
                await outbox.enqueue(conn, Changed(tenant="acme", operation="c"))
            with pytest.raises(WrongTransaction):
                await outbox.enqueue(conn, Changed(tenant="acme", operation="d"))

    asyncio.run(caller())
    with database.connect() as conn:
        assert conn.execute("SELECT operation FROM fencepost.outbox ORDER BY seq").fetchall() == [("b",), ("c",)]


def test_the_same_meaning_again_returns_the_first_event_and_writes_nothing(database: Database) -> None:
    with database.connect() as conn:
        first = outbox.enqueue(conn, Changed(tenant="acme", operation="a", note="x"))
        conn.commit()
        again = outbox.enqueue(conn, Changed(tenant="acme", operation="a", note="x"))
        conn.commit()
        assert first.created and again == Accepted(first.event_id, created=False)
        assert value(conn, EVENTS) == 1


def test_another_meaning_under_the_same_operation_is_a_conflict(database: Database) -> None:
    with database.connect() as conn:
        outbox.enqueue(conn, Changed(tenant="acme", operation="a", note="x"))
        # Another type or another tenant under the same operation is another event.
        outbox.enqueue(conn, Stored(tenant="acme", operation="a", note="y"))
        outbox.enqueue(conn, Changed(tenant="umbra", operation="a", note="y"))
        conn.commit()
        with pytest.raises(OperationConflict) as refused:
            outbox.enqueue(conn, Changed(tenant="acme", operation="a", note="secret text"))
        assert refused.value.field == "operation" and "secret" not in str(refused.value)
        assert conn.info.transaction_status is TransactionStatus.INERROR
        conn.rollback()
        assert value(conn, EVENTS) == 3


def test_identities_do_not_run_into_each_other(database: Database) -> None:
    pairs = [("a", "c1"), ("b", "c1"), ("a:b", "c"), ("a", "b:c"), ("A", "c1"), ('a","b', "c"), ("a", 'b","c')]
    with database.connect() as conn:
        for tenant, operation in pairs:
            assert outbox.enqueue(conn, Changed(tenant=tenant, operation=operation)).created
        conn.commit()
        assert value(conn, EVENTS) == value(conn, KEYS) == len(pairs)
        assert value(conn, "SELECT count(DISTINCT digest) FROM fencepost.outbox") == len(pairs)


def test_two_callers_of_one_operation_get_one_event(database: Database) -> None:
    found: list[Accepted] = []
    with database.connect() as first, database.connect() as second, database.connect(autocommit=True) as look:
        found.append(outbox.enqueue(first, Changed(tenant="acme", operation="a")))

        def other() -> None:
            found.append(outbox.enqueue(second, Changed(tenant="acme", operation="a")))
            second.commit()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        wait_for(lambda: waits(look, second), 10, "the second caller to wait for the first")
        first.commit()
        thread.join(10)
        assert [one.created for one in found] == [True, False]
        assert found[0].event_id == found[1].event_id
        assert value(look, EVENTS) == 1


def test_a_repeatable_read_caller_may_enqueue_and_must_retry_what_its_snapshot_cannot_see(database: Database) -> None:
    with database.connect() as conn, database.connect() as other:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        accept(conn, "a")
        conn.commit()
        value(conn, "SELECT 1")
        accept(other, "b")
        other.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            accept(conn, "b")
        conn.rollback()
        assert not outbox.enqueue(conn, Changed(tenant="acme", operation="b")).created


def test_serialised_writers_of_a_key_take_turns_and_others_do_not_wait(database: Database) -> None:
    with database.connect() as first, database.connect() as second, database.connect(autocommit=True) as look:
        accept(first, "a", key="k", serialize=True)
        accept(second, "x", key="other", serialize=True)
        accept(second, "y", key="k", tenant="umbra", serialize=True)
        second.commit()

        def other() -> None:
            accept(second, "b", key="k", serialize=True)
            second.commit()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        wait_for(lambda: waits(look, second), 10, "the second writer to wait for the first")
        accept(first, "a2", key="k")
        first.commit()
        thread.join(10)
        order = look.execute(
            "SELECT operation FROM fencepost.outbox WHERE ordering_key = 'k' AND tenant = 'acme' ORDER BY seq"
        )
        assert [row[0] for row in order] == ["a", "a2", "b"]


def test_the_transaction_id_is_assigned_before_the_number_is_drawn(database: Database) -> None:
    with database.connect() as first, database.connect() as second:
        accept(first, "a")
        accept(second, "b")
        first.commit()
        second.commit()
        assert value(first, "SELECT bool_and(xid = xmin::text::xid8) FROM fencepost.outbox") is True
        assert value(
            first, "SELECT array_agg(operation ORDER BY xid) = array_agg(operation ORDER BY seq) FROM fencepost.outbox"
        )


TEXTS = {
    "nul": "a\x00b",
    "half a surrogate pair": "a\ud800",
    "a control character": "a\x07b",
    "nothing": "",
    "white space at its end": "a ",
    "too much": "x" * 201,
}


@pytest.mark.parametrize("field", ["tenant", "operation", "ordering_key"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_an_identity_that_cannot_be_stored_is_refused_before_anything_is_written(field: str, text: str) -> None:
    good = {"tenant": "acme", "operation": "a", "ordering_key": "k"}
    Changed(**good)
    with pytest.raises(InvalidInput) as refused:
        Changed(**good | {field: text})
    assert refused.value.field == field


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "nul": ({"note": "a\x00b"}, {}, "note"),
    "half a surrogate pair": ({"note": "a\ud800"}, {}, "note"),
    "a number beyond 2^53": ({"count": 2**70}, {}, "count"),
    "more than 1 MiB": ({"note": "x" * (10 << 20)}, {}, ""),
    "an attribute's name": ({}, {"Trace-Parent": "x"}, ""),
    "an attribute with nul": ({}, {"traceparent": "a\x00"}, ""),
    "an attribute with half a pair": ({}, {"traceparent": "\udfff"}, ""),
    "an attribute of ours": ({}, {"fptenant": "x"}, ""),
}


@pytest.mark.parametrize(("content", "attributes", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_content_that_cannot_be_stored_is_refused_and_the_transaction_stays_usable(
    database18: Database, content: dict[str, Any], attributes: dict[str, str], field: str
) -> None:
    with things(database18) as conn:
        conn.execute("INSERT INTO thing VALUES ('a')")
        outbox.enqueue(conn, Stored(tenant="acme", operation="a"), attributes={"traceparent": "x"})
        with pytest.raises(InvalidInput) as refused:
            outbox.enqueue(conn, Stored(tenant="acme", operation="b", **content), attributes=attributes)
        assert refused.value.field and (not field or refused.value.field == field)
        assert "xxxx" not in str(refused.value)
        assert conn.info.transaction_status is TransactionStatus.INTRANS
        conn.commit()
        assert counts(database18) == (1, 1, 1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1.5])
def test_floating_point_is_refused_by_name(number: float) -> None:
    Stored(tenant="acme", operation="a", count=1)
    with pytest.raises(InvalidInput) as refused:
        Stored(tenant="acme", operation="a", count=cast(int, number))
    assert refused.value.field == "count"


RAW: LiteralString = """
SELECT fencepost.enqueue(gen_random_uuid(), %(tenant)s, %(operation)s, %(type)s, %(version)s, %(ordering_key)s, %(binding)s,
    %(content_type)s, NULL, %(payload)s)"""
GOOD: dict[str, Any] = {
    "tenant": "acme",
    "operation": "a",
    "type": "relay.changed",
    "version": 1,
    "ordering_key": "k",
    "binding": "jcs-sha256:" + "0" * 64,
    "content_type": "application/json",
    "payload": b"{}",
}


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("tenant", ""),
        ("tenant", None),
        ("operation", "a\x07"),
        ("ordering_key", " k"),
        ("type", "Relay.Changed"),
        ("type", "relay.changed.v2"),
        ("version", 0),
        ("binding", "md5:0"),
        ("content_type", "text/plain"),
        ("payload", b""),
        ("payload", b"x" * 1_048_577),
    ],
)
def test_the_database_itself_refuses_what_another_client_may_send(
    database18: Database, field: str, wrong: object
) -> None:
    with database18.connect() as conn:
        conn.execute(RAW, GOOD)
        conn.commit()
        with pytest.raises(InvalidInput) as refused:
            conn.execute(RAW, GOOD | {"operation": "b", field: wrong})
        assert refused.value.field == field
        assert conn.info.transaction_status is TransactionStatus.INERROR
        conn.rollback()
        assert value(conn, EVENTS) == 1


def waits(look: psycopg.Connection[Any], conn: psycopg.Connection[Any]) -> bool:
    """Whether that session waits for a lock."""
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    return look.execute(query, (conn.info.backend_pid,)).fetchone() == (True,)
