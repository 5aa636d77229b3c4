"""Receipts are looked up by one worker at a time, outside of any transaction, and only certain answers settle anything."""

import logging
import threading
from typing import Any, cast
from uuid import uuid4

import httpx
import psycopg
import pytest

from fencepost.jobs import effects, lookup
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.escalation import Reconciliation
from fencepost.jobs.http import http_effect
from fencepost.jobs.lookup import Answer, Asked, DidNotHappen, Inconclusive, Landed, ReceiptLookup
from fencepost.jobs.upkeep import BACKOFF_SECONDS_MAX, Upkeep
from fencepost.jobs.worker import Backoff, Worker
from fencepost.schemas.errors import InvalidInput, NotQuiescent, StaleEffectAttempt
from support.database import Database, Databases
from support.jobs import (
    CLASS,
    Background,
    Conn,
    age_effect,
    begun,
    claimed,
    effect,
    given,
    results,
    save,
    show,
)
from support.processes import wait_for
from support.provider import Client, Provider
from support.roles import separated
from support.workers import QUICK, becomes, running


def unknown(conn: Conn, operation: str = "op-1", *, kind: effects.Kind = "lookup", bound: float = 60.0) -> None:
    """A job that an unknown effect blocks; its call may be under way for another ``bound`` seconds."""
    given(conn, operation, network_bound=bound)
    job = claimed(conn, operation)
    attempt = begun(conn, job.fence, kind=kind)
    effects.record(conn, job.fence, "e1", attempt, "unknown", reason="timeout")


class Adapter:
    """Answers what the test says, and keeps what it was asked."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers: list[Answer | Exception] = list(answers)
        self.asked: list[Asked] = []

    def __call__(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def upkeep(database: Database, adapter: ReceiptLookup, **options: Any) -> Upkeep:
    return Upkeep(database.dsn, "worker-1", {CLASS: adapter}, **options)


def look_up_row(conn: Conn, operation: str = "op-1") -> tuple[Any, ...]:
    row = conn.execute(
        "SELECT answer, asks, due_at - answered_at, due_at > clock_timestamp() FROM fencepost.lookup WHERE operation = %s",
        (operation,),
    ).fetchone()
    assert row is not None
    return row


def was_unknown(conn: Conn, operation: str) -> bool:
    found = "SELECT FROM fencepost.effect_event WHERE operation = %s AND became = 'unknown'"
    return conn.execute(found, (operation,)).fetchone() is not None


def due(conn: Conn) -> None:
    """The next question is due."""
    conn.execute("UPDATE fencepost.lookup SET due_at = clock_timestamp() - interval '1 ms'")


def test_a_receipt_that_is_found_settles_the_effect_as_an_operators_evidence_would(database: Database) -> None:
    adapter = Adapter(Landed("r-1", "provider/receipts/1"))
    with database.connect(autocommit=True) as conn:
        unknown(conn)
        assert upkeep(database, adapter).turn(conn) == 1
        assert (effect(conn, "state"), effect(conn, "receipt"), show(conn)) == ("resolved_applied", "r-1", "queued")
        assert claimed(conn).mode == "finish"
        (asked,) = adapter.asked
        assert (asked.tenant, asked.operation, asked.effect_key, asked.job_class) == ("t", "op-1", "e1", CLASS)
        assert asked.idempotency_key == effects.idempotency_key("t", "op-1", "e1")
        assert asked.request_key == effects.attempt_key(effect(conn, "effect_attempt")) and asked.seconds_left() > 0
        rows = conn.execute(
            "SELECT kind, actor, verdict, evidence_kind, evidence_ref, receipt, version FROM fencepost.decision"
        )
        assert rows.fetchall() == [
            ("reconcile", "look-up by worker-1", "applied", "receipt_lookup", "provider/receipts/1", "r-1", 2)
        ]
        assert upkeep(database, adapter).turn(conn) == 0


def test_a_negative_answer_counts_only_to_a_question_asked_after_the_quiescence(database: Database) -> None:
    """F11, by machine: refused before, asked again, and then believed."""
    adapter = Adapter(DidNotHappen("provider/receipts/1"))
    with database.connect(autocommit=True) as conn:
        unknown(conn, bound=600.0)
        keeper = upkeep(database, adapter)
        assert keeper.turn(conn) == 1 and effect(conn, "state") == "unknown"
        answer, asks, delay, later = look_up_row(conn)
        assert (answer, asks, later) == ("not_quiescent", 1, True) and 500 < delay.total_seconds() < 700
        assert keeper.turn(conn) == 0
        due(conn)
        age_effect(conn)
        assert keeper.turn(conn) == 1 and effect(conn, "state") == "resolved_not_applied"
        assert show(conn) == "queued" and len(adapter.asked) == 2


def test_an_answer_that_the_call_may_have_overtaken_is_not_believed_however_late_it_arrives(
    database18: Database,
) -> None:
    with database18.connect(autocommit=True) as conn:

        def slow(asked: Asked) -> Answer:
            with database18.connect(autocommit=True) as aside:
                aside.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp()")
            return DidNotHappen("nothing yet")

        unknown(conn)
        assert upkeep(database18, slow).turn(conn) == 1
        assert effect(conn, "state") == "unknown" and look_up_row(conn)[0] == "not_quiescent"
        due(conn)
        assert upkeep(database18, Adapter(DidNotHappen("nothing"))).turn(conn) == 1
        assert effect(conn, "state") == "resolved_not_applied"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Inconclusive(), "inconclusive"),
        (Inconclusive("provider_down"), "provider_down"),
        (RuntimeError("geheim"), "raised"),
        (cast(Answer, None), "not_an_answer"),
        (cast(Answer, "did not happen"), "not_an_answer"),
    ],
)
def test_an_answer_that_settles_nothing_never_does_and_is_asked_for_more_and_more_rarely(
    database18: Database, answer: Answer | Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = Adapter(answer)
    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        age_effect(conn)
        keeper = upkeep(database18, adapter, backoff=14.0)
        delays: list[float] = []
        for asks in range(1, 12):
            assert keeper.turn(conn) == 1 and keeper.turn(conn) == 0
            kept, number, delay, later = look_up_row(conn)
            assert (kept, number, later) == (code, asks, True)
            delays.append(delay.total_seconds())
            due(conn)
        assert delays[0] <= 14 < delays[2] < delays[4] < delays[6] <= max(delays) <= BACKOFF_SECONDS_MAX
        assert (effect(conn, "state"), effect(conn, "version"), show(conn)) == ("unknown", 2, "blocked")
        adapter.answers = [Landed("r-1")]
        assert keeper.turn(conn) == 1 and effect(conn, "state") == "resolved_applied"
    assert "geheim" not in caplog.text


def test_no_answer_in_time_is_inconclusive_and_questions_that_never_end_are_bounded(database18: Database) -> None:
    released = threading.Event()

    def hangs(asked: Asked) -> Answer:
        released.wait(30)
        return Landed("r-late")

    with database18.connect(autocommit=True) as conn:
        for number in range(9):
            unknown(conn, f"op-{number}")
        keeper = upkeep(database18, hangs, ask_seconds=0.2)
        assert keeper.turn(conn) == 8 and keeper.turn(conn) == 0
        answers = conn.execute("SELECT answer, count(*) FROM fencepost.lookup GROUP BY 1").fetchall()
        assert answers == [("no_answer", 8)]
        released.set()
        states = conn.execute("SELECT DISTINCT state FROM fencepost.effect").fetchall()
        assert states == [("unknown",)]


def test_an_asynchronous_adapter_is_awaited_within_its_time(database18: Database) -> None:
    async def adapter(asked: Asked) -> Answer:
        return Landed("r-1")

    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        assert upkeep(database18, adapter).turn(conn) == 1 and effect(conn, "receipt") == "r-1"


def test_a_provider_is_asked_by_one_worker_at_a_time_and_outside_of_any_transaction(database: Database) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def adapter(asked: Asked) -> Answer:
        inside.set()
        assert go_on.wait(20)
        return Landed("r-1")

    with database.connect(autocommit=True) as conn:
        unknown(conn)
        first = Background(database, lambda own: upkeep(database, adapter).turn(own))
        assert inside.wait(20)
        other = Adapter(Landed("r-2"))
        assert upkeep(database, other).turn(conn) == 0
        asking = conn.execute(
            "SELECT state, backend_xid, backend_xmin FROM pg_stat_activity WHERE pid = %s", (first.pid,)
        )
        assert asking.fetchall() == [("idle", None, None)]
        locks = conn.execute("SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype <> 'virtualxid'", (first.pid,))
        assert locks.fetchone() == (0,)
        go_on.set()
        assert first.outcome() == 1 and effect(conn, "receipt") == "r-1" and other.asked == []


def test_a_question_of_a_worker_that_is_gone_is_asked_again_and_its_late_answer_is_refused(database: Database) -> None:
    """Crash here: [L]."""
    with database.connect(autocommit=True) as conn:
        unknown(conn, bound=0.0)
        age_effect(conn)
        (taken,) = lookup.take(conn, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0)
        adapter = Adapter(Inconclusive())
        assert upkeep(database, adapter).turn(conn) == 0
        due(conn)
        assert upkeep(database, adapter).turn(conn) == 1 and look_up_row(conn)[:2] == ("inconclusive", 2)
        with pytest.raises(StaleEffectAttempt) as refused:
            lookup.settle(conn, taken, Landed("r-1"), decision_id=uuid4(), actor="w")
        assert refused.value.field == "taken_by"
        assert lookup.defer(conn, taken, "late", 0.0) is False
        due(conn)
        (again,) = lookup.take(conn, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0)
        decision = uuid4()
        for _ in range(2):
            assert lookup.settle(conn, again, Landed("r-1"), decision_id=decision, actor="w") == "resolved_applied"


def test_two_workers_that_look_at_once_take_each_question_once(database: Database) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as manual:
        unknown(conn)
        lookup.take(manual, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0)
        other = Background(database, lambda own: lookup.take(own, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0))
        manual.commit()
        assert other.outcome() == []
        due(conn)
        lookup.take(manual, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0)
        other = Background(database, lambda own: lookup.take(own, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0))
        manual.commit()
        assert other.outcome() == []


def test_opaque_contradicted_and_foreign_effects_are_left_to_people(database18: Database) -> None:
    adapter = Adapter(Landed("r-1"))
    with database18.connect(autocommit=True) as conn:
        unknown(conn, "keyed", kind="keyed")
        unknown(conn, "opaque", kind="opaque")
        unknown(conn, "contradicted")
        conn.execute("UPDATE fencepost.effect SET contradicted = true WHERE operation = 'contradicted'")
        given(conn, "pending")
        begun(conn, claimed(conn, "pending").fence, kind="lookup")
        given(conn, "foreign", job_class="report.mail")
        job = claimed(conn, "foreign", job_class="report.mail")
        attempt = begun(conn, job.fence, kind="lookup")
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        assert upkeep(database18, adapter).turn(conn) == 1
        assert [asked.operation for asked in adapter.asked] == ["keyed"]
        assert adapter.asked[0].request_key == adapter.asked[0].idempotency_key


def test_evidence_without_a_reference_cannot_be_given(database18: Database) -> None:
    for wrong in (
        lambda: Landed(""),
        lambda: Landed(" "),
        lambda: Landed("x" * 2001),
        lambda: DidNotHappen(""),
        lambda: DidNotHappen(cast(str, None)),
        lambda: Inconclusive("Not a code: geheim"),
    ):
        with pytest.raises(InvalidInput):
            wrong()
    assert Landed("r-1").evidence_ref == "r-1"
    with database18.connect(autocommit=True) as conn:
        unknown(conn, bound=600.0)
        (taken,) = lookup.take(conn, [CLASS], uuid4(), limit=10, lease=30.0, patience=5.0)
        with pytest.raises(NotQuiescent):
            lookup.settle(conn, taken, DidNotHappen("x"), decision_id=uuid4(), actor="w")
        for limit, lease in ((0, 30.0), (1001, 30.0), (10, 0.0), (10, 4000.0)):
            with pytest.raises(InvalidInput):
                lookup.take(conn, [CLASS], uuid4(), limit=limit, lease=lease, patience=5.0)
        for delay in (-1.0, 200_000.0):
            with pytest.raises(InvalidInput):
                lookup.defer(conn, taken, "later", delay)
        assert lookup.defer(conn, taken, "later", 0.0)


def test_a_login_does_what_its_roles_allow_and_leaves_the_rest_to_others(
    databases18: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    adapter = Adapter(Landed("r-1"))
    with separated(databases18) as roles:
        with roles.database.connect(autocommit=True) as conn:
            unknown(conn)
        executor = roles.login("executor")
        with executor.connect(autocommit=True) as conn:
            keeper = upkeep(executor, adapter)
            assert keeper.turn(conn) == 0 and keeper.turn(conn) == 0 and adapter.asked == []
        assert caplog.text.count("grant it the role maintenance") == 1
        assert caplog.text.count("grant it the role reconciler") == 1
        both = roles.login("maintenance", "reconciler")
        with both.connect(autocommit=True) as conn:
            assert upkeep(both, adapter).turn(conn) == 1
            for statement in ("UPDATE fencepost.lookup SET asks = 1", "DELETE FROM fencepost.decision"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(statement.encode())
        with roles.database.connect(autocommit=True) as conn:
            rows = conn.execute("SELECT login, evidence_kind FROM fencepost.decision").fetchall()
            assert rows == [(roles.name("maintenance", "reconciler"), "receipt_lookup")]


def test_a_worker_finds_lost_receipts_by_itself_and_every_effect_happens_once(database18: Database) -> None:
    """The oracle is the provider's ledger."""
    with Provider() as provider, database18.connect(autocommit=True) as conn:

        def look_up(asked: Asked) -> Answer:
            found = Client(provider.port).look_up(asked.request_key)
            where = f"receipts/{asked.request_key}"
            return DidNotHappen(where) if found is None else Landed(found, where)

        worker = Worker()
        policy: dict[str, Any] = QUICK | {
            "backoff": Backoff(0.0, 0.0),
            "reconciliation": Reconciliation(look_up=look_up),
        }

        @worker.job(CLASS, **policy)
        def handler(ctx: Context, job: Job) -> None:
            with httpx.Client(trust_env=False) as client:
                call = http_effect(
                    client, "POST", provider.url, success={200}, receipt=lambda answer: str(answer.json()["receipt"])
                )
                done = ctx.effect("e1", call, {"operation": job.operation}, kind="lookup")
            ctx.publish(lambda tx: save(tx, job.operation, by=done.receipt))

        with running(worker, database18):
            for mode in ("drop-after-accept", "refuse-before-read", "garbage"):
                provider.mode = mode
                given(conn, mode, network_bound=0.0)
                wait_for(lambda m=mode: was_unknown(conn, m), 20, f"{mode} to be unknown")  # type: ignore[misc]
                provider.mode = "answer"
                age_effect(conn, mode)
                due(conn)
                becomes(conn, "done", mode)
        assert len(provider.accepted) == 3 and len(set(provider.accepted)) == 3
        for mode in ("drop-after-accept", "refuse-before-read", "garbage"):
            (published,) = results(conn, mode)
            assert published.removeprefix("receipt-") in provider.accepted
        assert effect(conn, "begins", "drop-after-accept") == 1 < effect(conn, "begins", "refuse-before-read")


def test_an_effect_of_which_a_journal_holds_another_begin_is_left_to_people(database18: Database) -> None:
    """Asked under the key of the one, the provider would not tell of the other."""
    with database18.connect(autocommit=True) as conn:
        for operation in ("op-1", "op-2"):
            unknown(conn, operation)
        other = (effects.request_digest({"key": "e1"}), uuid4(), uuid4())

        verdict = conn.execute(
            "SELECT fencepost.present_begin('t', 'op-1', %s, 'e1', 'lookup', %s, %s, %s)",
            (CLASS, other[1], other[2], other[0]),
        ).fetchone()

        assert verdict == ("superseded",)
        taken = lookup.take(conn, [CLASS], uuid4(), limit=10, lease=1.0, patience=1.0)
        assert [t.asked.operation for t in taken] == ["op-2"]  # which is the control too
