"""A job that waits holds nothing and pays nothing, and no order of signal, wait and claim leaves it asleep."""

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel, requeue
from fencepost.jobs.claim import Job, claim, marks
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.effects import Success
from fencepost.jobs.fail import fail, release
from fencepost.jobs.fence import Fence, complete
from fencepost.jobs.renew import renew
from fencepost.jobs.signals import Signal, signal
from fencepost.jobs.submit import submit
from fencepost.jobs.wait import Answer, wait
from fencepost.jobs.worker import Poison, Waiting, Worker
from fencepost.schemas.errors import (
    EffectOpen,
    FencepostError,
    InvalidInput,
    LeaseLost,
    NotArmed,
    StaleFence,
    WrongTransaction,
)
from support.database import Database
from support.jobs import CLASS, Conn, begun, claimed, column, expire, given, results, save, show, two
from support.processes import wait_for
from support.workers import QUICK, becomes, quick, running

BY: dict[str, Any] = {"actor": "ann", "reason": "looked"}


def tell(conn: Conn, name: str = "go", operation: str = "op-1", **more: Any) -> None:
    """A signal, in the transaction that is open or in one of its own."""
    with conn.transaction():
        heard = signal(conn, tenant="t", operation=operation, job_class=CLASS, name=name, **more)
        assert heard == "recorded"


def asleep(conn: Conn, operation: str = "op-1", **what: Any) -> Fence:
    """The job was claimed and waits; returns the fence that it had."""
    f = claimed(conn, operation).fence
    assert wait(conn, f, **(what or {"signal": "go"})) == "waiting"
    return f


def woken(conn: Conn, hint: str | None = None) -> Job:
    """The next claim finds the job."""
    (job,) = claim(conn, "w", [CLASS], 10, hint)
    return job


def sleeps(conn: Conn, operation: str = "op-1") -> bool:
    """Claims find nothing and leave it waiting."""
    return claim(conn, "w", [CLASS], 10) == [] and show(conn, operation) == "waiting"


def past(conn: Conn, hours: int = 24) -> None:
    """So many hours have passed for whoever waits."""
    conn.execute(
        "UPDATE fencepost.wait SET until = until - make_interval(hours => %(h)s), began_at = began_at - make_interval(hours => %(h)s)",
        {"h": hours},
    )


def heard(answer: Answer) -> object:
    """What the signal said, or the answer."""
    return answer.payload if isinstance(answer, Signal) else answer


@pytest.mark.parametrize("mode", ["execute", "finish"])
def test_a_wait_holds_nothing_is_not_charged_and_ends_with_the_signal(database: Database, mode: str) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, max_attempts=1, max_finishes=1)
        f = claimed(conn).fence
        if mode == "finish":
            effects.record(conn, f, "e1", begun(conn, f), "success", receipt="r-1")
            expire(conn)
            f = claimed(conn).fence
        before = (column(conn, "attempts"), column(conn, "finishes"))
        assert wait(conn, f, signal="go") == "waiting"

        assert (show(conn), column(conn, "reason"), column(conn, "detail")) == ("waiting", "waiting_for_signal", "go")
        assert column(conn, "generation") == f.generation + 1
        assert [column(conn, name) for name in ("attempt", "owner", "lease_until")] == [None] * 3
        charged = (column(conn, "attempts"), column(conn, "finishes"))
        assert charged == ((0, 0) if mode == "execute" else (before[0], 0))
        assert sleeps(conn)
        tell(conn, "another")
        assert sleeps(conn)
        tell(conn, payload={"by": "ann"})

        job = woken(conn)
        assert (job.mode, job.attempts) == (mode, 1)
        assert heard(wait(conn, job.fence, signal="go")) == {"by": "ann"}
        complete(conn, job.fence)


def test_whoever_waits_has_no_authority_left(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = claimed(conn).fence
        renew(conn, f)  # the control
        assert wait(conn, f, signal="go") == "waiting"
        for refused in (
            partial(renew, conn, f),
            partial(complete, conn, f),
            partial(fail, conn, f, "handler_raised"),
            partial(release, conn, f),
            partial(wait, conn, f, signal="go"),
            partial(begun, conn, f),
        ):
            with pytest.raises(StaleFence) as error:
                refused()
            assert error.value.field == "state"
        tell(conn)
        woken(conn)
        with pytest.raises(StaleFence) as error:
            complete(conn, f)
        assert error.value.field == "generation"


def test_only_the_current_attempt_of_an_armed_database_may_wait(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = claimed(conn).fence
        expire(conn)
        with pytest.raises(StaleFence) as error:
            wait(conn, f, signal="go")
        assert error.value.field == "lease"
        f = claimed(conn).fence
        ticket = conn.execute("DELETE FROM fencepost.ticket RETURNING 1").fetchall()
        assert ticket
        with pytest.raises(NotArmed):
            wait(conn, f, signal="go")
        assert show(conn) == "running"


def test_an_open_effect_forbids_waiting_and_a_settled_one_does_not(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, policy="resumable")
        f = claimed(conn).fence
        attempt = begun(conn, f)
        with pytest.raises(EffectOpen):
            wait(conn, f, signal="go")
        assert show(conn) == "running"
        effects.record(conn, f, "e1", attempt, "success", receipt="r-1")
        assert wait(conn, f, signal="go") == "waiting"


def test_a_signal_before_the_wait_is_what_it_returns(database18: Database) -> None:
    """Before the claim, and while it runs; a wait for it never sleeps, and what follows is not what it waited for."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        tell(conn, payload=1)
        f = claimed(conn).fence
        tell(conn, "late", payload=2)
        tell(conn, payload=3)
        for _ in range(2):
            assert heard(wait(conn, f, signal="go")) == 1
        assert heard(wait(conn, f, signal="late", until=timedelta(hours=1))) == 2
        assert show(conn) == "running"
        complete(conn, f)


def test_whichever_comes_first_ends_the_wait_and_the_answer_stays(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for operation in ("signal", "time"):
            given(conn, operation)
            asleep(conn, operation, signal="go", until=timedelta(hours=1))
        assert claim(conn, "w", [CLASS], 10) == []
        tell(conn, "go", "signal", payload=7)
        f = claimed(conn, "signal").fence
        assert heard(wait(conn, f, signal="go", until=timedelta(hours=1))) == 7
        past(conn, 2)
        assert heard(wait(conn, f, signal="go", until=timedelta(hours=1))) == 7
        f = claimed(conn, "time").fence
        assert wait(conn, f, signal="go", until=timedelta(hours=1)) == "time"
        # What the handler was told it may have acted upon: a signal that is late is still told by name, not by the wait.
        tell(conn, "go", "time", payload=8)
        assert wait(conn, f, signal="go", until=timedelta(hours=1)) == "time"
        assert wait(conn, f, signal="go") == "time"


def test_a_while_counts_from_the_first_wait_for_the_signal_and_without_one_anew(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        day = timedelta(days=1)
        asleep(conn, signal="go", until=day)
        past(conn, 23)
        assert sleeps(conn)
        tell(conn)
        f = woken(conn).fence
        assert wait(conn, f, signal="other", until=day) == "waiting"
        past(conn, 23)
        assert sleeps(conn)
        past(conn, 2)
        f = woken(conn).fence
        assert wait(conn, f, signal="other", until=day) == "time"
        for _ in range(2):
            assert wait(conn, f, until=3600.0) == "waiting"
            assert column(conn, "reason") == "waiting_for_time"
            assert sleeps(conn)
            past(conn, 2)
            f = woken(conn).fence
        assert column(conn, "attempts") == 1


def test_an_instant_that_has_passed_is_not_waited_for(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = claimed(conn).fence
        now = datetime.now(UTC)
        assert wait(conn, f, until=now - timedelta(hours=1)) == "time"
        assert wait(conn, f, signal="go", until=now - timedelta(hours=1)) == "time"
        assert wait(conn, f, until=now + timedelta(hours=1)) == "waiting"
        assert sleeps(conn)
        past(conn, 2)
        assert wait(conn, woken(conn).fence, until=now - timedelta(minutes=59)) == "time"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("signal", {}),
    ("signal", {"signal": ""}),
    ("signal", {"signal": " go"}),
    ("until", {"until": datetime(2030, 1, 1)}),
    ("until", {"until": datetime(2999, 1, 1, tzinfo=UTC)}),
    ("until", {"until": timedelta(0)}),
    ("until", {"until": -1.0}),
    ("until", {"until": float("nan")}),
    ("until", {"until": timedelta(days=4000)}),
    ("until", {"signal": "go", "until": float("inf")}),
]


def test_what_cannot_be_waited_for_is_refused_by_name(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = claimed(conn).fence
        for field, what in BAD:
            with pytest.raises(InvalidInput) as refused:
                wait(conn, f, **what)
            assert refused.value.field == field, what
        for after in ("0", "-1 hour", "11 years"):
            with pytest.raises(InvalidInput, match="until"):
                conn.execute(
                    "SELECT fencepost.wait('t', 'op-1', %(c)s, 1, gen_random_uuid(), 'w', 1, 'go', NULL, %(a)s::interval)",
                    {"c": CLASS, "a": after},
                )
        assert show(conn) == "running" and wait(conn, f, until=timedelta(days=3650)) == "waiting"


# Races, each with a claim in between that may use pointers up.


def moved(conn: Conn, hint: str | None = None) -> str:
    """A hint that has been moved on; writers of other databases hold it back as well."""
    noted = marks(conn, [CLASS], hint)

    def further() -> str | None:
        found = marks(conn, [CLASS], noted)
        return found if found != noted else None

    return wait_for(further, 30, "every earlier writer to end")


def test_a_signal_that_commits_after_the_wait_that_did_not_see_it_wakes(database18: Database) -> None:
    with two(database18) as (conn, teller):
        given(conn)
        hint: str | None = moved(conn)
        teller.execute("SELECT 1")
        tell(teller)
        asleep(conn)
        # Claims look meanwhile and use up what they may; no hint passes the signal that is not committed yet.
        for _ in range(3):
            assert claim(conn, "w", [CLASS], 10, hint) == []
            hint = marks(conn, [CLASS], hint)
        teller.commit()
        assert heard(wait(conn, woken(conn, hint).fence, signal="go")) is None


def test_a_signal_that_commits_before_the_wait_that_does_not_see_it_wakes(database18: Database) -> None:
    """The wait's transaction is open, or as old as its snapshot, while the signal commits and a claim finds nobody to wake."""
    for number, isolation in enumerate(("READ COMMITTED", "REPEATABLE READ")):
        with two(database18) as (conn, worker):
            operation = f"op-{number}"
            given(conn, operation)
            f = claimed(conn, operation).fence
            worker.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
            worker.execute("SELECT 1")
            if isolation == "READ COMMITTED":
                assert wait(worker, f, signal="go") == "waiting"
            tell(conn, "go", operation)
            assert claim(conn, "w", [CLASS], 10) == []
            assert pointers(conn) == 0, "the claim has used the signal's pointer up"
            if isolation == "REPEATABLE READ":
                assert wait(worker, f, signal="go") == "waiting"
            assert claim(conn, "w", [CLASS], 10) == []
            worker.commit()
            assert woken(conn).operation == operation


def pointers(conn: Conn) -> int:
    row = conn.execute("SELECT count(*) FROM fencepost.agenda WHERE priority = 2147483646").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("who", ["somebody holds the job", "the claim is taken back"])
def test_what_a_claim_could_not_wake_the_next_one_wakes(database18: Database, who: str) -> None:
    with two(database18) as (conn, other):
        given(conn)
        asleep(conn)
        tell(conn)
        if who == "somebody holds the job":
            other.execute("SELECT FROM fencepost.job FOR UPDATE")
            assert claim(conn, "w", [CLASS], 10) == []
        else:
            assert len(claim(other, "w", [CLASS], 10)) == 1
            assert claim(conn, "w", [CLASS], 10) == []
        assert show(conn) == "waiting"
        other.rollback()
        assert woken(conn).attempts == 1


def test_two_claims_at_once_wake_a_job_once_and_leave_nothing_behind(database18: Database) -> None:
    with two(database18) as (conn, other):
        given(conn)
        asleep(conn, signal="go", until=timedelta(hours=1))
        tell(conn)
        tell(conn)
        past(conn)
        assert len(claim(other, "a", [CLASS], 10)) == 1
        assert claim(conn, "b", [CLASS], 10) == []
        other.commit()
        assert claim(conn, "b", [CLASS], 10) == []
        assert (column(conn, "owner"), column(conn, "attempts"), pointers(conn)) == ("a", 1, 1)
        conn.execute("UPDATE fencepost.agenda SET due = clock_timestamp()")  # of the time that no longer matters
        assert claim(conn, "b", [CLASS], 10) == [] and pointers(conn) == 0


def test_a_pointer_of_an_earlier_sleep_wakes_no_later_one(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        asleep(conn, signal="go", until=timedelta(hours=1))
        tell(conn)
        f = woken(conn).fence
        assert wait(conn, f, signal="other", until=timedelta(hours=9)) == "waiting"
        conn.execute("UPDATE fencepost.agenda SET due = clock_timestamp()")
        assert sleeps(conn) and pointers(conn) == 0
        past(conn, 10)
        assert woken(conn).attempts == 1


def test_a_hint_hides_neither_a_signal_nor_a_time(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for operation in ("told", "timed"):
            given(conn, operation)
            asleep(conn, operation, signal="go", until=timedelta(hours=1))
        hint = moved(conn)
        assert "2147483646" in hint
        tell(conn, "go", "told")
        assert woken(conn, hint).operation == "told"
        conn.execute("UPDATE fencepost.wait SET until = clock_timestamp() WHERE operation = 'timed'")
        assert woken(conn, hint).operation == "timed"


def blocks(conn: Conn, hint: str | None) -> int:
    """The blocks that a claim touches, plans apart."""
    explain = (
        "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM fencepost.claim('w', %(c)s, 4, %(h)s::jsonb)"
    )

    def once() -> int:
        with conn.transaction(force_rollback=True):
            row = conn.execute(explain, {"c": [CLASS], "h": hint}).fetchone()
        assert row is not None
        plan: dict[str, int] = row[0][0]["Plan"]
        return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]

    return min(once() for _ in range(3))


TELL_MANY = """
SELECT count(fencepost.signal('t', 'n-' || j, %(c)s, 'page', '1'))
FROM generate_series(%(first)s::integer, %(last)s::integer) AS j, generate_series(1, 100)"""


def test_no_claim_walks_over_what_was_told_while_a_snapshot_is_held(database18: Database) -> None:
    """Counted in blocks: with the hint a claim costs the same after 5,000 signals as after 300."""
    with two(database18) as (conn, holder):
        given(conn)
        for number in range(50):
            with conn.transaction():
                submit(conn, CLASS, tenant="t", operation=f"n-{number}", args={})
        assert len(claim(conn, "w", [CLASS], 100)) == 51
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT pg_current_snapshot()")
        costs: list[tuple[int, int]] = []
        for first, last in ((0, 2), (3, 49)):
            conn.execute(TELL_MANY, {"c": CLASS, "first": first, "last": last})
            while pointers(conn):
                assert claim(conn, "w", [CLASS], 1) == []
            costs.append((blocks(conn, moved(conn)), blocks(conn, None)))
        (few, few_without), (many, many_without) = costs
        assert many < few + 40, costs
        assert many_without > few_without + 50, f"the control, which walks over dead pointers: {costs}"


def test_a_cancelled_job_is_woken_by_nothing_and_a_requeued_one_waits_anew(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        asleep(conn, signal="go", until=timedelta(hours=1))
        past(conn, 2)
        f = woken(conn).fence
        assert wait(conn, f, signal="go", until=timedelta(hours=1)) == "time"
        assert wait(conn, f, signal="other") == "waiting"
        assert cancel(conn, "t", "op-1", CLASS, **BY) == "cancelled"
        tell(conn, "other")
        assert claim(conn, "w", [CLASS], 10) == [] and show(conn) == "cancelled"
        requeue(conn, "t", "op-1", CLASS, **BY)
        f = woken(conn).fence
        assert isinstance(wait(conn, f, signal="other"), Signal)
        assert wait(conn, f, signal="go", until=timedelta(hours=1)) == "waiting"
        assert sleeps(conn)


def test_work_under_an_old_epoch_is_not_claimed_by_being_woken(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        asleep(conn)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch, frozen) VALUES ('t', 2, false)")
        tell(conn)
        assert claim(conn, "w", [CLASS], 10) == [] and show(conn) == "queued"
        conn.execute("UPDATE fencepost.job SET epoch = 2")
        assert woken(conn).fence.epoch == 2


def test_a_journalled_begin_blocks_a_waiting_job(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        f = asleep(conn)
        conn.execute(
            "SELECT fencepost.present_begin('t', 'op-1', %(c)s, 'e1', 'opaque', gen_random_uuid(), %(a)s, sha256('x'))",
            {"c": CLASS, "a": f.attempt},
        )
        tell(conn)
        assert claim(conn, "w", [CLASS], 10) == [] and show(conn) == "blocked"


# With the worker.


def test_handlers_wait_and_run_again_from_their_start(database18: Database, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fencepost")
    worker = Worker()
    calls: list[str] = []

    def provider(request: Any, dispatch: Any) -> Success:
        calls.append(request["n"])
        return Success("r-1")

    @worker.job("a.sync", **quick(policy="resumable"))
    def sync(ctx: Context, job: Job) -> None:
        ctx.effect("ask", provider, {"n": "sync"})
        ctx.stage({"page": 1})
        approval = ctx.wait(signal="approved", until=timedelta(days=7))
        assert approval is not None and ctx.signalled("approved") == approval and ctx.signalled("none") is None
        assert (staged := ctx.staged()) is not None and staged.result == {"page": 1}
        ctx.publish(lambda tx: save(tx, job.operation, by=approval.payload))

    @worker.job("a.async", **quick(policy="resumable"))
    async def asynchronous(ctx: AsyncContext, job: Job) -> None:
        await ctx.effect("ask", provider, {"n": "async"})
        approval = await ctx.wait(signal="approved")
        assert approval is not None and await ctx.signalled("approved") == approval and len(await ctx.signals()) == 1
        await ctx.publish(lambda tx: save(tx, job.operation, by=approval.payload))

    with database18.connect(autocommit=True) as conn, running(worker, database18):
        for job_class in worker.classes:
            given(conn, job_class, job_class=job_class, policy="resumable")
        for job_class in worker.classes:
            becomes(conn, "waiting", job_class, job_class=job_class)
            with conn.transaction():
                signal(conn, tenant="t", operation=job_class, job_class=job_class, name="approved", payload="ann")
        for job_class in worker.classes:
            becomes(conn, "done", job_class, job_class=job_class)
            assert results(conn, job_class) == ["ann"] and column(conn, "attempts", job_class) == 1
    assert sorted(calls) == ["async", "sync"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text


def test_a_handler_that_keeps_waiting_from_getting_out_can_do_nothing(database18: Database) -> None:
    worker = Worker()
    refused: list[object] = []

    @worker.job(CLASS, **QUICK)
    def stubborn(ctx: Context, job: Job) -> str:
        if ctx.signalled("go") is not None:
            return "the second run"
        with pytest.raises(Waiting):
            ctx.wait(signal="go")
        assert ctx.lost.is_set() and ctx.lease_left() == 0
        for act in (
            ctx.check,
            lambda: ctx.publish(lambda tx: save(tx)),
            lambda: ctx.effect("k", lambda request, dispatch: Success("r"), {}),
            lambda: ctx.wait(signal="go"),
        ):
            try:
                act()
            except FencepostError as error:
                refused.append(type(error))
        return "the first run"

    with database18.connect(autocommit=True) as conn, running(worker, database18):
        given(conn)
        becomes(conn, "waiting")
        wait_for(lambda: len(refused) == 4, 20, "everything to be refused")
        tell(conn)
        becomes(conn, "done")
        # The publication has no time left: where the database is slow, that is what it is told first.
        assert refused[1] in (StaleFence, LeaseLost) and results(conn) == []
        assert refused[:1] + refused[2:] == [LeaseLost, StaleFence, StaleFence]
        assert conn.execute("SELECT result FROM fencepost.result").fetchall() == [(b'"the second run"',)]


def test_a_time_out_is_told_as_none_and_inside_a_publication_nothing_is_waited_for(database18: Database) -> None:
    worker = Worker()
    fields: list[str | None] = []

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        if ctx.wait(signal="go", until=timedelta(days=1)) is None and job.operation == "op-1":
            raise Poison("not_approved")

        def callback(tx: Any) -> None:
            for call in (lambda: ctx.wait(signal="go"), ctx.signals):
                with pytest.raises(WrongTransaction) as error:
                    call()
                fields.append(error.value.field)

        ctx.publish(callback)

    with database18.connect(autocommit=True) as conn, running(worker, database18):
        for operation in ("op-1", "op-2"):
            given(conn, operation)
            becomes(conn, "waiting", operation)
        past(conn, 25)
        becomes(conn, "poison")
        becomes(conn, "done", "op-2")
    assert fields == ["publication"] * 2


def test_an_effect_that_was_left_open_is_told_to_the_handler_that_waits(database18: Database) -> None:
    worker = Worker()
    told: list[type[BaseException]] = []

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        with database18.connect(autocommit=True) as conn:
            begun(conn, job.fence)
        try:
            ctx.wait(signal="go")
        except EffectOpen as error:
            told.append(type(error))
            raise

    with database18.connect(autocommit=True) as conn, running(worker, database18):
        given(conn)
        becomes(conn, "blocked")
    assert told == [EffectOpen]


def test_no_order_of_signals_and_waits_leaves_a_job_asleep(database18: Database) -> None:
    """Signals from other sessions, in transactions that stay open for a while, while two workers claim, wait and look."""
    names = [f"op-{number}" for number in range(30)]

    def handler(ctx: Context, job: Job) -> None:
        first = ctx.wait(signal="first")
        second = ctx.wait(signal="second")
        assert first is not None and second is not None
        ctx.publish(lambda tx: save(tx, job.operation, by=f"{first.payload}{second.payload}"))

    workers = [Worker(), Worker()]
    for worker in workers:
        worker.job(CLASS, **QUICK)(handler)

    def tells(which: list[str]) -> None:
        with database18.connect() as conn:
            for operation in which:
                for name in ("first", "second"):
                    signal(conn, tenant="t", operation=operation, job_class=CLASS, name=name, payload=name[0])
                    conn.execute("SELECT pg_sleep(0.01)")
                    conn.commit()

    with database18.connect(autocommit=True) as conn:
        for operation in names:
            given(conn, operation)
        threads = [threading.Thread(target=tells, args=(names[n::3],), daemon=True) for n in range(3)]
        with running(workers[0], database18), running(workers[1], database18):
            for thread in threads:
                thread.start()
            for operation in names:
                becomes(conn, "done", operation, within=30.0)
        for thread in threads:
            thread.join(10)
        assert {tuple(results(conn, operation)) for operation in names} == {("fs",)}


def test_an_async_handler_that_is_stopped_while_it_waits_leaves_the_job_waiting(database18: Database) -> None:
    worker = Worker()
    cancelled: list[bool] = []

    @worker.job(CLASS, **QUICK)
    async def handler(ctx: AsyncContext, job: Job) -> None:
        waits = asyncio.ensure_future(ctx.wait(signal="go"))
        await asyncio.sleep(0)
        waits.cancel()
        try:
            await waits
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with database18.connect(autocommit=True) as conn, running(worker, database18):
        given(conn)
        becomes(conn, "waiting")
    assert cancelled == [True]
