"""What the check of authority costs each transaction: the same publication with it and without it, in turns."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import LiteralString

from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.publish import publish
from fencepost.jobs.submit_many import Submission, submit_many
from fencepost.schemas import migrate
from fencepost.schemas.identity import as_class
from support.database import Databases
from support.jobs import Conn

CLASS = "bench.cost"
BATCH = 100
FILE = "jobs/fence.sql"

TABLE: LiteralString = "CREATE TABLE published (operation text NOT NULL, n bigint NOT NULL)"
WRITE: LiteralString = "INSERT INTO published (operation, n) VALUES (%(operation)s, %(n)s)"
PLACE: LiteralString = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
DONE: LiteralString = """
SELECT (SELECT count(*) FROM fencepost.job AS j WHERE j.exec = 'done'), (SELECT count(*) FROM published)"""


@dataclass(frozen=True, slots=True)
class Cut:
    """Text of the shipped function that is left out, and how often it is there."""

    text: str
    times: int


@dataclass(frozen=True, slots=True)
class Variant:
    """The fence, or what is left of it."""

    name: str
    cuts: tuple[Cut, ...] = ()


AUTHORITY = (
    # The gate, the ticket and the restrictions: in the fence, before the completion, and at the commit.
    Cut("    PERFORM fencepost._enter();\n", 2),
    Cut(" OR fencepost._epoch(p_tenant) IS DISTINCT FROM p_epoch", 1),
    Cut("fencepost._epoch(NEW.tenant) <> NEW.epoch OR ", 1),
)
AT_COMMIT = Cut(
    """    INSERT INTO fencepost.publication (tenant, operation, class, generation, attempt, owner, epoch, lease_until)
    VALUES (p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch, v_job.lease_until);
""",
    1,
)
SHIPPED = Variant("with the check")
WITHOUT = Variant("without it", AUTHORITY)
NEITHER = Variant("nor the check at the commit", (*AUTHORITY, AT_COMMIT))
VARIANTS = (SHIPPED, WITHOUT, NEITHER)


@dataclass(slots=True)
class Measured:
    """Bytes of write-ahead log and seconds of each transaction."""

    wal: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def bytes(self) -> float:
        """The median."""
        return statistics.median(self.wal)

    @property
    def milliseconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds) * 1000


def derived(variant: Variant) -> bytes:
    """The shipped source without the cuts; AssertionError where it is not what the cuts were made for."""
    (source,) = (each.text.decode() for each in migrate.functions() if each.name == FILE)
    for cut in variant.cuts:
        found = source.count(cut.text)
        assert found == cut.times, f"{FILE} has {found} times, not {cut.times}: {cut.text.strip()}"
        source = source.replace(cut.text, "")
    return source.encode()


def measure(databases: Databases, batches: int) -> dict[str, Measured]:
    """So many hundred publications of each variant, one of each after the other, each in a database of its own."""
    found = {variant.name: Measured() for variant in VARIANTS}
    with ExitStack() as opened:
        sides: list[tuple[Measured, Conn]] = []
        other = databases.empty()
        opened.callback(databases.drop, other)
        watch = opened.enter_context(other.connect(autocommit=True))
        for variant in VARIANTS:
            made = databases.migrated()
            opened.callback(databases.drop, made)
            conn = opened.enter_context(made.connect(autocommit=True))
            _prepare(conn, variant, batches * BATCH)
            sides.append((found[variant.name], conn))
        for _ in range(batches):
            claims = [claim(conn, "bench", [CLASS], BATCH) for _, conn in sides]
            for number in range(BATCH):
                # Each comes first as often as the others.
                for turn in range(len(sides)):
                    which = (number + turn) % len(sides)
                    measured, conn = sides[which]
                    _publish(measured, watch, conn, claims[which][number])
        for _, conn in sides:
            row = conn.execute(DONE).fetchone()
            assert row == (batches * BATCH, batches * BATCH), f"not each published once: {row}"
    return found


def _prepare(conn: Conn, variant: Variant, count: int) -> None:
    conn.execute(TABLE)
    conn.execute(derived(variant))
    register_class(conn, JobClassPolicy(name=as_class(CLASS), lease=300.0))
    with conn.transaction():
        submit_many(conn, CLASS, [Submission("acme", f"op-{n:08}", {"n": n}) for n in range(count)])
    conn.execute("VACUUM ANALYZE fencepost.job")


def _publish(measured: Measured, watch: Conn, conn: Conn, job: Job) -> None:
    values = {"operation": job.operation, "n": 1}
    began = _place(watch)
    started = time.perf_counter()
    publish(conn, job.fence, lambda tx: tx.execute(WRITE, values))
    measured.seconds.append(time.perf_counter() - started)
    measured.wal.append(_place(watch) - began)


def _place(watch: Conn) -> int:
    row = watch.execute(PLACE).fetchone()
    assert row is not None
    return int(row[0])
