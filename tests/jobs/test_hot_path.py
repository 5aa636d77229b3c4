"""Batches complete each item under its own fence, and no claim walks over what is used up, whatever snapshots are held."""

import asyncio
import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import uuid4

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import Job, claim, marks
from fencepost.jobs.context import AsyncContext
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import complete, complete_many
from fencepost.jobs.renew import renew
from fencepost.jobs.submit import submit
from fencepost.jobs.worker import Worker
from fencepost.schemas.errors import EffectOpen, InvalidInput, NotArmed, StaleFence
from fencepost.schemas.identity import Attempt, Epoch, Generation, OperationId, Owner
from support.database import Database
from support.jobs import CLASS, Background, Conn, begun, claimed, column, expire, given, show, two, waiting
from support.processes import wait_for
from support.workers import becomes, quick, running

SUBMIT_MANY = """
SELECT count(fencepost.submit('t', %(name)s || '-' || n, %(class)s, '{}', 'jcs-sha256:' || encode(sha256('{}'), 'hex')))
FROM generate_series(1, %(count)s) AS n"""
OTHERS = ("cancelled", "expired", "superseded", "effect", "generation", "attempt", "owner", "epoch")


def test_a_batch_completes_what_is_current_and_refuses_each_stale_item_alone(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for operation in ("first", *OTHERS, "last"):
            given(conn, operation)
        jobs = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS], 100)}
        cancel(conn, "t", "cancelled", CLASS, actor="ann", reason="no more")
        expire(conn, "superseded")
        claimed(conn, "superseded", owner="w")
        expire(conn, "expired")
        begun(conn, jobs["effect"])
        fences = list(jobs.values())
        changed = {
            "generation": replace(jobs["generation"], generation=Generation(9)),
            "attempt": replace(jobs["attempt"], attempt=Attempt(uuid4())),
            "owner": replace(jobs["owner"], owner=Owner("v")),
            "epoch": replace(jobs["epoch"], epoch=Epoch(2)),
        }
        batch = [changed.get(f.operation, f) for f in fences] + [replace(fences[0], operation=OperationId("none"))]
        refused = complete_many(conn, batch)
        told = {batch[index].operation: (type(error), error.field) for index, error in refused.items()}
        assert told == {
            "cancelled": (StaleFence, "state"),
            "expired": (StaleFence, "lease"),
            "superseded": (StaleFence, "generation"),
            "effect": (EffectOpen, "effect"),
            "generation": (StaleFence, "generation"),
            "attempt": (StaleFence, "attempt"),
            "owner": (StaleFence, "owner"),
            "epoch": (StaleFence, "epoch"),
            "none": (StaleFence, "operation"),
        }
        states = {operation: show(conn, operation) for operation in ("first", *OTHERS, "last")}
        assert states == {o: "running" for o in OTHERS} | {"first": "done", "last": "done", "cancelled": "cancelled"}
        # What is done is done by its attempt, once: the same batch again completes nothing.
        assert column(conn, "done_attempt", "first") == jobs["first"].attempt
        again = complete_many(conn, [jobs["first"], jobs["last"]])
        assert [error.field for error in again.values()] == ["state", "state"]
        # The control: those that were refused for a wrong part are current with the right one.
        assert complete_many(conn, [jobs[name] for name in changed]) == {}


def test_a_batch_refuses_as_a_single_completion_does(database18: Database) -> None:
    """The same part is named, by the same class of error, with the same advice."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "open")
        jobs = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS], 10)}
        begun(conn, jobs["open"])
        for f in (replace(jobs["op-1"], owner=Owner("v")), jobs["open"]):
            with pytest.raises((StaleFence, EffectOpen)) as single:
                complete(conn, f)
            batched = complete_many(conn, [f])[0]
            assert (type(batched), batched.hint) == (type(single.value), single.value.hint)
            assert batched.field == single.value.field
        with pytest.raises(InvalidInput):
            complete_many(conn, [jobs["open"]] * 1001)
        assert complete_many(conn, []) == {}


def test_a_disarmed_database_completes_no_batch(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        given(conn, "control")
        jobs = {str(job.operation): job.fence for job in claim(conn, "w", [CLASS], 10)}
        assert complete_many(conn, [jobs["control"]]) == {}
        conn.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            complete_many(conn, [jobs["op-1"]])
        assert show(conn) == "running"


def test_a_lease_that_ends_while_a_batch_waits_for_a_row_is_refused(database18: Database) -> None:
    """P4: the clock is read after the locks, in a later statement; the other items are done."""
    with two(database18) as (auto, manual):
        for operation in ("ends", "lasts"):
            given(auto, operation)
        fences = [job.fence for job in claim(auto, "w", [CLASS], 10)]
        manual.execute("SELECT FROM fencepost.job WHERE operation = 'ends' FOR NO KEY UPDATE")
        late = Background(database18, lambda conn: complete_many(conn, fences))
        waiting(auto, late.pid)
        manual.execute(
            "UPDATE fencepost.job SET lease_until = clock_timestamp() - interval '1 ms' WHERE operation = 'ends'"
        )
        manual.commit()
        refused: dict[int, StaleFence | EffectOpen] = late.outcome()
        assert {fences[index].operation: error.field for index, error in refused.items()} == {"ends": "lease"}
        assert (show(auto, "ends"), show(auto, "lasts")) == ("running", "done")


def test_a_batch_that_waits_for_a_renewal_completes_what_was_renewed(database18: Database) -> None:
    """Who is not waited for has another place by then, and would be called stale."""
    with two(database18) as (auto, manual):
        for operation in ("renewed", "beside"):
            given(auto, operation)
        jobs = {str(job.operation): job.fence for job in claim(auto, "w", [CLASS], 10)}
        renew(manual, jobs["renewed"])
        late = Background(database18, lambda conn: complete_many(conn, list(jobs.values())))
        waiting(auto, late.pid)
        manual.commit()
        assert late.outcome() == {}
        assert (show(auto, "renewed"), show(auto, "beside")) == ("done", "done")


def test_handlers_that_end_together_are_completed_together_and_a_stale_one_holds_up_nobody(
    database18: Database,
) -> None:
    """Also when every connection of the worker was cut meanwhile: nothing is done twice, nothing is lost."""
    worker = Worker()
    started: list[str] = []
    go = threading.Event()

    @worker.job(CLASS, **quick(lease=60.0))
    async def handler(ctx: AsyncContext, job: Job) -> None:
        started.append(job.operation)
        while not go.is_set():
            await asyncio.sleep(0.01)

    names = [f"op-{number}" for number in range(20)]
    with database18.connect(autocommit=True) as conn:
        for name in names:
            given(conn, name, lease=60.0)
        with running(worker, database18, concurrency=30):
            wait_for(lambda: len(started) >= 20, 20, "all handlers to start")
            cancel(conn, "t", "op-3", CLASS, actor="ann", reason="no more")
            expire(conn, "op-7")
            wait_for(lambda: started.count("op-7") == 2, 20, "the second attempt of what had expired")
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            go.set()
            for name in names:
                becomes(conn, "cancelled" if name == "op-3" else "done", name)
        attempts = conn.execute("SELECT operation, attempts FROM fencepost.job WHERE attempts <> 1").fetchall()
        assert attempts == [("op-7", 2)] and sorted(set(started)) == sorted(names)


def work(conn: Conn, count: int, name: str, hint: str | None = None) -> list[Job]:
    """So many jobs, submitted, claimed and completed."""
    conn.execute(SUBMIT_MANY, {"count": count, "name": name, "class": CLASS})
    jobs: list[Job] = []
    while batch := claim(conn, "w", [CLASS], 1000, hint):
        assert complete_many(conn, [job.fence for job in batch]) == {}
        jobs += batch
    return jobs


def moved(conn: Conn, hint: str | None = None) -> str:
    """A hint that has been moved on as far as it goes now; writers of other databases hold it back as well."""
    noted = marks(conn, [CLASS], hint)
    found: list[str | None] = []

    def further() -> bool:
        found.append(marks(conn, [CLASS], noted))
        return found[-1] != noted

    wait_for(further, 30, "every earlier writer to end")
    assert found[-1] is not None
    return found[-1]


def blocks(conn: Conn, hint: str | None) -> int:
    """The blocks that a claim touches, plans apart; it is taken back."""
    return min(_blocks(conn, hint) for _ in range(3))


def _blocks(conn: Conn, hint: str | None) -> int:
    with conn.transaction(force_rollback=True):
        row = conn.execute(
            "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM fencepost.claim('w', %(c)s, 4, %(h)s::jsonb)",
            {"c": [CLASS], "h": hint},
        ).fetchone()
    assert row is not None
    plan: dict[str, int] = row[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def test_no_claim_walks_over_what_is_used_up_while_a_snapshot_is_held(database18: Database) -> None:
    """Counted in blocks: with the hint a claim costs the same after 8,000 jobs as after 300, without it ever more."""
    with two(database18) as (conn, holder):
        given(conn)
        work(conn, 1, "warm")
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT pg_current_snapshot()")
        costs: list[tuple[int, int]] = []
        for count in (300, 7_700):
            assert len(work(conn, count, f"n{count}")) == count
            # The pointers to the leases are used up as well, once those would have ended and a claim has seen it.
            conn.execute("UPDATE fencepost.agenda SET due = clock_timestamp()")
            while conn.execute("SELECT FROM fencepost.agenda").fetchone() is not None:
                assert claim(conn, "w", [CLASS], 1) == []
            hint = moved(conn)
            given(conn, f"last-{count}")
            costs.append((blocks(conn, hint), blocks(conn, None)))
            claimed(conn, f"last-{count}")
            cancel(conn, "t", f"last-{count}", CLASS, actor="ann", reason="done")
        (few, few_without), (many, many_without) = costs
        assert many < few + 40, costs
        assert many_without > few_without + 150, f"the control, which walks over dead pointers: {costs}"


def test_a_hint_hides_nothing_that_was_written_before_it_and_committed_after(database18: Database) -> None:
    with two(database18) as (conn, late):
        given(conn)
        hint = moved(conn)
        submit(late, CLASS, tenant="t", operation="late", args={"n": 1})
        assert [job.operation for job in claim(conn, "w", [CLASS], 10, hint)] == ["op-1"]
        noted = marks(conn, [CLASS], hint)
        # Whatever is submitted and claimed meanwhile: the writer of "late" is still at work.
        assert len(work(conn, 3, "meanwhile", noted)) == 3
        assert marks(conn, [CLASS], noted) == noted
        late.commit()
        assert [job.operation for job in claim(conn, "w", [CLASS], 10, noted)] == ["late"]
        newest = moved(conn, noted)
        given(conn, "after")
        assert [job.operation for job in claim(conn, "w", [CLASS], 10, newest)] == ["after"]


def test_a_hint_hides_neither_new_priorities_nor_what_is_due_later_nor_what_is_taken_back(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "lost")
        given(conn, "scheduled")
        conn.execute("UPDATE fencepost.job SET run_at = run_at + interval '1 h' WHERE operation = 'scheduled'")
        first = claimed(conn, "lost")
        work(conn, 5, "done")
        hint = moved(conn)
        with conn.transaction():
            for priority in (-7, 3, 9):
                submit(conn, CLASS, tenant="t", operation=f"p{priority}", args={"n": 1}, priority=priority)
        conn.execute("UPDATE fencepost.job SET run_at = clock_timestamp() WHERE operation = 'scheduled'")
        expire(conn, "lost")
        found = [job.operation for job in claim(conn, "w", [CLASS], 10, hint)]
        assert found[:2] == ["p9", "p3"] and found[-1] == "p-7" and set(found[2:-1]) == {"lost", "scheduled"}
        # From then on the priorities that were claimed have marks as well, although nothing is left in them.
        assert json.loads(moved(conn, hint))["priorities"][CLASS].keys() >= {"9", "3", "0", "-7"}
        with pytest.raises(StaleFence):
            complete(conn, first.fence)


def test_a_hint_is_refused_by_a_clock_that_went_back_and_changes_no_right(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        hint = moved(conn)
        assert claimed(conn).attempts == 1
        ahead = json.loads(hint) | {"noted": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}
        assert marks(conn, [CLASS], json.dumps(ahead)) is None
        # The wildest hint only hides, for a while; a job that is running is never claimed by it.
        assert claim(conn, "w", [CLASS], 10, None) == claim(conn, "w", [CLASS], 10, hint) == []


def test_pointers_that_fit_no_job_any_more_are_removed(database18: Database) -> None:
    """Cancelled before it was claimed, or scheduled anew: the agenda forgets the old pointers, and only those."""
    with database18.connect(autocommit=True) as conn:
        for operation in ("cancelled", "kept", "anew"):
            given(conn, operation)
        cancel(conn, "t", "cancelled", CLASS, actor="ann", reason="no more")
        conn.execute("UPDATE fencepost.job SET run_at = run_at + interval '1 h' WHERE operation = 'anew'")
        pointers = partial(conn.execute, "SELECT operation, due > now() FROM fencepost.agenda ORDER BY 1, 2")
        assert len(pointers().fetchall()) == 4
        moved(conn)
        assert pointers().fetchall() == [("anew", True), ("kept", False)]
        assert [job.operation for job in claim(conn, "w", [CLASS], 10)] == ["kept"]


UNPOINTED = """
SELECT count(*) FROM fencepost.job AS j
WHERE j.exec IN ('queued', 'running') AND NOT EXISTS (
    SELECT FROM fencepost.agenda AS a
    WHERE a.tenant = j.tenant AND a.operation = j.operation AND a.class = j.class AND a.generation = j.generation
      AND CASE j.exec WHEN 'queued' THEN a.priority = j.priority AND a.due <= greatest(j.run_at, clock_timestamp())
                      ELSE a.priority = 2147483647 AND a.due <= greatest(j.lease_until, clock_timestamp()) END)"""


def test_whatever_makes_a_job_queued_or_running_the_agenda_points_to_it(database18: Database) -> None:
    """A job without a pointer would never run again."""
    with database18.connect(autocommit=True) as conn:

        def pointed(state: str, operation: str = "op-1") -> None:
            assert (show(conn, operation), conn.execute(UNPOINTED).fetchone()) == (state, (0,))

        given(conn, max_attempts=2)
        pointed("queued")
        f = claimed(conn).fence
        pointed("running")
        assert release(conn, f) == "queued"
        pointed("queued")
        assert fail(conn, claimed(conn).fence, "handler_raised", delay=timedelta(hours=1)) == "queued"
        pointed("queued")
        conn.execute("UPDATE fencepost.job SET run_at = clock_timestamp()")
        f = claimed(conn).fence
        renew(conn, f)
        pointed("running")
        # Behind the end of the lease that the claim had set, the pointer moves on to the one that was renewed.
        conn.execute("UPDATE fencepost.agenda SET due = clock_timestamp()")
        assert claim(conn, "w", [CLASS], 10) == []
        pointed("running")
        expire(conn)
        assert claim(conn, "w", [CLASS], 10) == []
        assert show(conn) == "poison"
        requeue(conn, "t", "op-1", CLASS, actor="ann", reason="fixed")
        pointed("queued")
        f = claimed(conn).fence
        attempt = begun(conn, f)
        pointed("running")
        expire(conn)
        assert claim(conn, "w", [CLASS], 10) == []
        assert show(conn) == "blocked"
        effects.record(conn, f, "e1", attempt, "success", receipt="r-1")
        pointed("queued")
        assert claimed(conn).mode == "finish"
        pointed("running")
        # The control: what nothing points to is not found.
        conn.execute("DELETE FROM fencepost.agenda")
        assert conn.execute(UNPOINTED).fetchone() == (1,)
