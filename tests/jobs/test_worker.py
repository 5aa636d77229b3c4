"""The worker keeps what it promises to handlers: leases renewed whatever they do, loss told, stopping that loses nothing."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import Job, claim
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.effects import Success
from fencepost.jobs.publish import FencedTransaction
from fencepost.jobs.worker import Backoff, Poison, Retry, Worker
from fencepost.schemas.errors import ConfigError, InvalidInput, LeaseLost, StaleFence, Unreachable, WrongTransaction
from support.database import Database
from support.jobs import CLASS, Conn, begun, claimed, column, effect, expire, given, results, save, show
from support.processes import wait_for
from support.workers import QUICK, becomes, publishing, quick, running

NO_BACKOFF = Backoff(0.0, 0.0)


def renewed_twice(conn: Conn) -> None:
    """Returns once the lease of the job that runs has been extended twice."""
    seen: set[object] = set()

    def grown() -> bool:
        seen.add(column(conn, "lease_until"))
        return len(seen - {None}) > 2

    wait_for(grown, 30, "two renewals")


def test_sync_and_async_handlers_publish_or_return_and_both_complete(database18: Database) -> None:
    worker = Worker()

    @worker.job("a.sync", **QUICK)
    def sync(ctx: Context, job: Job) -> None:
        assert ctx.lease_left() > 0 and job.json() == {"n": 1}
        assert ctx.publish(lambda tx: (save(tx, job.operation, by="sync"), 7)[1]) == 7

    @worker.job("a.plain", **QUICK)
    def plain(ctx: Context, job: Job) -> str:
        return "whatever"

    @worker.job("a.async", **QUICK)
    async def asynchronous(ctx: AsyncContext, job: Job) -> None:
        await asyncio.sleep(0)
        await ctx.publish(lambda tx: save(tx, job.operation, by="async"))

    with database18.connect(autocommit=True) as conn:
        for job_class in worker.classes:
            given(conn, job_class, job_class=job_class)
        with running(worker, database18):
            for job_class in worker.classes:
                becomes(conn, "done", job_class, job_class=job_class)
        assert (results(conn, "a.sync"), results(conn, "a.plain"), results(conn, "a.async")) == (
            ["sync"],
            [],
            ["async"],
        )


def test_a_handler_that_raises_is_retried_and_then_poison_with_a_typed_reason_only(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fencepost")
    worker = Worker()
    calls: list[str] = []

    @worker.job(CLASS, max_attempts=3, backoff=NO_BACKOFF, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        calls.append(job.operation)
        match job.operation:
            case "raises":
                raise ValueError("the customer's secret")
            case "poison":
                raise Poison("unusable_document")
            case "retry" if job.attempts == 1:
                raise Retry("not_ready", after=0.01)
            case _:
                pass

    with database18.connect(autocommit=True) as conn:
        for operation in ("raises", "poison", "retry"):
            given(conn, operation, max_attempts=3)
        with running(worker, database18):
            becomes(conn, "poison", "raises")
            becomes(conn, "poison", "poison")
            becomes(conn, "done", "retry")
        assert (calls.count("raises"), calls.count("poison"), calls.count("retry")) == (3, 1, 2)
        reason = (column(conn, "reason", "raises"), column(conn, "detail", "raises"))
        assert reason == ("attempts_exhausted", "handler_raised: ValueError")
        assert column(conn, "reason", "poison") == "unusable_document"
    assert "secret" not in caplog.text


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_inside_a_publication_neither_effect_nor_publication_nor_reading_is_waited_for(
    database18: Database, kind: str
) -> None:
    """Each would wait for the row that the callback's transaction holds, or for the lane that the callback is in."""
    worker = Worker()
    refused: list[str | None] = []

    def nested(call: Callable[[], object]) -> None:
        with pytest.raises(WrongTransaction) as error:
            call()
        refused.append(error.value.field)

    @worker.job("a.sync", **QUICK)
    def sync(ctx: Context, job: Job) -> None:
        assert ctx.effect("before", lambda request, dispatch: Success("r-1"), {"n": 1}).receipt == "r-1"

        def callback(tx: FencedTransaction) -> None:
            save(tx, job.operation)
            nested(lambda: ctx.effect("k", lambda request, dispatch: Success("r"), {"n": 1}))
            nested(lambda: ctx.publish(lambda inner: None))
            nested(ctx.staged)
            assert ctx.stage({"n": 1})

        ctx.publish(callback)

    @worker.job("a.async", **QUICK)
    async def asynchronous(ctx: AsyncContext, job: Job) -> None:
        loop = asyncio.get_running_loop()

        def wait(work: Coroutine[Any, Any, object]) -> object:
            return asyncio.run_coroutine_threadsafe(work, loop).result(10)

        def callback(tx: FencedTransaction) -> None:
            save(tx, job.operation)
            nested(lambda: wait(ctx.effect("k", lambda request, dispatch: Success("r"), {"n": 1})))
            nested(lambda: wait(ctx.publish(lambda inner: None)))
            nested(lambda: wait(ctx.staged()))
            assert wait(ctx.stage({"n": 1}))

        await ctx.publish(callback)

    with database18.connect(autocommit=True) as conn:
        given(conn, job_class=f"a.{kind}")
        with running(worker, database18, concurrency=1):
            becomes(conn, "done", job_class=f"a.{kind}", within=10.0)
        assert results(conn) == ["a"] and refused == ["publication"] * 3


@pytest.mark.parametrize("how", ["idle", "in a statement"])
def test_a_callback_that_hangs_loses_its_transaction_soon_after_its_lease_and_is_told(
    database18: Database, how: str
) -> None:
    worker = Worker()
    release = threading.Event()
    told: list[bool] = []
    raised: list[BaseException] = []

    @worker.job(CLASS, **quick(lease=3.0))
    def handler(ctx: Context, job: Job) -> None:
        if job.attempts > 1:
            ctx.publish(lambda tx: save(tx, by="successor"))
            return

        def callback(tx: FencedTransaction) -> None:
            save(tx)
            if how == "idle":
                told.append(ctx.lost.wait(10))
                release.wait(20)
            else:
                tx.execute("SELECT pg_sleep(20)")

        try:
            ctx.publish(callback)
        except BaseException as error:
            told.append(ctx.lost.wait(10))
            raised.append(error)
            raise

    with database18.connect(autocommit=True) as conn:
        given(conn, lease=3.0)
        with running(worker, database18, concurrency=2):
            try:
                becomes(conn, "done", within=30)
            finally:
                release.set()
            wait_for(lambda: len(raised) == 1, 10, "the first handler to end")
        assert results(conn) == ["successor"] and all(told)
    assert isinstance(raised[0], LeaseLost) and raised[0].field == "lease"


@pytest.mark.parametrize("how", ["sleeping", "spinning"])
def test_an_async_handler_that_blocks_its_loop_keeps_its_lease_and_has_one_attempt(
    database18: Database, how: str
) -> None:
    """B10: renewal shares no thread with handlers."""
    worker, other = Worker(), Worker()
    enough = threading.Event()

    async def block(ctx: AsyncContext, job: Job) -> None:
        while not enough.is_set():
            if how == "sleeping":
                time.sleep(0.5)  # noqa: ASYNC251 (the mistake that this test is about)
        ctx.check()
        await ctx.publish(lambda tx: save(tx))

    for each in (worker, other):
        each.job(CLASS, **quick(lease=6.0))(block)
    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18), running(other, database18):
            try:
                renewed_twice(conn)
            finally:
                enough.set()
            becomes(conn, "done")
        assert results(conn) == ["a"] and column(conn, "attempts") == 1
        assert conn.execute("SELECT count(*) FROM fencepost.attempt").fetchone() == (1,)


def test_the_loss_of_a_lease_is_told_to_both_kinds_of_handler_and_staging_still_works(database18: Database) -> None:
    worker = Worker()
    told: list[str] = []

    @worker.job("a.sync", **quick(lease=6.0))
    def sync(ctx: Context, job: Job) -> None:
        ctx.check()
        assert ctx.lost.wait(30)
        with pytest.raises(LeaseLost):
            ctx.check()
        with pytest.raises(StaleFence):
            ctx.publish(lambda tx: save(tx, job.operation))
        assert ctx.lease_left() == 0 and ctx.stage({"half": 0.5}) and not ctx.stage({"half": 0.6})
        told.append("sync")
        raise LeaseLost("stopping")

    @worker.job("a.async", **quick(lease=6.0))
    async def asynchronous(ctx: AsyncContext, job: Job) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert ctx.lost.is_set() and await ctx.stage([1])
            told.append("async")
            raise

    with database18.connect(autocommit=True) as conn:
        for job_class in worker.classes:
            given(conn, job_class, job_class=job_class)
        with running(worker, database18):
            for job_class in worker.classes:
                becomes(conn, "running", job_class, job_class=job_class)
                cancel(conn, "t", job_class, job_class, actor="ann", reason="no more")
            wait_for(lambda: sorted(told) == ["async", "sync"], 30, "both to be told")
        assert conn.execute("SELECT operation, result FROM fencepost.staged ORDER BY 1").fetchall() == [
            ("a.async", b"[1]"),
            ("a.sync", b'{"half":0.5}'),
        ]
        assert [show(conn, name, job_class=name) for name in worker.classes] == ["cancelled", "cancelled"]


def test_a_successor_gets_what_was_staged_and_publishes_it_under_its_own_fence(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, backoff=NO_BACKOFF, **QUICK)
    async def handler(ctx: AsyncContext, job: Job) -> None:
        found = await ctx.staged()
        if found is None:
            await ctx.stage({"words": 3})
            raise Retry("handed_over")
        assert found.attempt != job.fence.attempt
        await ctx.publish(lambda tx: save(tx, by=str(found.result["words"])))

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "done")
        assert results(conn) == ["3"]


def test_a_handler_that_gives_up_waiting_for_a_read_leaves_its_lane_to_others(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, backoff=NO_BACKOFF, **QUICK)
    async def handler(ctx: AsyncContext, job: Job) -> None:
        for read in (ctx.staged, ctx.signals) * 3:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await read()
        await ctx.publish(save)

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18, concurrency=1):
            becomes(conn, "done")
        assert results(conn) == ["a"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_stop_gives_back_what_the_drain_did_not_finish_and_charges_nothing(database18: Database, kind: str) -> None:
    """B02: at once runnable, nothing terminal, the others run with the next worker."""
    first, second = Worker(), Worker()
    entered, release = threading.Event(), threading.Event()

    def slow(ctx: Context, job: Job) -> None:
        entered.set()
        release.wait(20)

    async def slow_async(ctx: AsyncContext, job: Job) -> None:
        entered.set()
        await asyncio.sleep(20)

    first.job(CLASS, max_attempts=1, **QUICK)(slow if kind == "sync" else slow_async)
    publishing(second, max_attempts=1)
    with database18.connect(autocommit=True) as conn:
        for number in range(3):
            given(conn, f"op-{number}", max_attempts=1)
        with running(first, database18, concurrency=1, drain=0.2) as worker:
            assert entered.wait(10)
            began = time.monotonic()
            worker.stop(within=8)
            assert time.monotonic() - began < 8
        states = conn.execute("SELECT exec, attempts, reason FROM fencepost.job ORDER BY submitted_at").fetchall()
        assert states[0] == ("queued", 0, "worker_stopped") and {row[0] for row in states} == {"queued"}
        with running(second, database18):
            for number in range(3):
                becomes(conn, "done", f"op-{number}")
        release.set()
        assert [results(conn, f"op-{number}") for number in range(3)] == [["a"]] * 3


def test_a_stop_within_the_drain_lets_handlers_finish_and_claims_nothing_more(database18: Database) -> None:
    worker = Worker()
    entered, release = threading.Event(), threading.Event()

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        entered.set()
        assert release.wait(10)
        ctx.publish(lambda tx: save(tx, job.operation))

    with database18.connect(autocommit=True) as conn:
        given(conn, "op-1")
        given(conn, "op-2")
        with running(worker, database18, concurrency=1) as run:
            assert entered.wait(10)
            run.ask()
            release.set()
            run.ended()
        assert (show(conn, "op-1"), show(conn, "op-2")) == ("done", "queued")


def test_the_capacity_is_never_exceeded_and_always_used(database18: Database) -> None:
    worker = Worker()
    lock = threading.Lock()
    full = threading.Event()
    now: list[int] = [0]
    most: list[int] = [0]

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                full.set()
        full.wait(20)
        time.sleep(0.05)
        with lock:
            now[0] -= 1

    with database18.connect(autocommit=True) as conn:
        for number in range(12):
            given(conn, f"op-{number}")
        with running(worker, database18, concurrency=3):
            for number in range(12):
                becomes(conn, "done", f"op-{number}")
    assert most[0] == 3


def test_a_disarmed_database_is_waited_for_and_with_the_witness_armed_again(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    worker = publishing(Worker())
    with database18.connect(autocommit=True) as conn:
        given(conn)
        conn.execute("DELETE FROM fencepost.ticket")
        with running(worker, database18):
            wait_for(lambda: "nothing is claimed" in caplog.text, 10, "the line")
            assert show(conn) == "queued"
        assert caplog.text.count("nothing is claimed") == 1
        with running(worker, database18, state=database18.state):
            becomes(conn, "done")


def test_lost_connections_are_replaced_and_jobs_go_on(database18: Database) -> None:
    worker = Worker()
    entered, release = threading.Event(), threading.Event()

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        entered.set()
        assert release.wait(10)
        ctx.stage({"n": 1})

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            assert entered.wait(10)
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'fencepost'"
            )
            release.set()
            becomes(conn, "done")
            given(conn, "op-2")
            becomes(conn, "done", "op-2")
        assert column(conn, "attempts") == 1


def test_a_database_that_never_answers_ends_the_worker_with_its_address_and_no_password() -> None:
    worker = publishing(Worker())
    with pytest.raises(Unreachable) as refused:
        worker.run("postgresql://me:geheim@127.0.0.1:1/x", stop=threading.Event(), patience=0.3, drain=0.0)
    assert "127.0.0.1:1" in str(refused.value) and "geheim" not in str(refused.value)


def test_impossible_settings_are_refused_by_name(database18: Database) -> None:
    with pytest.raises(ConfigError) as nothing:
        Worker().run(database18.dsn)
    assert nothing.value.field == "classes"
    worker = publishing(Worker(), lease=0.01)
    with pytest.raises(ConfigError) as twice:
        worker.job(CLASS)
    assert twice.value.field == "class"
    with pytest.raises(ConfigError) as many:
        worker.run(database18.dsn, concurrency=0)
    assert many.value.field == "concurrency"
    with pytest.raises(InvalidInput) as refused:
        worker.run(database18.dsn, stop=threading.Event())
    assert refused.value.field == "lease"


@pytest.mark.parametrize("shift", [120.0, -120.0])
def test_a_worker_whose_clock_is_wrong_decides_nothing_differently(
    database18: Database, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    """B23: only the database's clock judges leases, run_at and backoff."""
    real: Any = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + shift) * 1e9))
    worker = Worker()
    entered, enough = threading.Event(), threading.Event()
    seen: list[float] = []

    @worker.job(CLASS, backoff=NO_BACKOFF, **quick(lease=6.0))
    def handler(ctx: Context, job: Job) -> None:
        seen.append(ctx.lease_left())
        if len(seen) == 1:
            raise Retry("once", after=0.1)
        entered.set()
        assert enough.wait(60)
        ctx.check()
        ctx.publish(lambda tx: save(tx, job.operation))

    with database18.connect(autocommit=True) as conn:
        given(conn, "held")
        foreign = claimed(conn, "held", owner="other")
        given(conn)
        conn.execute(
            "UPDATE fencepost.job SET lease_until = clock_timestamp() + interval '5 min' WHERE exec = 'running'"
        )
        assert claim(conn, "shifted", [CLASS], 0 + 1)[0].operation == "op-1"
        expire(conn, "op-1")
        with running(worker, database18):
            try:
                assert entered.wait(20)
                renewed_twice(conn)
            finally:
                enough.set()
            becomes(conn, "done")
        assert len(seen) == 2 and all(0 < left <= 6.0 for left in seen)
        assert show(conn, "held") == "running" and column(conn, "generation", "held") == foreign.fence.generation


def test_an_open_effect_of_a_handler_that_returned_blocks_instead_of_completing(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        with database18.connect(autocommit=True) as aside:
            begun(aside, job.fence)

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "blocked")
        assert effect(conn, "state") == "unknown"


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("fencepost")}


def test_a_stopped_worker_leaves_neither_threads_nor_sessions(database18: Database) -> None:
    worker = Worker()

    @worker.job(CLASS, **QUICK)
    async def handler(ctx: AsyncContext, job: Job) -> None:
        await ctx.publish(lambda tx: save(tx, job.operation))

    with database18.connect(autocommit=True) as conn:
        given(conn)
        before = threads()
        with running(worker, database18, state=database18.state):
            becomes(conn, "done")
        wait_for(lambda: threads() <= before, 20, "every thread to end")
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        wait_for(lambda: conn.execute(sessions).fetchone() == (1,), 20, "every session to end")
