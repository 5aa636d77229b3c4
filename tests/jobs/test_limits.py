"""Limits: no more jobs of a class, nor of one tenant in it, run at a time than it says, whoever claims them and whatever ends a run."""

import threading
from collections.abc import Callable
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from fencepost.jobs import effects
from fencepost.jobs.authority import By, rotate
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete, complete_many
from fencepost.jobs.publish import publish
from fencepost.jobs.wait import wait
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.identity import as_class
from support.database import Database
from support.jobs import CLASS, Background, Conn, begun, expire, given, save, show, two, waiting
from support.patience import patient
from support.processes import wait_for

OTHER = "report.other"


def many(conn: Conn, count: int, *, tenants: str = "t", job_class: str = CLASS, **policy: Any) -> None:
    """So many queued jobs of each of these tenants (a letter each)."""
    for tenant in tenants:
        for number in range(count):
            given(conn, f"{tenant}-{number}", tenant=tenant, job_class=job_class, **policy)


def registered(conn: Conn, **policy: Any) -> None:
    """The class with these settings, as a worker of another version would register it."""
    defaults: dict[str, Any] = {"backoff_base": 0.0, "backoff_max": 0.0, "network_bound": 0.0}
    register_class(conn, JobClassPolicy(as_class(CLASS), **(defaults | policy)))


def took(conn: Conn, limit: int = 100, *classes: str) -> list[str]:
    """The operations that a claim gets."""
    return [str(job.operation) for job in claim(conn, "w", classes or [CLASS], limit)]


def unknown(conn: Conn, f: Fence) -> None:
    effects.record(conn, f, "e1", begun(conn, f), "unknown", reason="timeout")


ENDS: dict[str, Callable[[Conn, Fence], object]] = {
    "complete": complete,
    "complete in a batch": lambda conn, f: complete_many(conn, [f]),
    "publish": lambda conn, f: publish(conn, f, lambda tx: save(tx, f.operation)),
    "fail": lambda conn, f: fail(conn, f, "handler_raised"),
    "poison": lambda conn, f: fail(conn, f, "unusable", final=True),
    "release": release,
    "reap": lambda conn, f: expire(conn, f.operation),
    "cancel": lambda conn, f: cancel(conn, f.tenant, f.operation, CLASS, actor="ann", reason="no more"),
    "an unknown effect": unknown,
    "wait": lambda conn, f: wait(conn, f, signal="go"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_class_at_its_limit_starts_nothing_until_a_run_ends(database18: Database, end: str) -> None:
    with database18.connect(autocommit=True) as conn:
        many(conn, 4)
        many(conn, 4, tenants="o", job_class=OTHER)
        registered(conn, limit=2)
        assert len(took(conn, 100, OTHER)) == 4, "the control: a class without a limit"
        first = claim(conn, "w", [CLASS], 100)
        assert len(first) == 2 and took(conn) == []
        ENDS[end](conn, first[0].fence)
        assert len(took(conn, 1)) == 1
        assert took(conn) == []
        assert conn.execute("SELECT count(*) FROM fencepost.job WHERE exec = 'running'").fetchone() == (2 + 4,)


def test_a_rotation_frees_what_it_takes_away(database18: Database) -> None:
    running = "SELECT running FROM fencepost.queues"
    with database18.connect(autocommit=True) as conn:
        many(conn, 2)
        registered(conn, limit=2)
        assert len(took(conn)) == 2
        assert conn.execute(running).fetchone() == (2,)
        rotate(database18.dsn, database18.state, By("ann", "a stolen login"), tenant="t")
        assert conn.execute(running).fetchone() == (0,)


def test_what_is_taken_back_holds_no_permit(database18: Database) -> None:
    with two(database18) as (auto, manual):
        many(auto, 3)
        registered(auto, limit=2)
        assert len(took(manual)) == 2 and took(manual) == []
        manual.rollback()
        assert len(took(auto)) == 2
        assert auto.execute("SELECT count(*), max(cardinality(tenants)) FROM fencepost.turn").fetchone() == (1, 2)


def test_claims_at_once_never_exceed_the_limit_and_go_on_with_other_classes(database: Database) -> None:
    """The second finds the class locked and leaves it, although there is room that the first did not take."""
    with two(database) as (auto, manual):
        many(auto, 4)
        many(auto, 2, job_class=OTHER)
        registered(auto, limit=3)
        assert len(took(manual, 2)) == 2
        assert took(auto, 100, CLASS, OTHER) == ["t-0", "t-1"]
        assert auto.execute("SELECT DISTINCT class FROM fencepost.job WHERE exec = 'running'").fetchall() == [(OTHER,)]
        manual.commit()
        assert len(took(auto)) == 1
        assert took(auto) == []


def test_many_workers_never_exceed_the_limits(database: Database) -> None:
    """Stress: each looks, after its own claim and before it ends anything, at what runs."""
    tenants, jobs = "abc", 20
    with database.connect(autocommit=True) as look:
        many(look, jobs, tenants=tenants)
        registered(look, limit=3, tenant_limit=2)
        stopping = threading.Event()

        def work(conn: Conn) -> list[tuple[int, int]]:
            seen: list[tuple[int, int]] = []
            while not stopping.is_set():
                claimed = claim(conn, "w", [CLASS], 2)
                row = conn.execute(
                    "SELECT coalesce(sum(n), 0)::int, coalesce(max(n), 0)::int FROM (SELECT count(*) AS n"
                    " FROM fencepost.job WHERE exec = 'running' GROUP BY tenant) AS t"
                ).fetchone()
                assert row is not None
                seen.append(row)
                for job in claimed:
                    complete(conn, job.fence)
            return seen

        workers = [Background(database, work) for _ in range(4)]
        done = "SELECT count(*) FROM fencepost.job WHERE exec = 'done'"
        wait_for(lambda: look.execute(done).fetchone() == (jobs * len(tenants),), 60, "all jobs to be done")
        stopping.set()
        seen = [pair for worker in workers for pair in worker.outcome()]
        assert max(running for running, _ in seen) <= 3 and max(most for _, most in seen) <= 2


def test_what_was_claimed_before_there_was_a_limit_counts_also_if_it_was_not_committed_by_then(
    database18: Database,
) -> None:
    with two(database18) as (auto, manual):
        many(auto, 5)
        committed = claim(auto, "w", [CLASS], 1)
        under_way = claim(manual, "w", [CLASS], 2)
        limiting = Background(database18, patient(lambda conn: registered(conn, limit=3)))
        waiting(auto, limiting.pid)
        manual.commit()
        limiting.outcome()
        assert took(auto) == []
        complete(auto, under_way[0].fence)
        complete(auto, committed[0].fence)
        assert len(took(auto)) == 2 and took(auto) == []


def test_a_limit_can_be_raised_lowered_taken_away_and_set_again(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        many(conn, 12)
        registered(conn, limit=3)
        assert len(took(conn)) == 3
        registered(conn, limit=5)
        assert len(took(conn)) == 2
        registered(conn, limit=2)
        assert took(conn) == []
        registered(conn)
        assert len(took(conn, 3)) == 3
        registered(conn, limit=9)
        assert len(took(conn)) == 1 and took(conn) == []


def test_a_tenant_at_its_limit_holds_up_no_other(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        many(conn, 4, tenants="abc")
        registered(conn, tenant_limit=2)
        first = claim(conn, "w", [CLASS], 100)
        assert sorted(job.tenant for job in first) == ["a", "a", "b", "b", "c", "c"]
        assert took(conn) == []
        complete(conn, next(job for job in first if job.tenant == "b").fence)
        assert took(conn) == ["b-2"]
        assert took(conn) == []
        registered(conn, tenant_limit=3, limit=8)
        assert len(took(conn)) == 2 and took(conn) == []


def test_limits_hold_for_several_claims_of_one_transaction(database18: Database) -> None:
    with database18.connect() as conn:
        conn.autocommit = True
        many(conn, 4, tenants="ab")
        many(conn, 2, job_class=OTHER)
        registered(conn, limit=3, tenant_limit=2)
        conn.autocommit = False
        assert len(took(conn, 2, CLASS, OTHER)) == 2
        assert len(took(conn, 100, CLASS, OTHER)) == 3
        assert took(conn) == []
        row = conn.execute("SELECT class, count(*) FROM fencepost.job WHERE exec = 'running' GROUP BY 1 ORDER BY 1")
        assert row.fetchall() == [(CLASS, 3), (OTHER, 2)]
        conn.rollback()


def test_a_claim_that_cannot_see_what_runs_is_refused(database18: Database) -> None:
    """At another isolation the snapshot may be older than the lock; the control is one that is not."""
    with two(database18) as (auto, manual):
        many(auto, 6)
        registered(auto, limit=2)
        manual.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert len(took(manual, 1)) == 1
        manual.commit()
        manual.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        manual.execute("SELECT pg_current_snapshot()")
        assert len(took(auto, 1)) == 1
        with pytest.raises(psycopg.errors.SerializationFailure):
            claim(manual, "w", [CLASS], 1)
        manual.rollback()
        assert took(auto) == []


def test_a_class_without_a_limit_pays_for_none(database18: Database) -> None:
    """Neither a count nor a lock: the claim does not open the table at all."""
    opened = (
        "SELECT count(DISTINCT relation) FROM pg_locks WHERE pid = pg_backend_pid() AND relation IN ('fencepost.turn'::regclass,"
        " 'fencepost.turn_pkey'::regclass)"
    )
    fetched = (
        "SELECT count(*) FROM fencepost.job_class AS k WHERE k.xmax <> 0 AND k.class = %(c)s"
        " AND pg_xact_status(k.xmax::text::xid8) = 'in progress'"
    )
    with two(database18) as (auto, manual):
        for job_class in (CLASS, OTHER):
            many(auto, 3, job_class=job_class)
        registered(auto, limit=2)
        assert len(took(manual, 100, OTHER)) == 3
        assert manual.execute(opened).fetchone() == (0,)
        assert auto.execute(fetched, {"c": OTHER}).fetchone() == (0,)
        manual.rollback()
        assert len(took(manual, 100, CLASS)) == 2, "the control"
        assert manual.execute(opened).fetchone() == (2,)
        assert auto.execute(fetched, {"c": CLASS}).fetchone() == (1,)


def test_who_runs_is_found_without_walking_over_what_ran_while_a_snapshot_is_held(database18: Database) -> None:
    """Counted in blocks; the control, which starts at the other end, walks over every row that was replaced."""
    with two(database18) as (conn, holder):
        given(conn, limit=5)
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT pg_current_snapshot()")
        conn.execute(
            "SELECT fencepost._note_turn(%(c)s, NULL, ARRAY['t'], ARRAY['op-' || n]) FROM generate_series(1, 2000) AS n",
            {"c": CLASS},
        )

        def touched(query: LiteralString) -> int:
            found: list[int] = []
            # Plans apart: the second time.
            for _ in range(2):
                row = conn.execute(
                    sql.SQL("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {}").format(sql.SQL(query))
                )
                (plan,) = row.fetchone() or ([],)
                found.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
            return min(found)

        conn.execute("SET enable_seqscan = off; SET enable_sort = off")
        newest = touched("SELECT * FROM fencepost.turn WHERE class = 'report.analyse' ORDER BY n DESC LIMIT 1")
        oldest = touched("SELECT * FROM fencepost.turn WHERE class = 'report.analyse' ORDER BY n LIMIT 1")
        assert newest < 10 < oldest


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("limit", {"limit": 0}),
        ("limit", {"limit": 1001}),
        ("limit", {"limit": True}),
        ("tenant_limit", {"tenant_limit": -1}),
        ("tenant_limit", {"tenant_limit": 10**12}),
        ("queue", {"queue": ""}),
        ("queue", {"queue": " slow"}),
    ],
)
def test_a_wrong_limit_or_queue_is_refused_by_its_field(field: str, wrong: dict[str, Any]) -> None:
    worker = Worker()
    worker.job(CLASS, queue="slow", limit=1, tenant_limit=1000)
    with pytest.raises(InvalidInput) as refused:
        worker.job(OTHER, **wrong)
    assert refused.value.field == field


REGISTER = """
SELECT fencepost.register_class('c.c', 'strict', '9 s', 5, 5, '1 s', '5 s', '9 s', '9 s',
                                %(queue)s, %(limit)s, %(tenant_limit)s, %(fair)s)"""
GOOD = {"queue": "slow", "limit": 2, "tenant_limit": 1, "fair": True}


def test_the_database_refuses_them_from_any_client(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute(REGISTER, GOOD)
        for field, wrong in (
            *(("queue", queue) for queue in (None, "", "slow ")),
            *((name, value) for name in ("limit", "tenant_limit") for value in (0, 1001)),
            ("fair", None),
        ):
            with pytest.raises(InvalidInput) as refused:
                conn.execute(REGISTER, GOOD | {field: wrong})
            assert refused.value.field == field
        kept = "SELECT queue, job_limit, tenant_limit, fair FROM fencepost.job_class WHERE class = 'c.c'"
        assert conn.execute(kept).fetchone() == ("slow", 2, 1, True)
        conn.execute(REGISTER, GOOD | {"limit": None, "fair": False})
        assert conn.execute(kept).fetchone() == ("slow", 1000, 1, True)


def test_a_worker_of_another_version_decides_as_the_last_that_registered(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        many(conn, 3)
        registered(conn, limit=1)
        registered(conn, limit=2, queue="slow")
        assert len(took(conn)) == 2
        assert show(conn, "t-2") == "queued"
