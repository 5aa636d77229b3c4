"""Decisions, presented begins and receipts: every column of what is the same, every state of the job that it meets."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import Fence, complete
from fencepost.schemas.errors import OperationConflict
from support.database import Database
from support.jobs import CLASS, Conn, begun, claimed, column, effect, expire, given, show

RECONCILE = """SELECT fencepost.reconcile(%(tenant)s, %(operation)s, %(key)s, %(version)s, %(verdict)s, %(evidence_kind)s,
    %(evidence_ref)s, %(receipt)s, %(id)s, %(actor)s, %(reason)s)"""
ASSIGN = """SELECT fencepost.assign_effect(%(tenant)s, %(operation)s, %(key)s, %(version)s, 'bob', NULL, %(id)s, %(actor)s, %(reason)s)"""
PRESENT = """SELECT fencepost.present_begin(%(tenant)s, %(operation)s, 'report.analyse', %(key)s, 'opaque', %(attempt)s,
    gen_random_uuid(), %(digest)s)"""


def test_a_decision_is_the_same_only_when_every_part_of_it_is(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for tenant, operation in (("t", "op-1"), ("s", "op-1"), ("t", "op-2")):
            given(conn, operation, tenant=tenant, policy="resumable")
            f = claimed(conn, operation).fence
            for key in ("e1", "e2"):
                begun(conn, f, key)
            assert fail(conn, f, "why") == "blocked"
        conn.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp()")
        decision: dict[str, Any] = {
            "tenant": "t",
            "operation": "op-1",
            "key": "e1",
            "version": 2,
            "verdict": "applied",
            "evidence_kind": "operator",
            "evidence_ref": "mail",
            "receipt": "r",
            "id": uuid4(),
            "actor": "ann",
            "reason": "why",
        }
        for _ in range(2):
            assert conn.execute(RECONCILE, decision).fetchone() == ("resolved_applied",)
        assert conn.execute("SELECT count(*) FROM fencepost.decision").fetchone() == (1,)
        others = {
            "tenant": "s", "operation": "op-2", "key": "e2", "version": 3, "verdict": "not_applied", "reason": "another",
            "evidence_kind": "provider_statement", "evidence_ref": "letter", "receipt": "another", "actor": "bob",
        }  # fmt: skip
        for part, value in others.items():
            with pytest.raises(OperationConflict) as refused:
                conn.execute(RECONCILE, decision | {part: value})
            assert refused.value.field == "decision_id", part
        with pytest.raises(OperationConflict):
            conn.execute(ASSIGN, decision)
        conn.execute(RECONCILE, decision | {"key": "e2", "id": uuid4()})


def test_a_begin_is_known_by_its_own_history_only(database18: Database) -> None:
    """Not by the same number under another tenant, another operation or another key."""
    number = uuid4()
    with database18.connect(autocommit=True) as conn:
        for tenant, operation, key in (("s", "op-1", "e1"), ("t", "op-2", "e1"), ("t", "op-1", "e2")):
            given(conn, operation, tenant=tenant, policy="resumable")
            f = claimed(conn, operation).fence
            _begin(conn, f, key, number)
        for _ in range(2):
            assert _present(conn, "op-2", number) == "known"
        assert _present(conn, "op-1", number) == "unknown"
        assert _present(conn, "op-1", number) == "known"
        assert _present(conn, "none", number) == "no_job"


def _begin(conn: Conn, f: Fence, key: str, attempt: UUID) -> None:
    effects.begin(conn, f, key, kind="opaque", effect_attempt=attempt, digest=bytes(32), timeout=5.0)


def _present(conn: Conn, operation: str, attempt: UUID, key: str = "e1") -> str:
    row = conn.execute(
        PRESENT, {"tenant": "t", "operation": operation, "key": key, "attempt": attempt, "digest": bytes(32)}
    ).fetchone()
    assert row is not None
    said: str = row[0]
    return said


# What a job is when something comes to light about its effect, and what it is then: state, open effects, generations.
LIGHT = {
    "running": ("blocked", 1, 1),
    "queued": ("blocked", 1, 1),
    "poison": ("blocked", 1, 1),
    "blocked": ("blocked", 2, 0),
    "cancelled": ("cancelled", 1, 0),
    "done": ("done", 0, 0),
}


@pytest.mark.parametrize("state", LIGHT)
def test_a_begin_that_nobody_knew_of_stops_whatever_has_not_ended(database18: Database, state: str) -> None:
    with database18.connect(autocommit=True) as conn:
        f, _ = _in(conn, state)
        generation = column(conn, "generation")
        assert _present(conn, "op-1", uuid4(), "unheard-of") == "unknown"
        became, still_open, advanced = LIGHT[state]
        assert (show(conn), column(conn, "open_effects"), column(conn, "generation") - generation) == (
            became,
            still_open,
            advanced,
        )
        if state == "done":
            assert column(conn, "done_attempt") == f.attempt


@pytest.mark.parametrize("state", LIGHT)
def test_a_receipt_against_what_was_believed_stops_whatever_has_not_ended(database18: Database, state: str) -> None:
    with database18.connect(autocommit=True) as conn:
        f, attempt = _in(conn, state)
        assert effects.record(conn, f, "believed", attempt, "success", receipt="r") == "unknown"
        became, still_open, _ = LIGHT[state]
        assert (show(conn), column(conn, "open_effects")) == (became, still_open)
        assert effect(conn, "contradicted", key="believed") and column(conn, "attempt") is None
        decision = {
            "tenant": "t", "operation": "op-1", "key": "believed", "version": effect(conn, "version", key="believed"),
            "verdict": "applied", "evidence_kind": "operator", "evidence_ref": "mail", "receipt": "r", "id": uuid4(),
            "actor": "ann", "reason": "why",
        }  # fmt: skip
        conn.execute(RECONCILE, decision)
        settled = "queued" if state in ("running", "queued") else became
        if state == "poison":
            settled = "queued"
        assert show(conn) == settled
        assert column(conn, "open_effects") == {"done": 0, "blocked": 1}.get(state, 0)
        assert column(conn, "applied_effects") == 1


def _in(conn: Conn, state: str) -> tuple[Fence, UUID]:
    """A job in this state, whose effect `believed` is certain not to have happened; the claim that began it."""
    given(conn, policy="resumable", max_attempts=5)
    f = claimed(conn).fence
    attempt = begun(conn, f, "believed")
    effects.record(conn, f, "believed", attempt, "failed_before_dispatch")
    match state:
        case "done":
            complete(conn, f)
        case "cancelled":
            cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why")
        case "queued":
            fail(conn, f, "why")
        case "poison":
            fail(conn, f, "why", final=True)
        case "blocked":
            begun(conn, f, "lost")
            fail(conn, f, "why")
        case _:
            pass
    assert show(conn) == state
    return f, attempt


def test_a_budget_that_is_used_up_is_poison_when_the_last_effect_is_settled_whichever_budget_it_is(
    database18: Database,
) -> None:
    """Of a strict class with a receipt the finishes count, else the attempts; a resumable class has attempts only."""
    with database18.connect(autocommit=True) as conn:
        for policy, verdict, reason in (
            ("strict", "applied", "effect_settled"),
            ("strict", "not_applied", "attempts_exhausted"),
            ("resumable", "applied", "attempts_exhausted"),
            ("resumable", "not_applied", "attempts_exhausted"),
        ):
            operation = f"{policy}-{verdict}"
            given(conn, operation, policy=policy, max_attempts=1, max_finishes=1, job_class=policy)
            f = claimed(conn, operation, job_class=policy).fence
            begun(conn, f)
            assert fail(conn, f, "why") == "blocked"
            conn.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp()")
            conn.execute(
                RECONCILE,
                {
                    "tenant": "t", "operation": operation, "key": "e1", "version": 2, "verdict": verdict, "evidence_kind": "operator",
                    "evidence_ref": "mail", "receipt": "r" if verdict == "applied" else None, "id": uuid4(), "actor": "ann",
                    "reason": "why",
                },
            )  # fmt: skip
            assert column(conn, "reason", operation) == reason
            became = "queued" if reason == "effect_settled" else "poison"
            assert show(conn, operation, job_class=policy) == became

        given(conn, "finish", job_class="strict", max_finishes=1, max_attempts=5)
        f = claimed(conn, "finish", job_class="strict").fence
        attempt = begun(conn, f)
        effects.record(conn, f, "e1", attempt, "success", receipt="r")
        expire(conn, "finish")
        claimed(conn, "finish", job_class="strict")
        # A contradiction is the only way back for an applied effect; here the column alone says that it is open.
        conn.execute(
            "UPDATE fencepost.effect SET state = 'unknown', receipt = NULL, unknown_since = clock_timestamp()"
            " WHERE operation = 'finish'"
        )
        conn.execute(
            "UPDATE fencepost.job SET exec = 'blocked', attempt = NULL, owner = NULL, lease_until = NULL, open_effects = 1"
            " WHERE operation = 'finish'"
        )
        assert effects.record(conn, f, "e1", attempt, "success", receipt="r") == "success"
        assert (show(conn, "finish", job_class="strict"), column(conn, "reason", "finish")) == (
            "poison",
            "finishes_exhausted",
        )
