"""Unknown effects are somebody's, escalate with age, and are settled by one decision each; escalation never resolves (G9, G15)."""

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from fencepost.jobs import effects, escalation
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import claim
from fencepost.jobs.escalation import Escalation, Reconciliation, assign, escalate
from fencepost.jobs.reconcile import reconcile
from fencepost.schemas.errors import (
    InvalidInput,
    NotQuiescent,
    NotUnknown,
    OperationConflict,
    UnknownClass,
    WrongVersion,
)
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    again,
    age_effect,
    begun,
    claimed,
    effect,
    expire,
    given,
    show,
    two,
    waiting,
)

HOUR = 3600.0
POLICY = Reconciliation("payments", (Escalation(HOUR, "high"), Escalation(3 * HOUR, "critical", "on-call")))
BY: dict[str, Any] = {"actor": "ann", "reason": "looked it up"}


def unknown(conn: Conn, operation: str = "op-1", *, policy: Reconciliation = POLICY, **given_by: Any) -> UUID:
    """A job that an unknown effect blocks; its effect attempt."""
    given(conn, operation, **given_by)
    escalation.register(conn, CLASS, policy)
    job = claimed(conn, operation)
    attempt = begun(conn, job.fence)
    assert effects.record(conn, job.fence, "e1", attempt, "unknown", reason="timeout") == "unknown"
    return attempt


def older(conn: Conn, seconds: float, operation: str = "op-1") -> None:
    """The effect has been unknown for so much longer."""
    conn.execute(
        "UPDATE fencepost.effect SET unknown_since = unknown_since - make_interval(secs => %s) WHERE operation = %s",
        (seconds, operation),
    )


def whose(conn: Conn, operation: str = "op-1") -> tuple[str, str]:
    return effect(conn, "assignee", operation), effect(conn, "severity", operation)


def applied(conn: Conn, operation: str = "op-1", **changes: Any) -> str:
    evidence: dict[str, Any] = {
        "version": 2,
        "verdict": "applied",
        "evidence_kind": "provider_statement",
        "evidence_ref": "mail/1",
        "receipt": "r-1",
    }
    return reconcile(conn, "t", operation, "e1", **(evidence | BY | changes))


def test_whatever_makes_an_effect_unknown_it_is_somebodys_from_then_on(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        attempt = unknown(conn)
        assert whose(conn) == ("payments", "normal") and effect(conn, "unknown_since") is not None

        for operation in ("leased", "cancelled"):
            given(conn, operation)
            begun(conn, claimed(conn, operation).fence)
        assert effect(conn, "unknown_since", "leased") is None
        expire(conn, "leased")
        cancel(conn, "t", "cancelled", CLASS, actor="ann", reason="no more")
        age_effect(conn, "cancelled")
        claim(conn, "w", [CLASS], 1)
        for operation in ("leased", "cancelled"):
            assert effect(conn, "state", operation) == "unknown" and whose(conn, operation) == ("payments", "normal")

        age_effect(conn)
        assert applied(conn, verdict="not_applied") == "resolved_not_applied"
        assert effect(conn, "unknown_since") is None
        job = claimed(conn)
        assert effects.record(conn, job.fence, "e1", attempt, "success", receipt="late") == "unknown"
        assert whose(conn) == ("payments", "critical") and effect(conn, "contradicted")


def test_age_raises_severity_and_reassigns_and_resolves_nothing(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        unknown(conn)
        unknown(conn, "op-2")
        before = effect(conn, "version"), effect(conn, "changed_at"), show(conn)
        assert escalate(conn) == 0
        older(conn, HOUR)
        assert (escalate(conn), escalate(conn)) == (1, 0) and whose(conn) == ("payments", "high")
        older(conn, 2 * HOUR)
        assert (escalate(conn), escalate(conn)) == (1, 0) and whose(conn) == ("on-call", "critical")
        older(conn, 3 * HOUR, "op-2")
        assert escalate(conn) == 1 and whose(conn, "op-2") == ("on-call", "critical")
        older(conn, 1000 * HOUR)
        assert escalate(conn) == 0
        assert before == (effect(conn, "version"), effect(conn, "changed_at"), show(conn)) and before[2] == "blocked"
        assert effect(conn, "state") == "unknown" and claim(conn, "w", [CLASS], 1) == []
        history = conn.execute(
            "SELECT became, severity, assignee FROM fencepost.effect_event"
            " WHERE operation = 'op-1' AND reason = 'escalated' ORDER BY id"
        ).fetchall()
        assert history == [("unknown", "high", "payments"), ("unknown", "critical", "on-call")]
        assert applied(conn) == "resolved_applied"
        older(conn, HOUR, "op-1")
        assert escalate(conn) == 0 and effect(conn, "severity") == "normal"


def test_escalation_never_lowers_what_an_operator_raised_and_waits_for_nobody(database: Database) -> None:
    with two(database) as (auto, manual):
        unknown(auto)
        unknown(auto, "op-2")
        assign(auto, "t", "op-1", "e1", version=2, assignee="bob", severity="critical", **BY)
        older(auto, HOUR)
        older(auto, HOUR, "op-2")
        manual.execute("SELECT FROM fencepost.effect WHERE operation = 'op-1' FOR UPDATE")
        assert escalate(auto) == 1 and whose(auto, "op-2") == ("payments", "high")
        assert effect(auto, "escalations") == 0
        manual.rollback()
        assert escalate(auto) == 1 and whose(auto) == ("bob", "critical")


def test_two_escalations_at_once_take_each_step_once(database: Database) -> None:
    with two(database) as (auto, manual):
        unknown(auto)
        older(auto, HOUR)
        assert escalate(manual) == 1
        assert escalate(auto) == 0
        manual.commit()
        assert escalate(auto) == 0 and effect(auto, "escalations") == 1


def test_an_unknown_effect_is_assigned_by_an_audited_decision(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        decision = uuid4()
        how: dict[str, Any] = {"version": 2, "assignee": "bob", "decision_id": decision} | BY
        for _ in range(2):
            assign(conn, "t", "op-1", "e1", **how)
        assert whose(conn) == ("bob", "normal") and effect(conn, "version") == 2
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (OperationConflict, "decision_id", {"assignee": "eve"}),
            (WrongVersion, "version", {"version": 1, "decision_id": None}),
            (InvalidInput, "severity", {"severity": "mild", "decision_id": None}),
            (InvalidInput, "assignee", {"assignee": "", "decision_id": None}),
            (InvalidInput, "reason", {"reason": "", "decision_id": None}),
        ]
        for kind, field, changes in wrong:
            with pytest.raises(kind) as refused:
                assign(conn, "t", "op-1", "e1", **(how | changes))
            assert getattr(refused.value, "field", None) == field
        for key in ("nothing", "e1"):
            if key == "e1":
                applied(conn)
            elsewhere: dict[str, Any] = how | {"decision_id": None, "version": 3}
            with pytest.raises(NotUnknown):
                assign(conn, "t", "op-1", key, **elsewhere)
        kept = conn.execute(
            "SELECT kind, verdict, actor, reason, version FROM fencepost.decision WHERE decision_id = %s", (decision,)
        ).fetchall()
        assert kept == [("assign", "bob", "ann", "looked it up", 2)]


def test_the_same_decision_again_is_no_second_one_and_another_under_its_id_is_refused(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        unknown(conn)
        unknown(conn, "op-2")
        decision = uuid4()
        for _ in range(2):
            assert applied(conn, decision_id=decision) == "resolved_applied"
        others: list[dict[str, Any]] = [
            {"verdict": "not_applied"},
            {"receipt": "r-2"},
            {"evidence_ref": "mail/2"},
            {"evidence_kind": "operator"},
            {"version": 3},
            {"actor": "bob"},
            {"reason": "guessed"},
            {"operation": "op-2"},
        ]
        for changes in others:
            with pytest.raises(OperationConflict) as refused:
                applied(conn, decision_id=decision, **changes)
            assert refused.value.field == "decision_id"
        assert (effect(conn, "state"), effect(conn, "receipt")) == ("resolved_applied", "r-1")
        assert effect(conn, "state", "op-2") == "unknown"
        with pytest.raises(NotUnknown):
            applied(conn, decision_id=uuid4(), version=3)
        rows = conn.execute("SELECT kind, version, receipt, evidence_ref, login = session_user FROM fencepost.decision")
        assert rows.fetchall() == [("reconcile", 2, "r-1", "mail/1", True)]


def test_a_decision_repeated_after_the_effect_was_begun_again_touches_nothing(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        age_effect(conn)
        decision = uuid4()
        assert applied(conn, verdict="not_applied", decision_id=decision) == "resolved_not_applied"
        assert isinstance(again(conn, claimed(conn).fence), effects.Begun)
        assert applied(conn, verdict="not_applied", decision_id=decision) == "resolved_not_applied"
        assert effect(conn, "state") == "pending" and effect(conn, "version") == 4


def test_two_decisions_at_once_under_one_id_are_one(database: Database) -> None:
    with two(database) as (auto, manual):
        unknown(auto)
        unknown(auto, "op-2")
        decision = uuid4()
        applied(manual, decision_id=decision)
        same = Background(database, lambda conn: applied(conn, decision_id=decision))
        waiting(auto, same.pid)
        other = Background(database, lambda conn: applied(conn, "op-2", decision_id=decision))
        waiting(auto, other.pid)
        manual.commit()
        assert same.outcome() == "resolved_applied"
        with pytest.raises(OperationConflict):
            other.outcome()
        assert effect(auto, "state", "op-2") == "unknown"
        assert auto.execute("SELECT count(*) FROM fencepost.decision").fetchone() == (1,)


def test_the_log_of_decisions_takes_nothing_back(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        applied(conn)
        for statement in (
            "UPDATE fencepost.decision SET actor = 'eve'",
            "DELETE FROM fencepost.decision",
            "TRUNCATE fencepost.decision",
            "DELETE FROM fencepost.effect_event",
        ):
            with pytest.raises(InvalidInput):
                conn.execute(statement.encode())
        assert conn.execute("SELECT actor FROM fencepost.decision").fetchall() == [("ann",)]


def test_a_policy_that_cannot_be_followed_is_refused(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        escalation.register(conn, CLASS, Reconciliation("ops", ()))
        escalation.register(conn, CLASS, POLICY)
        with pytest.raises(UnknownClass):
            escalation.register(conn, "report.other", POLICY)
        call = "SELECT fencepost.set_escalation(%s, %s, %s::interval[], %s::text[], %s::text[])"
        for values, field in (
            ((CLASS, "", ["1 h"], ["high"], [None]), "assignee"),
            ((CLASS, "ops", ["1 h"], ["high", "high"], [None]), "escalate"),
            ((CLASS, "ops", ["1 h", "1 h"], ["high", "high"], [None, None]), "escalate"),
            ((CLASS, "ops", ["0"], ["high"], [None]), "escalate"),
            ((CLASS, "ops", [None], ["high"], [None]), "escalate"),
            ((CLASS, "ops", ["1 h"], ["mild"], [None]), "severity"),
            ((CLASS, "ops", ["1 h"], ["high"], [" x"]), "assignee"),
        ):
            with pytest.raises(InvalidInput) as refused:
                conn.execute(call, values)
            assert refused.value.field == field
        row = conn.execute("SELECT assignee, escalate_severity, escalate_to FROM fencepost.job_class").fetchone()
        assert row == ("payments", ["high", "critical"], [None, "on-call"])
    for wrong in (
        lambda: Escalation(0.0),
        lambda: Escalation(float("nan")),
        lambda: Escalation(1.0, "high", ""),
        lambda: Reconciliation(" "),
        lambda: Reconciliation(escalate=(Escalation(2.0), Escalation(1.0))),
    ):
        with pytest.raises(InvalidInput):
            wrong()


def test_an_early_not_applied_of_a_keyed_effect_binds_the_next_begin_to_its_key(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, network_bound=60.0)
        job = claimed(conn)
        attempt = begun(conn, job.fence, kind="keyed", timeout=20.0)
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        until = effect(conn, "quiescent_at")
        assert applied(conn, verdict="not_applied") == "resolved_not_applied"
        job = claimed(conn)
        with pytest.raises(NotQuiescent) as refused:
            begun(conn, job.fence, kind="opaque")
        assert refused.value.field == "kind"
        attempt = begun(conn, job.fence, kind="keyed", timeout=1.0)
        assert effect(conn, "quiescent_at") == until
        effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch")
        with pytest.raises(NotQuiescent):
            begun(conn, job.fence, kind="lookup")
        age_effect(conn)
        begun(conn, job.fence, kind="lookup")


def test_another_receipt_for_what_is_settled_is_kept_as_evidence(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        assert applied(conn) == "resolved_applied"
        for late in ("r-1", "r-late"):
            assert effects.record(conn, job.fence, "e1", attempt, "success", receipt=late) == "resolved_applied"
        assert (effect(conn, "receipt"), effect(conn, "version"), show(conn)) == ("r-1", 3, "queued")
        kept = conn.execute("SELECT receipt FROM fencepost.effect_event WHERE reason = 'another_receipt'").fetchall()
        assert kept == [("r-late",)]


def test_evidence_is_referred_to_and_not_quoted_at_length(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn)
        for changes in ({"evidence_ref": "x" * 2001}, {"receipt": "x" * 2001}, {"evidence_ref": " "}, {"receipt": " "}):
            with pytest.raises(psycopg.DatabaseError) as refused:
                applied(conn, **changes)
            assert getattr(refused.value, "field", None) in changes
        assert applied(conn, evidence_ref="x" * 2000, receipt="x" * 2000) == "resolved_applied"
