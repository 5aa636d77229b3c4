"""The manifest: which immutable objects an operation has published, recorded behind its fence.

    stored = store.put(pdf)                                                       # in the handler, as often as need be
    ctx.publish(lambda tx: record(tx, store, job.fence, {"report.pdf": stored}))  # then, with all other results

Objects are put first and referenced last, so a reference never lacks its object; what was put and never referenced is an
orphan (`orphans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.fence import Fence
from fencepost.jobs.objects import ObjectStore, Stored
from fencepost.schemas.errors import InvalidInput, ObjectGone

__all__ = ["MANIFEST", "RECORD", "manifest", "record"]

RECORD: LiteralString = """
SELECT fencepost.record_objects(%(tenant)s, %(operation)s, %(store)s, %(names)s, %(objects)s, %(sizes)s)"""
MANIFEST: LiteralString = """
SELECT m.name, m.store, m.object, m.size FROM fencepost.manifest AS m
WHERE m.tenant = %(tenant)s AND m.operation = %(operation)s ORDER BY m.name"""


def record(tx: Connection[Any], store: ObjectStore, f: Fence, objects: Mapping[str, Stored]) -> None:
    """Publishes the objects under these names with the caller's commit; all of them are in the store then, or none is.

    Runs inside a publication's callback, or after ``fence``. Looks into the store (once for each object) after the rows
    are written: from then on nobody removes one of them. The same entry again is the same; entries never change.

    Raises NotFenced outside the fence of this tenant and operation, ObjectGone when an object is not there or is being
    removed as an orphan (put it again and publish again: a retry of the job does), OperationConflict when the operation
    has another object under one of the names, InvalidInput naming the field.
    """
    if any(s.store != store.identity for s in objects.values()):
        raise InvalidInput("an object is of another store", field="store", hint="pass the store that it was put into")
    tx.execute(
        RECORD,
        {
            "tenant": f.tenant,
            "operation": f.operation,
            "store": store.identity,
            "names": list(objects),
            "objects": [s.object for s in objects.values()],
            "sizes": [s.size for s in objects.values()],
        },
    )
    # Invariant: looked at after the rows hold it in place; before, an orphan of the same content could go in between.
    for name in sorted({s.object for s in objects.values()}):
        if store.age(name) is None:
            raise ObjectGone(
                "an object to be published is not in its store", field="object", hint="put it again, then publish again"
            )


def manifest(conn: Connection[Any], tenant: str, operation: str) -> dict[str, Stored]:
    """The objects that this operation has published, by name; empty when there are none."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(MANIFEST, {"tenant": tenant, "operation": operation}).fetchall()
    return {str(name): Stored(str(store), str(found), int(size)) for name, store, found, size in rows}
