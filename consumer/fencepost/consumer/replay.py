"""Replay: a history becomes a projection's tables, each event once, by a login that can cause nothing.

The position moves in the transaction of the changes that it stands for, so a replay that is killed goes on where it was.
PostgreSQL refuses a handler that would begin an effect, submit a job, enqueue an event or touch authority, because the
login may not; a login that could is refused before the first event.

Crash here: [P1] after a batch was read, before its commit. Neither changes nor position are there; it is read again.
Crash here: [P2] after the last batch, before the swap. Readers see the old tables; the same command swaps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, LiteralString

import psycopg
from psycopg import Connection, sql
from psycopg.pq import TransactionStatus

from fencepost.consumer.dead_letters import describe
from fencepost.consumer.history import Batch, History, Reach, Record
from fencepost.consumer.newest import Newest
from fencepost.consumer.projection import Projection
from fencepost.consumer.shadow import Shadow
from fencepost.schemas import grants, privileges
from fencepost.schemas.connect import connect
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import CommitWasRollback, FencepostError, ReplayRefused, Undecodable
from fencepost.schemas.event import Event

__all__ = ["Progress", "replay", "require_projector"]

TRIES_MAX = 5
SHOWN_MAX = 3

INSTALLED: LiteralString = "SELECT i.name, i.single_role, session_user::text FROM fencepost.installation AS i"
# Nobody acts upon a batch's commit: losing the last ones in a crash of the server loses their position with them.
BEGIN: LiteralString = """
SELECT pg_current_xact_id()::text, set_config('search_path', %(path)s, true), set_config('synchronous_commit', 'off', true),
       set_config('lock_timeout', '10s', true)"""
REACHES = sql.SQL("SELECT source, range, mark, partition, first, position, last FROM {} ORDER BY partition")
FIRST = sql.SQL("""INSERT INTO {} (source, range, mark, partition, first, position, last)
VALUES (%(source)s, %(range)s, %(mark)s, %(partition)s, %(first)s, %(position)s, %(last)s)""")
MOVE = sql.SQL("""
UPDATE {} AS r SET position = least(b.new_position, b.new_last), last = b.new_last, applied = r.applied + b.applied,
       older = r.older + b.older, passed_over = r.passed_over + b.passed_over, moved_at = clock_timestamp()
FROM unnest(%(partitions)s::integer[], %(old)s::bigint[], %(new)s::bigint[], %(last)s::bigint[],
            %(applied)s::bigint[], %(older)s::bigint[], %(passed_over)s::bigint[])
     AS b (partition, old_position, new_position, new_last, applied, older, passed_over)
WHERE r.partition = b.partition AND r.position = b.old_position AND pg_current_xact_id_if_assigned() = %(xid)s::xid8""")
HOLD = sql.SQL("""
INSERT INTO {} (partition, place, reason, field, type, version, tenant, operation, event_id)
VALUES (%(partition)s, %(place)s, %(reason)s, %(field)s, %(type)s, %(version)s, %(tenant)s, %(operation)s, %(event_id)s)""")
TOTALS = sql.SQL("""
SELECT coalesce(sum(last - first), 0)::bigint, coalesce(sum(position - first), 0)::bigint, coalesce(sum(applied), 0)::bigint,
       coalesce(sum(older), 0)::bigint, coalesce(sum(passed_over), 0)::bigint, (SELECT count(*) FROM {}) FROM {}""")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay has come, in places and in events.

    ``older`` were not newer than what their key had; ``passed_over`` are of types that the projection does not take;
    ``held`` could not be read and are listed in the table ``<name>_held``. ``swapped`` says that readers see the result.
    """

    total: int
    read: int
    applied: int
    older: int
    passed_over: int
    held: int
    swapped: bool = False

    @property
    def complete(self) -> bool:
        """Whether the whole range was read."""
        return self.read >= self.total


def replay(
    projection: Projection[Any],
    dsn: str,
    history: History,
    *,
    stop: threading.Event | None = None,
    restart: bool = False,
    accept_held: bool = False,
    drop_old: bool = False,
    told: Callable[[Progress], None] | None = None,
) -> Progress:
    """Builds the projection in its shadow schema and swaps it in; goes on with the build that it finds, exactly there.

    Not swapped, and so visible by exit and by ``swapped``: when ``stop`` was set, and when events were held and
    ``accept_held`` is not given. ``restart`` throws an unfinished build away. ``drop_old`` drops what was replaced.
    Raises ReplayRefused (``field``: login, handler, tables, old, shadow, range, position; what the handler raised is its
    cause), CommitWasRollback, Unreachable, and InvalidInput for a range that is not there.
    """
    with connect(dsn, autocommit=True) as conn:
        role = require_projector(conn)
        shadow = Shadow(projection, conn)
        shadow.require_replaceable(drop_old=drop_old)
        try:
            source = history.open()
            build = _Build(projection, conn, shadow, role)
            build.begin(source, history, restart)
            progress = build.run(history, stop or threading.Event(), told or _silent)
        finally:
            history.close()
        if not progress.complete or (progress.held and not accept_held):
            return progress
        shadow.swap(drop_old=drop_old)
        return replace(progress, swapped=True)


def require_projector(conn: Connection[Any]) -> str:
    """The projector role of this installation, or ReplayRefused when the login could do more than its row."""
    row = conn.execute(INSTALLED).fetchone()
    assert row is not None
    install, single, login = str(row[0]), bool(row[1]), str(row[2])
    role = grants.role(install, "projector")
    hint = f"use a login that is a member of {role} and of nothing else"
    if single:
        raise ReplayRefused(
            f"login {login} can cause effects: this installation has no roles",
            field="login",
            hint=f"`fencepost grants apply --separate-roles`, then {hint}",
        )
    if found := privileges.beyond(conn, install, "projector"):
        shown = "; ".join(str(d) for d in found[:SHOWN_MAX])
        more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise ReplayRefused(f"login {login} can do more than {role}: {shown}{more}", field="login", hint=hint)
    return role


@dataclass(slots=True)
class _Read:
    """A batch as it will be applied."""

    batch: Batch
    taken: list[tuple[int, Envelope, Event | Envelope]] = field(
        default_factory=list[tuple[int, Envelope, Event | Envelope]]
    )
    held: list[tuple[Record, Undecodable]] = field(default_factory=list[tuple[Record, Undecodable]])
    passed_over: Counter[int] = field(default_factory=Counter[int])


class _Build:
    """One run of one projection's build."""

    def __init__(self, projection: Projection[Any], conn: Connection[Any], shadow: Shadow, role: str) -> None:
        self._projection, self._conn, self._shadow, self._role = projection, conn, shadow, role
        self._newest = Newest(shadow.table("newest")) if projection.newest_only else None
        self._reaches: dict[int, Reach] = {}
        self._mark = ""
        self._path = ", ".join(sql.Identifier(s).as_string(conn) for s in (projection.shadow, projection.schema))
        self._move = MOVE.format(shadow.table("replay"))
        self._hold = HOLD.format(shadow.table("held"))
        self._totals = TOTALS.format(shadow.table("held"), shadow.table("replay"))

    def begin(self, source: str, history: History, restart: bool) -> None:
        """Makes the shadow, or goes on with the one that is there if it is of this source and range."""
        if restart:
            self._shadow.discard()
        if not self._shadow.exists():
            reaches = history.resolve()
            with self._conn.transaction():
                self._shadow.create()
                for partition, reach in reaches.items():
                    values = {"source": source, "range": history.range, "mark": history.mark, "partition": partition}
                    values |= {"first": reach.first, "position": reach.position, "last": reach.last}
                    self._conn.execute(FIRST.format(self._shadow.table("replay")), values)
        rows = self._conn.execute(REACHES.format(self._shadow.table("replay"))).fetchall()
        if any((row[0], row[1]) != (source, history.range) for row in rows):
            raise ReplayRefused(
                f"a build from {rows[0][0]}, {rows[0][1]}, is under way",
                field="range",
                hint="finish it with the same arguments, or begin again with --restart",
            )
        self._mark = str(rows[0][2])
        self._reaches = {row[3]: Reach(row[4], row[5], row[6]) for row in rows}

    def run(self, history: History, stop: threading.Event, told: Callable[[Progress], None]) -> Progress:
        """Applies batch after batch; the next one is read and decoded while PostgreSQL works on this one."""
        row = self._conn.execute(self._totals).fetchone()
        assert row is not None
        at = Progress(*row)
        told(at)
        batches = history.read(self._reaches, self._mark, stop)
        with ThreadPoolExecutor(1, thread_name_prefix="fencepost-replay") as reader:
            ahead = reader.submit(self._next, batches)
            while (read := ahead.result()) is not None:
                ahead = reader.submit(self._next, batches)
                at = self._repeated(read, at)
                told(at)
                if stop.is_set():
                    break
        return at

    def _next(self, batches: Iterator[Batch]) -> _Read | None:
        """The next batch, verified and decoded as the handler takes it."""
        if (batch := next(batches, None)) is None:
            return None
        read = _Read(batch)
        takes, reading = self._projection.takes, self._projection.reading
        for record in batch.records:
            try:
                envelope = record.envelope()
                if takes(envelope.type):
                    envelope.check()
                    read.taken.append((record.partition, envelope, reading.argument(envelope)))
                else:
                    read.passed_over[record.partition] += 1
            except Undecodable as error:
                read.held.append((record, error))
        return read

    def _repeated(self, read: _Read, at: Progress) -> Progress:
        for _ in range(1, TRIES_MAX):
            with suppress(psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
                return self._apply(read, at)
        return self._apply(read, at)

    def _apply(self, read: _Read, at: Progress) -> Progress:
        """One transaction: marks, the handler's changes, what is held, and the position behind all of it."""
        moved = self._moved(read.batch)
        with self._conn.transaction():
            row = self._conn.execute(BEGIN, {"path": self._path}).fetchone()
            assert row is not None
            fresh = read.taken
            if self._newest is not None and fresh:
                wanted = self._newest.advance(self._conn, [envelope for _, envelope, _ in fresh])
                fresh = list(compress(fresh, wanted))
            if fresh:
                self._handle([argument for _, _, argument in fresh])
            for record, error in read.held:
                self._conn.execute(self._hold, _held(record, error))
            taken, applied = (Counter(partition for partition, _, _ in each) for each in (read.taken, fresh))
            parameters: dict[str, object] = {
                "partitions": list(moved),
                "old": [self._reaches[p].position for p in moved],
                "new": [reach.position for reach in moved.values()],
                "last": [reach.last for reach in moved.values()],
                "applied": [applied[p] for p in moved],
                "older": [taken[p] - applied[p] for p in moved],
                "passed_over": [read.passed_over[p] for p in moved],
                "xid": row[0],
            }
            if self._conn.execute(self._move, parameters).rowcount != len(moved):
                raise ReplayRefused(
                    "the position was moved by somebody else, or the handler ended its transaction",
                    field="position",
                    hint="run one replay of a projection at a time; after a handler that commits, begin again with --restart",
                )
        before, self._reaches = self._reaches, self._reaches | moved
        return Progress(
            at.total + sum(reach.last - before[p].last for p, reach in moved.items()),
            at.read + sum(reach.position - before[p].position for p, reach in moved.items()),
            at.applied + len(fresh),
            at.older + len(read.taken) - len(fresh),
            at.passed_over + read.passed_over.total(),
            at.held + len(read.held),
        )

    def _moved(self, batch: Batch) -> dict[int, Reach]:
        moved: dict[int, Reach] = {}
        for partition in {*batch.positions, *batch.ends}:
            reach = self._reaches[partition]
            last = max(reach.position, min(reach.last, batch.ends.get(partition, reach.last)))
            position = last if partition in batch.ends else batch.positions[partition]
            moved[partition] = Reach(reach.first, position, last)
        return moved

    def _handle(self, events: Sequence[Event | Envelope]) -> None:
        try:
            self._projection.apply(self._conn, events)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ReplayRefused(
                f"PostgreSQL refused the handler of {self._projection.name}: {error.diag.message_primary}"
                f" (it runs as {self._role})",
                field="handler",
                hint="a projection writes its own tables only; effects, jobs and events are for consumers and workers",
            ) from None
        except (FencepostError, psycopg.OperationalError):
            raise
        except Exception as error:
            raise ReplayRefused(
                f"the handler of {self._projection.name} raised {describe(error)}",
                field="handler",
                hint="correct it; the same command goes on before the events of this batch",
            ) from error
        if self._conn.info.transaction_status != TransactionStatus.INTRANS:
            raise CommitWasRollback(
                f"the handler of {self._projection.name} swallowed a database error or ended the transaction",
                field="handler",
                hint="wrap what may fail in tx.transaction(); after a handler that commits, begin again with --restart",
            )


def _held(record: Record, error: Undecodable) -> dict[str, object]:
    found = record.found if isinstance(record.found, Envelope) else None
    return {
        "partition": record.partition,
        "place": record.place,
        "reason": error.reason,
        "field": error.field,
        "type": found and found.type,
        "version": found and found.version,
        "tenant": found and found.tenant,
        "operation": found and found.operation,
        "event_id": found and found.id,
    }


def _silent(progress: Progress) -> None:
    """Nobody is looking."""
