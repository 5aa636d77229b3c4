"""Removing orphans: objects that were put and never published. A retention task of its own; nothing else removes objects."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, LiteralString

import psycopg
from psycopg import Connection
from psycopg.rows import tuple_row

from fencepost.jobs.objects import ObjectStore
from fencepost.schemas.errors import InvalidInput

__all__ = ["CONDEMN", "FORGET", "ORPHANS", "Swept", "sweep"]

GRACE_SECONDS = 86_400.0
GRACE_MIN_SECONDS = 60.0
BATCH = 500
# A mark may be taken over after a day; whoever made it acts on it within this time or not at all.
ACT_WITHIN_SECONDS = 30.0

# Between the clocks of the store and of the database.
CLOCK_SECONDS = 300.0

RECOVERED: LiteralString = (
    "SELECT extract(epoch FROM clock_timestamp() - i.recovered_at)::float FROM fencepost.installation AS i"
)
ORPHANS: LiteralString = "SELECT fencepost.orphans(%(store)s, %(objects)s)"
CONDEMN: LiteralString = "SELECT fencepost.condemn_object(%(store)s, %(object)s)"
FORGET: LiteralString = "SELECT fencepost.forget_object(%(store)s, %(object)s, %(mark)s)"


@dataclass(frozen=True, slots=True)
class Swept:
    """What one run found: objects in the store, orphans among the old ones, and of these the removed; temporary files.

    ``doubtful``: put before a recovery, and referenced by nothing that this database knows; they stay.
    """

    objects: int
    orphans: int
    removed: int
    temporary: int
    doubtful: int = 0


def sweep(
    conn: Connection[Any],
    store: ObjectStore,
    *,
    grace: float = GRACE_SECONDS,
    remove: bool = True,
    lost: bool = False,
) -> Swept:
    """Removes what nothing references and is older than ``grace`` seconds; never an object of a manifest, now or later.

    The grace period is a courtesy to work under way, at least a minute: a publication that comes later than that, and
    would reference what is being removed, is refused with ObjectGone and puts it again. ``conn`` is in autocommit; several
    runs at a time share the work. With ``remove=False`` it only counts. The run does not wait for a publication that is
    about to reference an orphan longer than two seconds: the object stays.

    What was put before a recovery may belong to a publication that the restore lost, and others may know it by its name: it
    stays, unless ``lost`` says that it was looked into.

    Raises InvalidInput: ``grace``, ``connection`` (not in autocommit), and ``store``: this database has published nothing
    into it, so one of the two is the wrong one. NotArmed.

    Crash here: [R] a mark without a removal, or a removal without its end: publications of this content are refused until
    a run finds the mark a day later and ends it.
    """
    if grace < GRACE_MIN_SECONDS:
        raise InvalidInput("the grace period is shorter than a minute", field="grace", hint="a day is usual")
    if not conn.autocommit:
        raise InvalidInput("the connection is not in autocommit", field="connection", hint="each mark is a commit")
    seen = orphans = removed = doubtful = 0
    row = conn.execute(RECOVERED).fetchone()
    since = None if row is None or row[0] is None or lost else float(row[0]) - CLOCK_SECONDS
    listed = store.names()
    while True:
        batch = list(islice(listed, BATCH))
        old = {name: age for name, age in batch if age > grace}
        if old or not batch:
            for name in _unreferenced(conn, store, list(old)):
                orphans += 1
                age = old[name] if name in old else store.age(name)
                if since is None or age is None or age <= since:
                    removed += remove and _remove(conn, store, name, grace)
                    continue
                doubtful += 1
                if remove and name not in old:
                    # A removal that the copy saw begin is ended, the object left where it is.
                    _remove(conn, store, name, math.inf)
        if not batch:
            return Swept(seen, orphans, removed, store.tidy(grace) if remove else 0, doubtful)
        seen += len(batch)


def _unreferenced(conn: Connection[Any], store: ObjectStore, names: list[str]) -> Iterator[str]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        for (name,) in cursor.execute(ORPHANS, {"store": store.identity, "objects": names}).fetchall():
            yield str(name)


def _remove(conn: Connection[Any], store: ObjectStore, name: str, grace: float) -> bool:
    which: dict[str, object] = {"store": store.identity, "object": name}
    started = time.monotonic()
    try:
        with conn.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(CONDEMN, which).fetchone()
    except psycopg.errors.LockNotAvailable:
        return False
    if row is None or row[0] is None:
        return False
    age = store.age(name)
    gone = age is not None and age > grace
    if gone:
        if time.monotonic() - started > ACT_WITHIN_SECONDS:
            return False
        store.delete(name)
    conn.execute(FORGET, {**which, "mark": row[0]})
    return gone
