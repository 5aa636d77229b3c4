"""The application's own tables: what it accepted, and what was published. They are the oracle.

Invariant, kept by nothing here: one result for each operation. No unique key would show a second publication as an error
and hide it; the fence alone must prevent it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, LiteralString

from bench.chaos.plan import PLAIN, chance, class_of, tenant_of
from psycopg import Connection

SCHEMA: LiteralString = """
CREATE TABLE chaos_accepted (
    operation text PRIMARY KEY,
    class     text NOT NULL,
    tenant    text NOT NULL,
    bad       boolean NOT NULL,  -- its handler refuses it for ever
    leave     boolean NOT NULL,  -- nobody settles its opaque effects
    drop      boolean NOT NULL,  -- an operator cancels it, if it comes to that
    again     boolean NOT NULL,  -- and queues it anew
    at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE chaos_result (
    operation   text NOT NULL,
    class       text NOT NULL,
    attempt     text NOT NULL,
    generation  bigint NOT NULL,
    computed_by text NOT NULL,
    receipts    text[] NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON chaos_result (operation);
"""
ACCEPT: LiteralString = """
INSERT INTO chaos_accepted (operation, class, tenant, bad, leave, drop, again)
VALUES (%(operation)s, %(class)s, %(tenant)s, %(bad)s, %(leave)s, %(drop)s, %(again)s) ON CONFLICT DO NOTHING"""
SAVE: LiteralString = """
INSERT INTO chaos_result (operation, class, attempt, generation, computed_by, receipts)
VALUES (%(operation)s, %(class)s, %(attempt)s, %(generation)s, %(computed_by)s, %(receipts)s)"""


def row(seed: int, operation: str) -> dict[str, Any]:
    """What an operation is, by the seed."""
    name = class_of(seed, operation)
    return {
        "operation": operation,
        "class": name,
        "tenant": tenant_of(seed, operation),
        "bad": name == PLAIN and chance(seed, "bad", operation) < 0.03,
        "leave": chance(seed, "leave", operation) < 0.02,
        "drop": chance(seed, "drop", operation) < 0.05,
        "again": chance(seed, "again", operation) < 0.4,
        "priority": int(chance(seed, "priority", operation) * 3) - 1,
    }


def accept(conn: Connection[Any], rows: Iterable[dict[str, Any]]) -> None:
    """The domain's change, in the caller's transaction; the same operation again changes nothing."""
    with conn.cursor() as cursor:
        cursor.executemany(ACCEPT, list(rows))
