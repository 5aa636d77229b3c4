"""What PostgreSQL reads for a claim follows what is claimed, not what is there: also by plans that were made on empty tables."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import LiteralString

import pytest

from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import claim, marks
from fencepost.jobs.fence import complete_many
from support.database import Database, Databases
from support.jobs import CLASS, Conn, begun, effect, expire, given

JOBS = 20_000
CLAIMED = 50
# Statistics as they are on the first day: autovacuum has not come yet, or came while nothing was there.
NO_AUTOVACUUM: LiteralString = "ALTER TABLE fencepost.{} SET (autovacuum_enabled = off)"
SUBMIT_MANY: LiteralString = """
SELECT count(fencepost.submit('t', 'many-' || n, %(class)s, '{}', 'jcs-sha256:' || encode(sha256('{}'), 'hex')))
FROM generate_series(1, %(count)s) AS n"""
READ: LiteralString = """
SELECT coalesce(sum(pg_stat_get_tuples_fetched(c.oid) + pg_stat_get_tuples_returned(c.oid)), 0)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'fencepost' AND c.relkind IN ('r', 'i')"""
FLUSH: LiteralString = "SELECT pg_stat_force_next_flush()"


@contextmanager
def experienced(database: Database, *, analysed: bool) -> Generator[Conn]:
    """A session whose every statement has a plan from when there was next to nothing, and then many jobs."""
    with database.connect(autocommit=True) as conn, database.connect(autocommit=True) as other:
        for table in ("job", "agenda", "attempt", "effect"):
            conn.execute(NO_AUTOVACUUM.format(table).encode())
        given(other, "first", max_attempts=100)
        if analysed:
            other.execute("DELETE FROM fencepost.agenda")
            other.execute("DELETE FROM fencepost.job")
            other.execute("VACUUM ANALYZE")
            given(other, "first", max_attempts=100)
        hint = None
        for _ in range(7):
            (job,) = claim(conn, "w", [CLASS], CLAIMED, hint)
            expire(other, "first")
            assert set(complete_many(conn, [job.fence])) == {0}
            hint = marks(conn, [CLASS], hint)
        (job,) = claim(conn, "w", [CLASS], CLAIMED, hint)
        assert complete_many(conn, [job.fence]) == {}
        other.execute(SUBMIT_MANY, {"class": CLASS, "count": JOBS})
        yield conn


def read(conn: Conn, database: Database) -> int:
    """Rows and index entries that statements have read so far, in every table of ours."""
    conn.execute(FLUSH)
    with database.connect(autocommit=True) as other:
        row = other.execute(READ).fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def fresh(databases: Databases) -> Iterator[Database]:
    """A database of its own: what it knows of its tables matters here."""
    made = databases.migrated()
    yield made
    databases.drop(made)


@pytest.mark.parametrize("analysed", [False, True], ids=["never analysed", "analysed when empty"])
def test_a_session_that_knew_empty_tables_reads_no_more_than_it_claims(fresh: Database, analysed: bool) -> None:
    with experienced(fresh, analysed=analysed) as conn:
        before = read(conn, fresh)
        jobs = claim(conn, "w", [CLASS], CLAIMED)
        claimed = read(conn, fresh)
        assert len(jobs) == CLAIMED
        stale = [jobs[0].fence] * 2
        for operation in (jobs[0].operation, jobs[1].operation):
            expire(conn, operation)
        between = read(conn, fresh)
        assert set(complete_many(conn, stale)) == {0, 1}
        assert complete_many(conn, [job.fence for job in jobs[2:]]) == {}
        completed = read(conn, fresh)
        # Two leases are over and one effect is due: claims that also take these back.
        third = claim(conn, "w", [CLASS], CLAIMED)
        reaped = read(conn, fresh)
        begun(conn, third[0].fence)
        conn.execute(
            "UPDATE fencepost.effect SET quiescent_at = clock_timestamp(), dispatch_deadline = clock_timestamp()"
        )
        cancel(conn, "t", third[0].operation, CLASS, actor="ann", reason="no more")
        claim(conn, "w", [CLASS], CLAIMED)
        assert effect(conn, "state", third[0].operation) == "unknown"
        last = read(conn, fresh)
        hint = marks(conn, [CLASS], marks(conn, [CLASS]))
        marked = read(conn, fresh)
        assert hint is not None
        spent = {
            "claim": claimed - before,
            "complete": completed - between,
            "reap": reaped - completed,
            "expire": last - reaped,
            "marks": marked - last,
        }
        assert max(spent.values()) < 40 * CLAIMED, spent


SLEEP_MANY: LiteralString = """
WITH slept AS (UPDATE fencepost.job AS j SET exec = 'waiting', generation = 1 WHERE j.exec = 'queued' RETURNING j.*)
INSERT INTO fencepost.wait (tenant, operation, class, signal, generation)
SELECT s.tenant, s.operation, s.class, 'go', 1 FROM slept AS s"""
TELL_SOME: LiteralString = """
SELECT count(fencepost.signal('t', 'many-' || n, %(class)s, 'go', '1')) FROM generate_series(1, %(count)s) AS n"""


def test_waking_reads_no_more_than_what_is_told_whoever_else_waits(fresh: Database) -> None:
    with fresh.connect(autocommit=True) as other:
        for table in ("wait", "signal"):
            other.execute(NO_AUTOVACUUM.format(table).encode())
    with experienced(fresh, analysed=False) as conn:
        with fresh.connect(autocommit=True) as other:
            other.execute(SLEEP_MANY)
            # Whoever went to sleep was looked at once; and a few wake, so that this session has a plan for that.
            other.execute("DELETE FROM fencepost.agenda")
        for number in range(7):
            with fresh.connect(autocommit=True) as other:
                other.execute(
                    "SELECT fencepost.signal('t', %(o)s, %(c)s, 'go', '1')", {"o": f"many-{JOBS - number}", "c": CLASS}
                )
            assert len(claim(conn, "w", [CLASS], CLAIMED)) == 1
        with fresh.connect(autocommit=True) as other:
            other.execute(TELL_SOME, {"class": CLASS, "count": CLAIMED})
        before = read(conn, fresh)
        jobs = claim(conn, "w", [CLASS], CLAIMED)
        woken = read(conn, fresh) - before
        assert len(jobs) == CLAIMED
        assert woken < JOBS / 4, woken
