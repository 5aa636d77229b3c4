"""Against a real provider with a ledger: one acceptance per effect, and no "no answer" written down as "did not happen" (B18)."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, LiteralString, cast

import psycopg
import psycopg.sql
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs import context, effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import Job
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.effects import Dispatch, NotSent, Success, Unclear
from fencepost.jobs.reconcile import reconcile
from fencepost.jobs.worker import Backoff, Worker
from fencepost.schemas.errors import EffectUnknown, InvalidInput, NotDispatched, Unreachable
from support.database import Database
from support.jobs import CLASS, Conn, age_effect, column, effect, expire, given, results, save, show
from support.processes import Child, wait_for
from support.provider import Client, Mode, Provider
from support.proxy import Proxy
from support.workers import CHILD_PATH, QUICK, becomes, quick, running

NO_BACKOFF = Backoff(0.0, 0.0)
MODES: tuple[Mode, ...] = ("answer", "drop-after-accept", "refuse-before-read", "error500", "hang", "garbage")


# What is to be waited for in vain has little time, everything else enough.
EFFECT_SECONDS = {"hang": 3.0}
EFFECT_SECONDS_MAX = 20.0


def reports(client: Client, *, asynchronous: bool, **policy: Any) -> Worker:
    """A worker whose handler has one effect and publishes its receipt; the operation is the request."""
    worker = Worker()
    options: dict[str, Any] = {"backoff": NO_BACKOFF} | quick(max_effect_timeout=EFFECT_SECONDS_MAX) | policy

    def sync(ctx: Context, job: Job) -> None:
        seconds = EFFECT_SECONDS.get(job.operation, EFFECT_SECONDS_MAX)
        done = ctx.effect("summarise", client.call, {"operation": job.operation}, timeout=seconds)
        ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

    async def call(request: Any, dispatch: Dispatch) -> Success:
        return await asyncio.to_thread(client.call, request, dispatch)

    async def on_loop(ctx: AsyncContext, job: Job) -> None:
        seconds = EFFECT_SECONDS.get(job.operation, EFFECT_SECONDS_MAX)
        done = await ctx.effect("summarise", call, {"operation": job.operation}, timeout=seconds)
        await ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

    worker.job(CLASS, **options)(on_loop if asynchronous else sync)
    return worker


def key(operation: str) -> str:
    return effects.idempotency_key("t", operation, "summarise")


def settle_by_look_up(conn: Conn, client: Client, operation: str) -> None:
    """What the operator does: asks the provider, and decides by its answer."""
    receipt = client.look_up(key(operation))
    reconcile(
        conn,
        "t",
        operation,
        "summarise",
        version=effect(conn, "version", operation, "summarise"),
        verdict="applied" if receipt else "not_applied",
        evidence_kind="receipt_lookup",
        evidence_ref=f"provider/receipts/{key(operation)}",
        receipt=receipt,
        actor="ann",
        reason="looked it up",
    )


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_every_way_to_lose_an_answer_is_unknown_until_the_receipt_was_looked_up(
    database18: Database, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        client = Client(provider.port)
        worker = reports(client, asynchronous=asynchronous)
        with running(worker, database18):
            for mode in MODES:
                provider.mode = mode
                given(conn, mode)
                becomes(conn, "done" if mode == "answer" else "blocked", mode)
            for mode in MODES[1:]:
                assert effect(conn, "state", mode, "summarise") == "unknown"
                assert column(conn, "reason", mode) == "effect_unknown" and results(conn, mode) == []
                command = f"fencepost effects reconcile --tenant t --operation {mode} --effect summarise --version 2"
                wait_for(lambda: caplog.text.count(command) == 1, 10, "the command in the log")  # noqa: B023 (waited for here)
            provider.mode = "answer"
            age_effect(conn, "refuse-before-read")
            for mode in MODES[1:]:
                settle_by_look_up(conn, client, mode)
                becomes(conn, "done", mode)
        assert sorted(provider.accepted) == sorted(key(mode) for mode in MODES)
        for mode in MODES:
            assert results(conn, mode) == [f"receipt-{key(mode)}"]
    assert "status 500" not in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_only_what_was_certainly_not_sent_is_sent_again(database18: Database, asynchronous: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Client(closed.getsockname()[1])
    with Provider() as provider, database18.connect(autocommit=True) as conn:
        given(conn, max_attempts=100)
        worker = reports(nobody, asynchronous=asynchronous, max_attempts=100)
        with running(worker, database18):
            wait_for(lambda: column(conn, "attempts") >= 3, 10, "three refused connections")
            assert effect(conn, "state", key="summarise") in ("failed_before_dispatch", "pending")
            nobody.port = provider.port
            becomes(conn, "done")
        assert provider.accepted == [key("op-1")]
        outcomes = conn.execute("SELECT DISTINCT became, reason FROM fencepost.effect_event WHERE reason IS NOT NULL")
        assert outcomes.fetchall() == [("failed_before_dispatch", "not_dispatched")]


def test_an_error_in_reading_the_answer_is_unknown_and_a_declared_one_is_definite(database18: Database) -> None:
    worker = Worker()
    raised: list[BaseException] = []

    def misread(request: Any, dispatch: Dispatch) -> Success:
        raise KeyError("receipt")

    def not_sent(request: Any, dispatch: Dispatch) -> Success:
        raise NotDispatched("the request could not be built")

    def odd(request: Any, dispatch: Dispatch) -> Success:
        return cast(Success, "fine")

    def refused_elsewhere(request: Any, dispatch: Dispatch) -> Success:
        raise ConnectionRefusedError("the cache")

    def database_gone(request: Any, dispatch: Dispatch) -> Success:
        raise Unreachable("the database does not answer", address="127.0.0.1")

    def coded(request: Any, dispatch: Dispatch) -> Success:
        raise Unclear("http_409")

    def not_sent_with_a_code(request: Any, dispatch: Dispatch) -> Success:
        raise NotSent("name_not_resolved")

    def unkeepable(request: Any, dispatch: Dispatch) -> Success:
        return Success("r-1", object())

    calls = {
        "misread": misread,
        "not_sent": not_sent,
        "odd": odd,
        "unkeepable": unkeepable,
        "refused_elsewhere": refused_elsewhere,
        "database_gone": database_gone,
        "coded": coded,
        "not_sent_with_a_code": not_sent_with_a_code,
    }

    @worker.job(CLASS, max_attempts=1, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        try:
            ctx.effect("e1", calls[job.operation], b"request")
        except BaseException as error:
            raised.append(error)
            raise

    with database18.connect(autocommit=True) as conn, running(worker, database18, concurrency=1):
        for operation, state, outcome, reason, kind in (
            ("misread", "blocked", "unknown", "raised", EffectUnknown),
            ("odd", "blocked", "unknown", "not_a_receipt", EffectUnknown),
            ("not_sent", "poison", "failed_before_dispatch", "not_dispatched", NotDispatched),
            ("not_sent_with_a_code", "poison", "failed_before_dispatch", "name_not_resolved", NotSent),
            ("refused_elsewhere", "blocked", "unknown", "raised", EffectUnknown),
            ("database_gone", "blocked", "unknown", "raised", EffectUnknown),
            ("coded", "blocked", "unknown", "http_409", EffectUnknown),
            ("unkeepable", "queued", "success", None, InvalidInput),
        ):
            given(conn, operation, max_attempts=1, backoff_base=60.0, backoff_max=60.0)
            wait_for(lambda: bool(raised), 10, operation)
            becomes(conn, state, operation)
            assert (effect(conn, "state", operation), effect(conn, "reason", operation)) == (outcome, reason)
            assert type(raised.pop()) is kind


def test_a_call_is_abandoned_at_its_deadline_and_its_late_receipt_counts(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    answer = threading.Event()
    left: list[float] = []
    results_of: list[object] = []

    def slow(request: Any, dispatch: Dispatch) -> Success:
        left.append(dispatch.seconds_left())
        answer.wait(20)
        left.append(dispatch.seconds_left())
        return Success("r-late", {"n": 1})

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        done = ctx.effect("e1", slow, {}, timeout=3.0)
        results_of.append(done.result)
        ctx.publish(lambda tx: save(tx, by=done.receipt))

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "blocked")
            assert effect(conn, "state") == "unknown" and effect(conn, "reason") == "timeout"
            answer.set()
            becomes(conn, "done")
        assert results(conn) == ["r-late"] and 0 < left[0] <= 3.0 and left[1] == 0 and results_of == [{"n": 1}]
        assert effect(conn, "begins") == 1 and "late evidence" in caplog.text


def test_an_answer_that_comes_at_the_very_deadline_counts(
    database18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[Any]):
        """Says that time is over at the moment at which it has the answer."""

        def result(self, timeout: float | None = None) -> Any:
            value = super().result(10)
            if timeout is not None:
                raise TimeoutError
            return value

    def abandonable(call: Callable[[], Success]) -> Late:
        late = Late()
        late.set_result(call())
        return late

    monkeypatch.setattr(context, "abandonable", abandonable)
    worker = Worker()

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        done = ctx.effect("e1", lambda request, dispatch: Success("r-1"), {})
        ctx.publish(lambda tx: save(tx, by=done.receipt))

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "done")
        assert effect(conn, "state") == "success" and results(conn) == ["r-1"]


def test_a_cancelled_handler_leaves_its_effect_unknown_and_a_cancelled_begin_definite(database18: Database) -> None:
    worker = Worker()
    entered = threading.Event()

    async def call(request: Any, dispatch: Dispatch) -> Success:
        entered.set()
        await asyncio.sleep(60)
        return Success("never")

    # The worker hears of the cancel when it renews the lease.
    @worker.job(CLASS, **quick(lease=6.0))
    async def handler(ctx: AsyncContext, job: Job) -> None:
        await ctx.effect("e1", call, {})

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            assert entered.wait(10)
            cancel(conn, "t", "op-1", CLASS, actor="ann", reason="no more")
            wait_for(lambda: effect(conn, "state") == "unknown", 30, "the outcome to be written although cancelled")
        assert (show(conn), effect(conn, "reason")) == ("cancelled", "cancelled")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_stop_with_an_effect_under_way_holds_the_job_as_unknown(database18: Database, asynchronous: bool) -> None:
    """B02, with a begun effect."""
    with Provider("hang") as provider, database18.connect(autocommit=True) as conn:
        given(conn)
        worker = reports(Client(provider.port), asynchronous=asynchronous)
        with running(worker, database18, drain=0.1) as run:
            wait_for(lambda: provider.accepted == [key("op-1")], 10, "the acceptance")
            run.stop()
        assert (show(conn), effect(conn, "state", key="summarise")) == ("blocked", "unknown")
        provider.released.set()


def test_a_begin_whose_commit_was_lost_is_read_back_before_anything_is_dispatched(database18: Database) -> None:
    """Crash here: [E], on the near side: the answer to the begin did not arrive."""
    info = conninfo_to_dict(database18.dsn)
    with (
        Provider() as provider,
        Proxy(int(str(info["port"])), str(info["host"])) as proxy,
        database18.connect(autocommit=True) as conn,
    ):
        worker, client = Worker(), Client(provider.port)

        @worker.job(CLASS, max_attempts=1, **QUICK)
        def handler(ctx: Context, job: Job) -> None:
            ctx.staged()
            proxy.drop_replies()
            threading.Thread(target=cut, daemon=True).start()
            done = ctx.effect("summarise", client.call, {})
            ctx.publish(lambda tx: save(tx, by=done.receipt))

        def cut() -> None:
            wait_for(lambda: _count(database18, "effect") == 1, 10, "the begin to be committed")
            wait_for(lambda: proxy.dropped_bytes > 0, 10, "its answer to be dropped")
            proxy.heal()
            proxy.cut()

        given(conn, max_attempts=1)
        through = make_conninfo(database18.dsn, host="127.0.0.1", port=proxy.port)
        with running(worker, Database(through, database18.state), concurrency=1):
            becomes(conn, "done")
        assert provider.accepted == [key("op-1")] and effect(conn, "begins", key="summarise") == 1


def test_a_begin_that_can_neither_be_confirmed_nor_denied_counts_as_begun(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    info = conninfo_to_dict(database18.dsn)
    with (
        Provider() as provider,
        Proxy(int(str(info["port"])), str(info["host"])) as proxy,
        database18.connect(autocommit=True) as conn,
    ):
        worker, client = Worker(), Client(provider.port)

        @worker.job(CLASS, **QUICK)
        def handler(ctx: Context, job: Job) -> None:
            ctx.staged()
            proxy.drop_replies()
            threading.Thread(target=cut, daemon=True).start()
            ctx.effect("summarise", client.call, {})

        def cut() -> None:
            wait_for(lambda: _count(database18, "effect") == 1, 10, "the begin to be committed")
            wait_for(lambda: proxy.dropped_bytes > 0, 10, "its answer to be dropped")
            proxy.heal()
            proxy.cut(refuse_new=True)

        given(conn)
        through = make_conninfo(database18.dsn, host="127.0.0.1", port=proxy.port)
        with running(worker, Database(through, database18.state), concurrency=1):
            wait_for(lambda: "begin_unreadable" in caplog.text, 10, "the line")
            proxy.heal()
            becomes(conn, "blocked")
        assert provider.accepted == [] and effect(conn, "state", key="summarise") == "unknown"


def _count(database18: Database, table: str) -> int:
    with database18.connect(autocommit=True) as conn:
        query = psycopg.sql.SQL("SELECT count(*) FROM fencepost.{}").format(psycopg.sql.Identifier(table))
        row = conn.execute(query).fetchone()
        assert row is not None
        return int(row[0])


KILLED = """
import os, sys
from fencepost.jobs.worker import Worker
from support.jobs import CLASS, save
from support.provider import Client

worker, client = Worker(), Client(int(sys.argv[2]))

@worker.job(CLASS, lease=30.0, max_effect_timeout=30.0, network_bound=0.0)
def handler(ctx, job):
    done = ctx.effect("summarise", client.call, {"operation": job.operation})
    ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

worker.run(sys.argv[1])
"""


def test_a_worker_killed_right_after_the_acceptance_never_leads_to_a_second_one(
    database18: Database, tmp_path: Any
) -> None:
    """Crash here: [E]: SIGKILL between the provider's acceptance and the record of it, then restarts."""
    with Provider("hang") as provider, database18.connect(autocommit=True) as conn:
        given(conn)
        arguments = [database18.dsn, str(provider.port)]
        with Child.script(KILLED, folder=tmp_path, arguments=arguments, **CHILD_PATH) as child:
            wait_for(lambda: provider.accepted == [key("op-1")], 20, "the acceptance")
            child.kill()
        assert effect(conn, "state", key="summarise") == "pending" and show(conn) == "running"
        provider.mode = "answer"
        expire(conn)
        client = Client(provider.port)
        with running(reports(client, asynchronous=False), database18):
            becomes(conn, "blocked")
            assert effect(conn, "state", key="summarise") == "unknown"
        with running(reports(client, asynchronous=True), database18):
            settle_by_look_up(conn, client, "op-1")
            becomes(conn, "done")
        assert provider.accepted == [key("op-1")] and results(conn) == [f"receipt-{key('op-1')}"]


BEGINNING: LiteralString = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%%fencepost.begin_effect(%%'"""


def test_a_call_that_could_only_start_after_its_deadline_is_not_started(database18: Database) -> None:
    worker = Worker()
    called: list[int] = []

    def call(request: Any, dispatch: Dispatch) -> Success:
        called.append(1)
        return Success("r")

    def too_late(aside: Conn) -> None:
        """Gives the row free when the begin has waited for it past its deadline."""
        try:
            with database18.connect(autocommit=True) as look:
                wait_for(lambda: look.execute(BEGINNING).fetchone(), 10, "the begin to wait for the row")
            aside.execute("SELECT pg_sleep(0.3)")
        finally:
            aside.rollback()

    @worker.job(CLASS, max_attempts=1, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        with database18.connect() as aside:
            aside.execute("SELECT FROM fencepost.job FOR NO KEY UPDATE")
            release = threading.Thread(target=too_late, args=(aside,), daemon=True)
            release.start()
            try:
                ctx.effect("e1", call, {}, timeout=0.3)
            finally:
                release.join()

    with database18.connect(autocommit=True) as conn:
        given(conn, max_attempts=1)
        with running(worker, database18):
            becomes(conn, "poison")
        assert called == [] and effect(conn, "reason") == "deadline_before_dispatch"
        assert effect(conn, "state") == "failed_before_dispatch"


def test_a_call_starts_only_when_its_record_is_committed(database18: Database) -> None:
    """F13."""
    worker = Worker()
    seen: list[object] = []

    def call(request: Any, dispatch: Dispatch) -> Success:
        with database18.connect(autocommit=True) as aside:
            seen.append((effect(aside, "state"), effect(aside, "effect_attempt") == dispatch.effect_attempt))
        return Success("r-1")

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        ctx.effect("e1", call, {})

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "done")
    assert seen == [("pending", True)]


def test_logs_never_quote_the_request_the_answer_or_an_exception(
    database18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    worker = Worker()

    def call(request: Any, dispatch: Dispatch) -> Success:
        raise RuntimeError(f"geheim {request}")

    @worker.job(CLASS, **QUICK)
    def handler(ctx: Context, job: Job) -> None:
        ctx.effect("e1", call, {"text": "geheim"})

    with database18.connect(autocommit=True) as conn:
        given(conn)
        with running(worker, database18):
            becomes(conn, "blocked")
        assert "effect unknown (raised: RuntimeError)" in caplog.text and "geheim" not in caplog.text
        columns = conn.execute("SELECT e::text || j::text FROM fencepost.effect AS e, fencepost.job AS j").fetchall()
        assert "geheim" not in str(columns)
