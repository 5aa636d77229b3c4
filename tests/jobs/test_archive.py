"""Finished jobs leave what is worked with, whole and never too early; their identity, effects and evidence stay for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from fencepost.jobs import effects
from fencepost.jobs.archive import ARCHIVE, Archiving, drop_archives, keep_archive, keep_finished
from fencepost.jobs.authority import By, rotate
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.progress import progress, report
from fencepost.jobs.publish import published
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.result import complete_with, keepable, result
from fencepost.jobs.signals import signal
from fencepost.jobs.stage import stage, staged
from fencepost.jobs.submit import submit
from fencepost.jobs.submit_many import Submission, submit_many
from fencepost.jobs.upkeep import Upkeep
from fencepost.jobs.wait import wait
from fencepost.schemas.errors import (
    FencepostError,
    InvalidInput,
    NotArmed,
    OperationConflict,
    StaleFence,
    UnknownClass,
    WrongTransaction,
)
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    again,
    begun,
    claimed,
    column,
    effect,
    expire,
    given,
    show,
    two,
    waiting,
)
from support.processes import wait_for

BY: dict[str, Any] = {"actor": "ann", "reason": "looked"}
WHICH: dict[str, Any] = {"tenant": "t", "operation": "op-1", "job_class": CLASS}
# What leaves with a job, and what stays.
LEAVES = ("attempt", "staged", "publication", "job_event", "signal", "wait", "progress", "result")
STAYS = ("effect", "effect_event", "decision")


def keep(conn: Conn, days: float = 30, job_class: str = CLASS) -> None:
    """Finished jobs of the class stay for so many days."""
    # A call looks at a few pages: those that earlier tests have used and left would be some of them.
    conn.execute("VACUUM fencepost.attempt, fencepost.job_hold")
    with conn.transaction():
        keep_finished(conn, job_class, timedelta(days=days), **BY)


def later(conn: Conn, days: int = 31) -> None:
    """So many days have passed for every job."""
    conn.execute("UPDATE fencepost.job SET changed_at = changed_at - make_interval(days => %(d)s)", {"d": days})


def archive(conn: Conn, limit: int = 200) -> int:
    """One walk through everything; how many jobs moved."""
    return Archiving(limit=limit).turn(conn, seconds=60)


def batch(conn: Conn, limit: int = 200, after: int = 0) -> tuple[int, int | None]:
    """One call, in the caller's transaction."""
    row = conn.execute(ARCHIVE, {"after": after, "limit": limit}).fetchone()
    assert row is not None
    return row[0], row[1]


def rows(conn: Conn, table: str, operation: str = "op-1") -> list[dict[str, Any]]:
    """Every row of a job in one table, as PostgreSQL writes it."""
    query = sql.SQL(
        "SELECT to_jsonb(x) FROM fencepost.{} AS x WHERE x.operation = %(o)s ORDER BY to_jsonb(x)::text"
    ).format(sql.Identifier(table))
    return [row[0] for row in conn.execute(query, {"o": operation})]


def in_archive(conn: Conn, kind: str, operation: str = "op-1") -> list[dict[str, Any]]:
    """The same out of the archive."""
    query = "SELECT content FROM fencepost.archive WHERE operation = %(o)s AND kind = %(k)s ORDER BY content::text"
    return [row[0] for row in conn.execute(query, {"o": operation, "k": kind})]


def archived(conn: Conn) -> set[str]:
    """The operations of archived jobs."""
    return {o for (o,) in conn.execute("SELECT operation FROM fencepost.job WHERE archived_at IS NOT NULL")}


def done(conn: Conn, operation: str = "op-1", *, days: int = 31, receipt: str | None = None) -> Fence:
    """A job that was done so many days ago, with an effect where a receipt is given; the fence that it had."""
    given(conn, operation)
    keep(conn)
    f = claimed(conn, operation).fence
    if receipt is not None:
        with conn.transaction():
            effects.record(conn, f, "e1", begun(conn, f), "success", receipt=receipt, result={"n": 1})
    with conn.transaction():
        complete_with(conn, f, keepable("fine"))
    conn.execute(
        "UPDATE fencepost.job SET changed_at = changed_at - make_interval(days => %(d)s) WHERE operation = %(o)s",
        {"d": days, "o": operation},
    )
    return f


def eventful(conn: Conn) -> Fence:
    """A life with everything in it: released, failed, expired, waited, signalled, staged, an effect, a publication, a result."""
    given(conn, max_attempts=10, policy="resumable")
    keep(conn)
    release(conn, claimed(conn).fence)
    fail(conn, claimed(conn).fence, reason="broken", detail="once")
    f = claimed(conn).fence
    stage(conn, f, {"half": 1})
    expire(conn)
    cancel(conn, "t", "op-1", CLASS, **BY)
    requeue(conn, "t", "op-1", CLASS, **BY)
    f = claimed(conn, owner="worker-b").fence
    assert wait(conn, f, signal="go") == "waiting"
    with conn.transaction():
        assert signal(conn, name="go", payload={"a": 1}, key="k", **WHICH) == "recorded"
    f = claimed(conn, owner="worker-c").fence
    effects.record(conn, f, "e1", begun(conn, f), "success", receipt="r-1", result={"n": 1})
    report(conn, f, 0.5, "half way")
    stage(conn, f, {"whole": 1})
    with conn.transaction():
        fence(conn, f)
        complete_with(conn, f, keepable({"fine": True}))
    return f


@contextmanager
def archiving(database: Database) -> Generator[Conn]:
    """A batch that has moved what it may and has not committed; the test ends it."""
    with database.connect() as conn:
        assert batch(conn)[0] == 1
        yield conn


def test_everything_of_a_finished_job_moves_word_for_word_but_its_identity_and_its_effects(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        eventful(conn)
        later(conn)
        before = {table: rows(conn, table) for table in (*LEAVES, *STAYS, "job")}
        assert all(before.values()), "the life has everything in it"
        assert [len(before[table]) for table in ("attempt", "staged")] == [5, 2]

        assert archive(conn) == 1

        for table in LEAVES:
            assert rows(conn, table) == [] and in_archive(conn, table) == before[table], table
        for table in STAYS:
            assert rows(conn, table) == before[table] and in_archive(conn, table) == [], table
        assert in_archive(conn, "job") == before["job"]
        (left,), (was,) = rows(conn, "job"), before["job"]
        assert left.pop("archived_at") is not None and left.pop("args") == "\\x"
        assert left == {name: value for name, value in was.items() if name not in ("archived_at", "args")}
        assert archive(conn) == 0
        # Whatever was an attempt of it is gone, also of those that ended early.
        assert conn.execute("SELECT count(*) FROM fencepost.attempt").fetchone() == (0,)


def test_an_archived_operation_is_never_new_and_answers_as_it_did(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        f = done(conn)
        kept = result(conn, **WHICH)
        assert archive(conn) == 1

        with conn.transaction():
            assert not submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 1})
            assert submit_many(conn, CLASS, [Submission("t", "op-1", {"n": 1}), Submission("t", "op-2", {"n": 2})]) == [
                False,
                True,
            ]
        for other in (
            lambda: submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 2}),
            lambda: submit_many(conn, CLASS, [Submission("t", "op-1", {"n": 2})]),
        ):
            with pytest.raises(OperationConflict), conn.transaction():
                other()
        assert published(conn, f)
        assert kept is not None and result(conn, **WHICH) == kept
        assert cancel(conn, "t", "op-1", CLASS, **BY) == "too_late"
        with conn.transaction():
            assert signal(conn, name="go", payload=1, **WHICH) == "too_late"
        with pytest.raises(StaleFence) as refused:
            complete(conn, f)
        assert refused.value.field == "state"
        with pytest.raises(StaleFence) as refused:
            stage(conn, f, 1)
        assert refused.value.field == "attempt" and "archived" in str(refused.value)
        assert progress(conn, **WHICH) is None and staged(conn, f) is None
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["op-2"]


def test_a_cancelled_job_is_archived_with_or_without_an_attempt_and_is_not_queued_again(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for operation in ("early", "late", "again"):
            given(conn, operation)
        keep(conn)
        claimed(conn, "late")
        for operation in ("early", "late", "again"):
            cancel(conn, "t", operation, CLASS, **BY)
        requeue(conn, "t", "again", CLASS, **BY)
        assert show(conn, "again") == "queued", "the control: what is not archived is queued again"
        later(conn)

        assert archive(conn) == 2

        assert archived(conn) == {"early", "late"}
        assert conn.execute("SELECT count(*) FROM fencepost.job_hold").fetchone() == (0,)
        with pytest.raises(StaleFence) as refused:
            requeue(conn, "t", "early", CLASS, **BY)
        assert refused.value.field == "state" and "archived" in str(refused.value)
        assert cancel(conn, "t", "early", CLASS, **BY) == "already_cancelled"
        with conn.transaction():
            assert signal(conn, tenant="t", operation="early", job_class=CLASS, name="go", payload=1) == "too_late"
            assert not submit(conn, CLASS, tenant="t", operation="early", args={"n": 1})


def test_what_is_open_doubtful_young_or_of_no_declared_class_stays_as_it_is(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        assert archive(conn) == 0
        for operation in ("done", "unknown", "suspect"):
            done(conn, operation, days=0)
        for operation in ("running", "waiting", "blocked", "held", "poison", "pending", "lost", "theirs"):
            given(conn, operation)
        given(conn, "other", job_class="report.other")
        held = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS, "report.other"], 100)}
        assert wait(conn, held["waiting"], signal="go") == "waiting"
        effects.record(conn, held["blocked"], "e1", begun(conn, held["blocked"]), "unknown", reason="timeout")
        fail(conn, held["poison"], reason="broken", final=True)
        complete(conn, held["other"])
        begun(conn, held["pending"])
        effects.record(conn, held["lost"], "e1", begun(conn, held["lost"]), "unknown", reason="timeout")
        for operation in ("pending", "lost", "theirs"):
            cancel(conn, "t", operation, CLASS, **BY)
        conn.execute("UPDATE fencepost.job SET reason = 'transferred', detail = 'they' WHERE operation = 'theirs'")
        conn.execute(
            "UPDATE fencepost.job SET exec = 'held', attempt = NULL, owner = NULL, lease_until = NULL WHERE operation = 'held'"
        )
        conn.execute("UPDATE fencepost.job SET suspect = true, quiescent_at = now() WHERE operation = 'suspect'")
        conn.execute(
            "INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, dispatch_deadline, quiescent_at)"
            " VALUES ('t', 'unknown', 'e1', %(c)s, 'opaque', 'unknown', now(), now())",
            {"c": CLASS},
        )
        done(conn, "young", days=-2)
        given(conn, "queued")
        later(conn)

        assert archive(conn) == 1
        assert archived(conn) == {"done"}
        states = dict(conn.execute("SELECT operation, exec FROM fencepost.job WHERE archived_at IS NULL").fetchall())
        assert states == {
            **{name: name for name in ("queued", "running", "waiting", "blocked", "held", "poison")},
            **{name: "cancelled" for name in ("pending", "lost", "theirs")},
            **{name: "done" for name in ("unknown", "suspect", "young", "other")},
        }
        # Settled, it goes like any other; and so does a class once it is declared.
        conn.execute("UPDATE fencepost.effect SET quiescent_at = now() - interval '1 s'")
        settled: dict[str, Any] = {"evidence_kind": "operator", "evidence_ref": "a", **BY}
        for operation in ("unknown", "lost"):
            version = effect(conn, "version", operation)
            reconcile(conn, "t", operation, "e1", version=version, verdict="not_applied", **settled)
        keep(conn, 30, "report.other")
        later(conn)
        assert archive(conn) == 4
        assert archived(conn) == {"done", "unknown", "lost", "young", "other"}


def test_a_walk_is_told_where_and_how_much(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        done(conn)
        for field, limit, after in (
            ("after", 1, -1),
            ("after", 1, 4294967001),
            ("after", 1, None),
            ("limit", 0, 0),
            ("limit", 1001, 0),
            ("limit", None, 0),
        ):
            with pytest.raises(InvalidInput) as refused:
                conn.execute(ARCHIVE, {"after": after, "limit": limit})
            assert refused.value.field == field
        # What lies before the place is not looked at.
        assert batch(conn, after=64) == (0, None)
        assert batch(conn) == (1, None)


def test_only_its_own_effects_keep_a_job_from_the_archive(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        done(conn)
        done(conn, "counted")
        given(conn, "cancelled")
        cancel(conn, "t", "cancelled", CLASS, **BY)
        # As after somebody wrote to the tables himself: counted, and nowhere to be found.
        conn.execute("UPDATE fencepost.job SET open_effects = 1 WHERE operation = 'cancelled'")
        given(conn, job_class="report.other")
        begun(conn, claimed(conn, job_class="report.other").fence)
        later(conn)
        assert archive(conn) == 2 and archived(conn) == {"op-1", "counted"}
        conn.execute("UPDATE fencepost.job SET open_effects = 0 WHERE operation = 'cancelled'")
        assert archive(conn) == 1


def test_late_evidence_for_an_archived_job_is_taken_as_ever(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        f = done(conn, receipt="r-1")
        given(conn, "op-2")
        g = claimed(conn, "op-2").fence
        sent = begun(conn, g)
        effects.record(conn, g, "e1", sent, "failed_before_dispatch", reason="refused")
        complete(conn, g)
        later(conn)
        attempt = effect(conn, "effect_attempt")
        assert archive(conn) == 2

        assert effects.record(conn, f, "e1", attempt, "success", receipt="r-1b") == "success"
        assert [e["receipt"] for e in rows(conn, "effect_event") if e["reason"] == "another_receipt"] == ["r-1b"]
        # A receipt against what was believed: unknown, somebody's, and settled by evidence; the job stays done.
        assert effects.record(conn, g, "e1", sent, "success", receipt="r-2") == "unknown"
        assert (effect(conn, "contradicted", "op-2"), effect(conn, "severity", "op-2")) == (True, "critical")
        became = reconcile(
            conn, "t", "op-2", "e1", version=effect(conn, "version", "op-2"), verdict="applied", receipt="r-2",
            evidence_kind="operator", evidence_ref="the ledger", **BY,
        )  # fmt: skip
        assert (became, show(conn, "op-2")) == ("resolved_applied", "done")
        # Another class with the same key gets the receipt; it never dispatches again.
        given(conn, "op-1", job_class="report.other")
        h = claimed(conn, job_class="report.other").fence
        recorded = again(conn, h)
        assert isinstance(recorded, effects.Recorded) and recorded.receipt == "r-1"


def test_evidence_that_is_being_recorded_is_waited_for_by_nobody_and_seen_by_the_next_walk(
    database18: Database,
) -> None:
    with two(database18) as (auto, manual):
        f = done(auto)
        done(auto, "free")
        auto.execute(
            "INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by,"
            " request_digest, dispatch_deadline, quiescent_at)"
            " VALUES ('t', 'op-1', 'e1', %(c)s, 'opaque', 'failed_before_dispatch', %(a)s, %(a)s, sha256(''), now(), now())",
            {"c": CLASS, "a": f.attempt},
        )
        assert effects.record(manual, f, "e1", f.attempt, "success", receipt="r") == "unknown"

        assert archive(auto) == 1 and archived(auto) == {"free"}
        manual.commit()
        later(auto)
        assert archive(auto) == 0, "an unknown effect is evidence that somebody has to settle"


def test_evidence_that_arrives_while_its_job_moves_waits_and_is_taken(database18: Database) -> None:
    with two(database18) as (auto, _), archiving_after(database18, auto, receipt="r-1") as (moving, f):
        attempt = effect(auto, "effect_attempt")
        late = Background(database18, lambda conn: effects.record(conn, f, "e1", attempt, "success", receipt="r-2"))
        waiting(auto, late.pid)
        moving.commit()
        assert late.outcome() == "success"
        assert archived(auto) == {"op-1"}
        assert {e["receipt"] for e in rows(auto, "effect_event")} >= {"r-1", "r-2"}


@contextmanager
def archiving_after(database: Database, auto: Conn, **life: Any) -> Generator[tuple[Conn, Fence]]:
    """A done job, and the batch that moves it before its commit."""
    f = done(auto, **life)
    with archiving(database) as moving:
        yield moving, f


def test_a_submit_while_the_job_moves_or_under_a_snapshot_from_before_it_makes_no_second_job(
    database18: Database,
) -> None:
    def resubmit(conn: Conn) -> bool:
        with conn.transaction():
            return submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 1})

    with two(database18) as (auto, old):
        done(auto)
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT FROM fencepost.installation")
        with archiving(database18) as moving:
            asking = Background(database18, resubmit)
            waiting(auto, asking.pid)
            moving.commit()
            assert asking.outcome() is False
        with pytest.raises(psycopg.errors.SerializationFailure):
            resubmit(old)
        old.rollback()
        assert not resubmit(old)
        assert archived(auto) == {"op-1"} and column(auto, "exec") == "done"


def test_a_result_that_is_being_staged_keeps_its_job_and_one_that_comes_too_late_is_refused(
    database18: Database,
) -> None:
    with two(database18) as (auto, manual):
        f = done(auto)
        stage(manual, f, {"late": 1})
        assert archive(auto) == 0, "its attempt is held"
        manual.commit()
        with archiving(database18) as moving:
            late = Background(database18, lambda conn: stage(conn, f, {"later": 1}))
            waiting(auto, late.pid)
            moving.commit()
            with pytest.raises(StaleFence) as refused:
                late.outcome()
        assert refused.value.field == "attempt"
        assert len(in_archive(auto, "staged")) == 1 and rows(auto, "staged") == []


def test_a_rotation_waits_for_the_batch_and_changes_nothing_that_was_archived(database18: Database) -> None:
    with two(database18) as (auto, _), archiving_after(database18, auto) as (moving, _):
        turning = Background(
            database18, lambda conn: rotate(database18.dsn, database18.state, By("ann", "why", "ticket"), tenant="t")
        )
        wait_for(
            lambda: (
                auto.execute(
                    "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'fencepost.gate'::regclass AND NOT granted"
                ).fetchone()
                == (True,)
            ),
            10,
            "the rotation to wait for the gate",
        )
        moving.commit()
        turning.outcome()
        assert archived(auto) == {"op-1"} and show(auto) == "done"


def test_two_walks_at_once_share_the_jobs(database18: Database) -> None:
    with two(database18) as (auto, manual):
        done(auto, "first")
        assert archive(auto) == 1, "the first of a month makes the partition"
        for n in range(3):
            done(auto, f"op-{n}")
        assert batch(manual, 1)[0] == 1
        assert archive(auto) == 2
        manual.commit()
        assert archived(auto) == {"first", "op-0", "op-1", "op-2"}
        assert auto.execute("SELECT count(*) FROM fencepost.archive WHERE kind = 'job'").fetchone() == (4,)


def test_a_walk_that_is_killed_before_its_commit_has_moved_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as auto:
        done(auto)
        before = {table: rows(auto, table) for table in (*LEAVES, "job")}
        with database18.connect() as victim:
            assert batch(victim)[0] == 1
            auto.execute("SELECT pg_terminate_backend(%(p)s, 5000)", {"p": victim.info.backend_pid})
            with pytest.raises(psycopg.OperationalError):
                victim.commit()
            victim.close()
        assert {table: rows(auto, table) for table in (*LEAVES, "job")} == before
        assert in_archive(auto, "job") == []
        assert archive(auto) == 1


def test_history_leaves_for_the_archive_only_and_what_is_archived_never_runs_again(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        eventful(conn)
        for table in ("staged", "attempt", "publication", "signal", "result", "job_event"):
            with pytest.raises(InvalidInput) as refused:
                conn.execute(f"DELETE FROM fencepost.{table}".encode())
            assert refused.value.field == table
        # Who says that this is the archive's work still takes nothing with him that is not there; nor does half a truth help.
        saying = "SELECT set_config('fencepost.archiving', pg_current_xact_id()::text, true)"
        kept = (
            "INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)"
            " SELECT now(), r.tenant, r.operation, r.class, 'result', to_jsonb(r) || %s::jsonb FROM fencepost.result AS r"
        )
        with conn.transaction(force_rollback=True):
            conn.execute("SELECT fencepost._make_archive()")
            conn.execute(saying)
            with pytest.raises(InvalidInput), conn.transaction():
                conn.execute("DELETE FROM fencepost.result")
            with pytest.raises(InvalidInput), conn.transaction():
                conn.execute(kept, ('{"result": "other"}',))
                conn.execute("DELETE FROM fencepost.result")
            conn.execute(kept, ("{}",))
            conn.execute("DELETE FROM fencepost.result")
            with pytest.raises(InvalidInput), conn.transaction():
                conn.execute("DELETE FROM fencepost.effect_event")
        later(conn)
        assert archive(conn) == 1
        for change in (
            "UPDATE fencepost.archive SET content = '{}'",
            "DELETE FROM fencepost.archive",
            "TRUNCATE fencepost.archive",
        ):
            with pytest.raises(InvalidInput):
                conn.execute(change.encode())
        with pytest.raises(psycopg.errors.CheckViolation):
            conn.execute("UPDATE fencepost.job SET exec = 'queued', done_attempt = NULL")


def test_batches_are_bounded_and_go_on_until_nothing_is_left(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for n in range(5):
            done(conn, f"op-{n}")
        found = conn.execute("SELECT class, jobs FROM fencepost.finished_jobs(100)").fetchall()
        assert found == [(CLASS, 5)]
        assert conn.execute("SELECT passed_at FROM fencepost.job_retention").fetchone() == (None,)
        assert batch(conn, 2) == (2, 0)
        assert batch(conn, 2) == (2, 0)
        assert batch(conn, 2) == (1, None)
        assert conn.execute("SELECT passed_at IS NOT NULL FROM fencepost.job_retention").fetchone() == (True,)
        walk = Archiving(limit=2)
        assert walk.turn(conn) == 0
        done(conn, "op-5")
        assert walk.turn(conn) == 0, "the next walk is not due yet"
        assert archive(conn, 2) == 1
        for wrong in ({"limit": 0}, {"limit": 1001}, {"after": -1}):
            with pytest.raises(InvalidInput):
                batch(conn, **wrong)


def test_what_may_not_act_archives_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        done(conn)
        with pytest.raises(WrongTransaction), conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            batch(conn)
        conn.execute("DELETE FROM fencepost.ticket")
        for act in (lambda: batch(conn), lambda: drop_archives(conn), lambda: keep(conn)):
            with pytest.raises(NotArmed):
                act()
        assert archived(conn) == set()


def test_months_of_the_archive_go_as_a_whole_and_leave_the_identity(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        f = done(conn)
        conn.execute(
            "CREATE TABLE fencepost.archive_2020_01 PARTITION OF fencepost.archive"
            " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-02-01 00:00+00')"
        )
        try:
            assert archive(conn) == 1
            conn.execute("SET session_replication_role = replica")
            conn.execute("UPDATE fencepost.archive SET archived_at = '2020-01-15 00:00+00'")
            conn.execute("RESET session_replication_role")
            assert drop_archives(conn) == [], "nothing is declared: for ever"
            with conn.transaction():
                keep_archive(conn, timedelta(days=30000), **BY)
            assert drop_archives(conn) == []
            assert result(conn, **WHICH) is not None
            with conn.transaction():
                keep_archive(conn, timedelta(days=365), **BY)
            assert drop_archives(conn, dry_run=True) == ["archive_2020_01"]
            walk = Archiving()
            assert walk.turn(conn) == 0 and walk.dropped == ["archive_2020_01"]
        finally:
            conn.execute("DROP TABLE IF EXISTS fencepost.archive_2020_01")
        assert result(conn, **WHICH) is None and published(conn, f)
        with conn.transaction():
            assert not submit(conn, CLASS, tenant="t", operation="op-1", args={"n": 1})


def test_how_long_they_stay_is_declared_with_a_reason_and_refused_where_it_cannot_be(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        keep(conn)
        refusals: list[tuple[Callable[[], object], type[FencepostError], str]] = [
            (lambda: keep_finished(conn, CLASS, timedelta(minutes=59), **BY), InvalidInput, "finished_keep"),
            (lambda: keep_finished(conn, "nobody", timedelta(days=1), **BY), UnknownClass, "class"),
            (lambda: keep_archive(conn, timedelta(hours=23), **BY), InvalidInput, "archive_keep"),
            (lambda: keep_finished(conn, CLASS, None, actor="ann", reason=""), InvalidInput, "reason"),
        ]
        for act, error, field in refusals:
            with pytest.raises(error) as refused:
                act()
            assert refused.value.field == field
        keep_finished(conn, CLASS, None, **BY)
        keep_archive(conn, timedelta(days=2), **BY)
        keep_archive(conn, None, **BY)
        decided = conn.execute("SELECT subject, verdict FROM fencepost.decision ORDER BY id").fetchall()
        assert decided == [
            (f"finished {CLASS}", "30 days"),
            (f"finished {CLASS}", "for ever"),
            ("archive of jobs", "2 days"),
            ("archive of jobs", "for ever"),
        ]
        assert conn.execute("SELECT count(*) FROM fencepost.job_retention").fetchone() == (0,)


def test_of_several_workers_one_walks_until_it_is_gone(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        done(conn)
        first, second = Archiving(pause=0.0, owner=uuid4()), Archiving(pause=0.0, owner=uuid4())
        assert first.turn(conn) == 1
        done(conn, "op-2")
        assert second.turn(conn) == 0
        assert archived(conn) == {"op-1"}
        conn.execute("UPDATE fencepost.duty SET lease_until = clock_timestamp() - interval '1 ms'")
        assert second.turn(conn) == 1
        done(conn, "op-3")
        assert first.turn(conn) == 0
        assert archive(conn) == 1, "an operator's purge waits for nobody"


def test_a_worker_archives_by_itself(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        done(conn)
        upkeep = Upkeep(database18.dsn, "w", {}, seconds=0.05)
        before = set(threading.enumerate())
        upkeep.start()
        try:
            wait_for(lambda: archived(conn) == {"op-1"}, 20, "the job to be archived")
        finally:
            upkeep.stop()
        wait_for(lambda: set(threading.enumerate()) <= before, 10, "its thread to end")
