"""A backlog of one tenant, workers that publish it, and rotations in the middle of that."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString

from bench.rotation.order import READER, Before, before, point

from fencepost.jobs.authority import By, release, rotate
from fencepost.jobs.claim import JobClassPolicy, register_class
from fencepost.jobs.submit_many import Submission, submit_many
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import Conn
from support.processes import Child, wait_for
from support.workers import CHILD_PATH

CHILD = Path(__file__).with_name("child.py")
TENANT = "acme"
CLASSES = ("bench.import", "bench.notify", "bench.report")
CALLBACK_SECONDS = 0.05
LEASE = 30.0
BY = By("ann", "a rotation under load")
# What may be published between the count and the rotation.
SPARE = 0.03
SPARE_LEAST = 1000
# So many of each worker, and then so many of them inside the fence at one moment, before a rotation is asked for.
EACH = 10

TABLE: LiteralString = """
CREATE TABLE published (operation text NOT NULL, epoch bigint NOT NULL, worker text NOT NULL,
                        xid xid8 NOT NULL DEFAULT pg_current_xact_id())"""
QUEUED: LiteralString = """
SELECT count(*) FROM fencepost.job AS j WHERE j.tenant = %(tenant)s AND j.exec = 'queued'"""
EPOCH: LiteralString = """
SELECT greatest(i.floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = %(tenant)s)) FROM fencepost.installation AS i"""
PUBLISHING: LiteralString = """
SELECT count(*) FROM (SELECT p.worker FROM published AS p WHERE p.epoch = %(epoch)s AND p.worker <> 'forged'
                      GROUP BY p.worker HAVING count(*) >= %(each)s) AS w"""
# Who holds the gate has a row of its own here for each transaction.
INSIDE: LiteralString = """
SELECT count(*) FROM pg_locks AS l
WHERE l.relation = 'fencepost.gate'::regclass AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
  AND l.granted"""
WRITE: LiteralString = "INSERT INTO published (operation, epoch, worker) VALUES ('none', %(epoch)s, 'forged')"
# Of an older epoch, and not among what committed before the rotation: by a worker, and by us.
LATE: LiteralString = """
SELECT count(*) FILTER (WHERE p.worker <> 'forged'), count(*) FILTER (WHERE p.worker = 'forged') FROM published AS p
WHERE p.epoch < %(epoch)s AND NOT pg_visible_in_snapshot(p.xid, %(snapshot)s::pg_snapshot)
  AND p.xid::xid::text <> ALL (%(commits)s::text[])"""
BY_EPOCH: LiteralString = """
SELECT count(*), count(DISTINCT p.worker) FROM published AS p WHERE p.epoch = %(epoch)s AND p.worker <> 'forged'"""
TWICE: LiteralString = "SELECT count(*) - count(DISTINCT p.operation) FROM published AS p WHERE p.worker <> 'forged'"


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    jobs: int
    workers: int = 8
    concurrency: int = 1
    within: float = 60.0


@dataclass(frozen=True, slots=True)
class Turned:
    """One rotation: seconds from its request to its return, what was queued and taken away, and its place among the commits."""

    old: int
    epoch: int
    seconds: float
    held: int
    queued: int
    order: Before


@dataclass(frozen=True, slots=True)
class Let:
    """One release of everything: how many jobs, and how long it took."""

    jobs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Published:
    """What there is at the end under one epoch, and by how many workers."""

    count: int
    workers: int


@dataclass(slots=True)
class Load:
    """A database under load; every wait is on its state."""

    database: Database
    conn: Conn
    size: Size
    submitted: int = 0
    turned: list[Turned] = field(default_factory=list[Turned])

    def prepare(self) -> None:
        """Makes the domain's table and the classes."""
        self.conn.execute(READER)
        self.conn.execute(TABLE)
        for name in CLASSES:
            register_class(self.conn, JobClassPolicy(name=as_class(name), lease=LEASE, max_attempts=1000))

    def fill(self) -> float:
        """Submits what is missing, and a little more where workers take it meanwhile; returns the seconds it took."""
        started = time.monotonic()
        aim = self.size.jobs + max(SPARE_LEAST, round(self.size.jobs * SPARE))
        each = max(0, -(-(aim - self._one(QUEUED, {"tenant": TENANT})) // len(CLASSES)))
        for name in CLASSES:
            numbers = range(self.submitted, self.submitted + each)
            with self.conn.transaction():
                submit_many(self.conn, name, [Submission(TENANT, f"{name}-{n:08}", {"n": n}) for n in numbers])
        self.submitted += each
        self.conn.execute("ANALYZE fencepost.job")
        return time.monotonic() - started

    def publishing(self) -> float:
        """Returns once every worker has published ten times under the current epoch; the seconds that took."""
        started = time.monotonic()
        epoch = self._one(EPOCH, {"tenant": TENANT})
        wait_for(
            lambda: self._one(PUBLISHING, {"epoch": epoch, "each": EACH}) == self.size.workers,
            self.size.within,
            f"all workers to publish under epoch {epoch}",
        )
        return time.monotonic() - started

    def rotate(self) -> Turned:
        """Rotates while all publish, beside a row of ours that is written before and committed after, without the fence."""
        self.publishing()
        old = self._one(EPOCH, {"tenant": TENANT})
        found = point(self.conn)
        with self.database.connect() as forger:
            forger.execute(WRITE, {"epoch": old})
            half = self.size.workers // 2
            wait_for(lambda: self._one(INSIDE) >= half, self.size.within, f"{half} publications under way at once")
            started = time.monotonic()
            done = rotate(self.database.dsn, self.database.state, BY, tenant=TENANT)
            seconds = time.monotonic() - started
            forger.commit()
        order = before(self.conn, found, done.epoch)
        queued = self._one(QUEUED, {"tenant": TENANT})
        # What was under way when it returned has ended, one way or the other.
        point(self.conn)
        turned = Turned(old, done.epoch, seconds, done.held, queued, order)
        self.turned.append(turned)
        return turned

    def release(self) -> Let:
        """Releases everything in batches, as the command does."""
        started = time.monotonic()
        jobs, after = 0, None
        while True:
            with self.conn.transaction():
                done = release(self.conn, BY, tenant=TENANT, after=after)
            jobs, after = jobs + done.released, done.after
            if after is None:
                return Let(jobs, time.monotonic() - started)

    def late(self, turned: Turned) -> tuple[int, int]:
        """Rows of an older epoch that committed after this rotation did: of the workers, and ours."""
        row = self.conn.execute(LATE, {"epoch": turned.epoch} | turned.order.values()).fetchone()
        assert row is not None
        return row[0], row[1]

    def published(self, epoch: int) -> Published:
        """What workers published under this epoch."""
        row = self.conn.execute(BY_EPOCH, {"epoch": epoch}).fetchone()
        assert row is not None
        return Published(row[0], row[1])

    def twice(self) -> int:
        """Operations that were published again."""
        return int(self._one(TWICE))

    def _one(self, statement: LiteralString, values: dict[str, object] | None = None) -> Any:
        row = self.conn.execute(statement, values).fetchone()
        assert row is not None
        return row[0]


@contextmanager
def workers(load: Load, folder: Path) -> Generator[Sequence[Child]]:
    """So many worker processes for the length of the block; at its end they are asked to stop, and must."""
    with ExitStack() as opened:
        children: list[Child] = []
        for number in range(load.size.workers):
            options = {
                "dsn": load.database.dsn,
                "state": str(load.database.state),
                "worker": f"worker-{number}",
                "classes": CLASSES,
                "lease": LEASE,
                "callback": CALLBACK_SECONDS,
                "concurrency": load.size.concurrency,
            }
            output = folder / f"worker-{number}.out"
            child = Child([str(CHILD), json.dumps(options)], output=output, env=CHILD_PATH)
            children.append(opened.enter_context(child))
        yield children
        for child in children:
            assert child.alive, f"a worker ended:\n{child.text[-2000:]}"
            os.kill(child.pid, signal.SIGTERM)
        for child in children:
            code = child.wait(30.0)
            assert code == 0, f"a worker ended with {code}:\n{child.text[-2000:]}"
