"""The order contract of a projection: an event is dropped unless it is newer, by ``sequence``, than what its key had.

So copies change nothing, whatever sent them again, and what was overtaken does not undo what overtook it. Sequences are
compared within one source, tenant and ordering key; nothing else is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection, sql

from fencepost.schemas.envelope import Envelope

__all__ = ["Newest"]

# Both parts see the marks as they were before this statement.
ADVANCE = sql.SQL("""
WITH arrived AS (
    SELECT * FROM unnest(%(sources)s::text[], %(tenants)s::text[], %(keys)s::text[], %(sequences)s::bigint[])
        AS a (source, tenant, ordering_key, sequence)),
advanced AS (
    INSERT INTO {0} AS n (source, tenant, ordering_key, sequence) SELECT * FROM arrived
    ON CONFLICT (source, tenant, ordering_key) DO UPDATE SET sequence = excluded.sequence
        WHERE n.sequence < excluded.sequence)
SELECT n.source, n.tenant, n.ordering_key, n.sequence FROM {0} AS n JOIN arrived USING (source, tenant, ordering_key)""")


class Newest:
    """The newest sequence of each key, in a table with the columns source, tenant, ordering_key and sequence."""

    def __init__(self, table: sql.Identifier) -> None:
        self._advance = ADVANCE.format(table)

    def advance(self, tx: Connection[Any], envelopes: Sequence[Envelope]) -> list[bool]:
        """For each envelope whether it is newer than all before it, in the table and here; noted in this transaction."""
        last: dict[tuple[str, str, str], int] = {}
        keys = [(e.source, e.tenant, e.ordering_key) for e in envelopes]
        for key, envelope in zip(keys, envelopes, strict=True):
            if envelope.sequence > last.get(key, -1):
                last[key] = envelope.sequence
        # Locks: in one order, so that two writers of the same marks wait for each other instead of deadlocking.
        ordered = sorted(last)
        rows = tx.execute(
            self._advance,
            {
                "sources": [key[0] for key in ordered],
                "tenants": [key[1] for key in ordered],
                "keys": [key[2] for key in ordered],
                "sequences": [last[key] for key in ordered],
            },
        )
        marks: dict[tuple[str, str, str], int] = {(row[0], row[1], row[2]): row[3] for row in rows}
        wanted: list[bool] = []
        for key, envelope in zip(keys, envelopes, strict=True):
            newer = envelope.sequence > marks.get(key, -1)
            wanted.append(newer)
            if newer:
                marks[key] = envelope.sequence
        return wanted
