"""Effects: recorded before dispatch, bound to their begin, settled by evidence only (G9), in SQL and on two connections."""

from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import claim
from fencepost.jobs.fail import fail, release
from fencepost.jobs.publish import publish
from fencepost.jobs.reconcile import reconcile
from fencepost.schemas.errors import (
    EffectLimit,
    EffectOpen,
    EpochFrozen,
    EvidenceMissing,
    FinishOnly,
    InvalidInput,
    NotQuiescent,
    NotUnknown,
    OperationConflict,
    StaleEffectAttempt,
    StaleFence,
    WrongVersion,
)
from fencepost.schemas.identity import Tenant
from support.database import Database
from support.jobs import (
    CLASS,
    Background,
    Conn,
    again,
    age_effect,
    begun,
    claimed,
    column,
    effect,
    expire,
    given,
    results,
    save,
    show,
    two,
    waiting,
)

BY: dict[str, Any] = {"actor": "ann", "reason": "looked it up"}


def applied(conn: Conn, version: int, **changes: Any) -> str:
    evidence: dict[str, Any] = {
        "version": version,
        "verdict": "applied",
        "evidence_kind": "receipt_lookup",
        "evidence_ref": "provider/1",
        "receipt": "r-1",
    }
    return reconcile(conn, "t", "op-1", "e1", **(evidence | BY | changes))


def not_applied(conn: Conn, version: int, **changes: Any) -> str:
    return applied(conn, version, **({"verdict": "not_applied", "receipt": None} | changes))


def unknown(conn: Conn, **policy: Any) -> tuple[Any, Any]:
    """A job that is blocked by an unknown effect of its first attempt."""
    given(conn, **policy)
    job = claimed(conn)
    attempt = begun(conn, job.fence)
    assert effects.record(conn, job.fence, "e1", attempt, "unknown", reason="timeout") == "unknown"
    assert show(conn) == "blocked"
    return job, attempt


def test_a_receipt_settles_the_effect_and_the_same_claim_publishes(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        lease = column(conn, "lease_until")
        attempt = begun(conn, job.fence, timeout=20.0)
        assert column(conn, "lease_until") > lease and column(conn, "open_effects") == 1
        assert effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1", result={"n": 1.5}) == "success"
        assert again(conn, job.fence) == effects.Recorded("r-1", {"n": 1.5})
        publish(conn, job.fence, lambda tx: save(tx))
        history = conn.execute("SELECT was, became, version FROM fencepost.effect_event ORDER BY id").fetchall()
        assert history == [(None, "pending", 1), ("pending", "success", 2)] and show(conn) == "done"


def test_an_effect_is_not_begun_again_until_it_failed_before_dispatch(database: Database) -> None:
    """F5."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        with pytest.raises(EffectOpen):
            again(conn, job.fence)
        assert effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch") == "failed_before_dispatch"
        began = again(conn, job.fence)
        assert isinstance(began, effects.Begun) and began.version == 3
        assert effect(conn, "begins") == 2 and column(conn, "open_effects") == 1


def test_another_request_another_class_and_a_second_key_are_refused(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        given(conn, job_class="report.mail")
        job, mail = claimed(conn), claimed(conn, job_class="report.mail")
        attempt = begun(conn, job.fence)
        with pytest.raises(EffectOpen):
            again(conn, mail.fence)
        with pytest.raises(EffectLimit):
            again(conn, job.fence, "e2")
        effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch")
        digest = effects.request_digest({"key": "another"})
        with pytest.raises(OperationConflict) as refused:
            effects.begin(conn, job.fence, "e1", kind="opaque", effect_attempt=uuid4(), digest=digest, timeout=1.0)
        assert refused.value.field == "effect_key"
        with pytest.raises(OperationConflict) as refused:
            again(conn, mail.fence)
        assert refused.value.field == "class"
        for timeout in (0.0, -1.0, 31.0):
            with pytest.raises(InvalidInput) as wrong:
                begun(conn, job.fence, timeout=timeout)
            assert wrong.value.field == "timeout"
        attempt = begun(conn, job.fence)
        effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1")
        assert again(conn, mail.fence) == effects.Recorded("r-1", None)


def test_two_classes_that_begin_one_key_at_once_dispatch_it_once(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        given(auto, job_class="report.mail")
        job, mail = claimed(auto), claimed(auto, job_class="report.mail")
        assert isinstance(again(manual, job.fence), effects.Begun)
        other = Background(database, lambda conn: again(conn, mail.fence))
        waiting(auto, other.pid)
        manual.commit()
        with pytest.raises(EffectOpen):
            other.outcome()
        assert effect(auto, "class") == CLASS and effect(auto, "begins") == 1
        assert auto.execute("SELECT sum(open_effects) FROM fencepost.job").fetchone() == (1,)


def test_a_resumable_class_remembers_each_receipt_and_blocks_on_any_open_effect(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, policy="resumable")
        job = claimed(conn)
        first, second = begun(conn, job.fence, "e1"), begun(conn, job.fence, "e2")
        effects.record(conn, job.fence, "e1", first, "success", receipt="r-1")
        with pytest.raises(EffectOpen):
            publish(conn, job.fence, lambda tx: save(tx))
        expire(conn)
        assert claim(conn, "w", [CLASS], 1) == []
        effects.record(conn, job.fence, "e2", second, "success", receipt="r-2")
        later = claimed(conn)
        assert later.mode == "execute"
        assert again(conn, later.fence, "e1") == effects.Recorded("r-1", None)
        assert again(conn, later.fence, "e2") == effects.Recorded("r-2", None)
        begun(conn, later.fence, "e3")


def test_a_strict_job_with_a_receipt_may_only_finish_and_has_a_budget_of_its_own_for_that(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, max_attempts=1, max_finishes=2)
        job = claimed(conn)
        effects.record(conn, job.fence, "e1", begun(conn, job.fence), "success", receipt="r-1")
        expire(conn)
        finish = claimed(conn)
        assert (finish.mode, finish.attempts) == ("finish", 1)
        assert again(conn, finish.fence) == effects.Recorded("r-1", None)
        with pytest.raises(FinishOnly):
            again(conn, finish.fence, "e2")
        assert fail(conn, finish.fence, "handler_raised") == "queued"
        assert fail(conn, claimed(conn).fence, "handler_raised") == "poison"
        assert column(conn, "reason") == "finishes_exhausted"


def test_a_frozen_tenant_begins_nothing_but_records_and_publishes(database: Database) -> None:
    """F16."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch, frozen) VALUES ('t', 1, true)")
        effects.record(conn, job.fence, "e1", attempt, "failed_before_dispatch")
        with pytest.raises(EpochFrozen):
            again(conn, job.fence)
        publish(conn, job.fence, lambda tx: save(tx))


def test_an_outcome_is_bound_to_its_begin(database: Database) -> None:
    """F8: a late record of an earlier begin does not touch a later one; its receipt is kept as evidence."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        first = begun(conn, job.fence)
        effects.record(conn, job.fence, "e1", first, "failed_before_dispatch")
        second = begun(conn, job.fence)
        for outcome in ("failed_before_dispatch", "unknown"):
            with pytest.raises(StaleEffectAttempt) as refused:
                effects.record(conn, job.fence, "e1", first, outcome)
            assert refused.value.field == "effect_attempt"
        for strange in (uuid4(),):
            with pytest.raises(StaleEffectAttempt):
                effects.record(conn, job.fence, "e1", strange, "success", receipt="r-x")
        with pytest.raises(StaleEffectAttempt):
            effects.record(conn, replace(job.fence, tenant=Tenant("other")), "e1", second, "success", receipt="r")
        assert effects.record(conn, job.fence, "e1", first, "success", receipt="r-late") == "superseded"
        assert effect(conn, "state") == "pending" and effect(conn, "contradicted")
        kept = "SELECT receipt FROM fencepost.effect_event WHERE effect_attempt = %s AND receipt IS NOT NULL"
        assert conn.execute(kept, (first,)).fetchall() == [("r-late",)]
        assert effects.record(conn, job.fence, "e1", second, "success", receipt="r-2") == "success"


def test_a_success_needs_a_receipt_and_a_settled_effect_takes_no_other_outcome(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        with pytest.raises(EvidenceMissing) as refused:
            effects.record(conn, job.fence, "e1", attempt, "success")
        assert refused.value.field == "receipt"
        with pytest.raises(InvalidInput):
            effects.record(conn, job.fence, "e1", attempt, cast(effects.Outcome, "maybe"))
        for _ in range(2):
            assert effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1") == "success"
        for outcome in ("failed_before_dispatch", "unknown"):
            with pytest.raises(StaleEffectAttempt):
                effects.record(conn, job.fence, "e1", attempt, outcome)
        assert (effect(conn, "state"), column(conn, "open_effects"), column(conn, "applied_effects")) == (
            "success",
            0,
            1,
        )


def test_an_unknown_outcome_takes_the_job_from_its_attempt_and_late_evidence_needs_no_lease(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        job, attempt = unknown(conn)
        with pytest.raises(StaleFence):
            publish(conn, job.fence, lambda tx: save(tx))
        assert effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1") == "success"
        assert show(conn) == "queued"
        with pytest.raises(StaleFence):
            publish(conn, job.fence, lambda tx: save(tx))
        publish(conn, claimed(conn).fence, lambda tx: save(tx, by="successor"))
        assert results(conn) == ["successor"]


def test_a_failed_attempt_and_a_released_one_leave_an_open_effect_unknown(database: Database) -> None:
    """F7: a failure of the handler says nothing about the provider."""
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        begun(conn, job.fence)
        assert fail(conn, job.fence, "handler_raised", final=True) == "blocked"
        given(conn, "op-2")
        job = claimed(conn, "op-2")
        begun(conn, job.fence)
        assert release(conn, job.fence) == "blocked"
        for operation in ("op-1", "op-2"):
            assert effect(conn, "state", operation) == "unknown" and show(conn, operation) == "blocked"


def test_cancel_keeps_effects_and_a_pending_one_turns_unknown_only_at_its_own_deadline(database: Database) -> None:
    """F9, F12: cancelled and unknown are shown side by side, and nothing fabricates an answer."""
    with database.connect(autocommit=True) as conn:
        given(conn, network_bound=30.0)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        cancel(conn, "t", "op-1", CLASS, actor="ann", reason="no more")
        claim(conn, "w", [CLASS], 1)
        assert (show(conn), effect(conn, "state")) == ("cancelled", "pending")
        age_effect(conn)
        claim(conn, "w", [CLASS], 1)
        assert (show(conn), effect(conn, "state"), effect(conn, "reason")) == (
            "cancelled",
            "unknown",
            "deadline_passed",
        )
        states = {(row[0], row[1]) for row in conn.execute("SELECT axis, state FROM fencepost.status")}
        assert {("job", "cancelled"), ("effect", "unknown")} <= states
        effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-1")
        assert (show(conn), effect(conn, "state")) == ("cancelled", "success")
        assert claim(conn, "w", [CLASS], 1) == []


def test_reconciling_applied_lets_the_job_finish_without_a_second_dispatch(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        unknown(conn)
        version = effect(conn, "version")
        assert applied(conn, version) == "resolved_applied"
        finish = claimed(conn)
        assert finish.mode == "finish" and again(conn, finish.fence) == effects.Recorded("r-1", None)
        publish(conn, finish.fence, lambda tx: save(tx))
        decisions = conn.execute("SELECT kind, actor, verdict, evidence_kind, evidence_ref FROM fencepost.decision")
        assert decisions.fetchall() == [("reconcile", "ann", "applied", "receipt_lookup", "provider/1")]


def test_reconciling_needs_evidence_the_version_looked_at_and_an_unknown_effect(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn)
        job = claimed(conn)
        attempt = begun(conn, job.fence)
        with pytest.raises(NotUnknown):
            applied(conn, 1)
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        wrong: list[tuple[type[Exception], dict[str, Any]]] = [
            (WrongVersion, {"version": 1}),
            (WrongVersion, {"version": None}),
            (EvidenceMissing, {"evidence_kind": "rumour"}),
            (EvidenceMissing, {"evidence_ref": ""}),
            (EvidenceMissing, {"receipt": None}),
            (InvalidInput, {"verdict": "perhaps"}),
            (InvalidInput, {"actor": ""}),
            (InvalidInput, {"reason": ""}),
        ]
        for kind, changes in wrong:
            with pytest.raises(kind):
                applied(conn, **({"version": 2} | changes))
        assert effect(conn, "state") == "unknown" and show(conn) == "blocked"
        with pytest.raises(NotUnknown):
            reconcile(
                conn,
                "t",
                "op-1",
                "nothing",
                version=1,
                verdict="applied",
                evidence_kind="operator",
                evidence_ref="x",
                receipt="r",
                actor="ann",
                reason="r",
            )
        assert applied(conn, 2) == "resolved_applied"
        with pytest.raises(NotUnknown):
            applied(conn, 3)


def test_not_applied_waits_until_the_call_can_no_longer_be_under_way(database: Database) -> None:
    """F11."""
    with database.connect(autocommit=True) as conn:
        unknown(conn, network_bound=60.0)
        with pytest.raises(NotQuiescent):
            not_applied(conn, 2)
        age_effect(conn)
        assert not_applied(conn, 2) == "resolved_not_applied"
        assert isinstance(again(conn, claimed(conn).fence), effects.Begun)


def test_an_attested_end_or_a_provider_key_needs_no_waiting(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        unknown(conn, network_bound=60.0)
        assert not_applied(conn, 2, evidence_kind="termination_attested") == "resolved_not_applied"
        job = claimed(conn)
        attempt = begun(conn, job.fence, kind="keyed")
        effects.record(conn, job.fence, "e1", attempt, "unknown")
        assert not_applied(conn, effect(conn, "version")) == "resolved_not_applied"


def test_a_receipt_against_not_applied_contradicts_it_and_blocks_the_job(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        job, attempt = unknown(conn)
        age_effect(conn)
        not_applied(conn, 2)
        assert show(conn) == "queued"
        for _ in range(2):
            assert effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-late") == "unknown"
        assert (show(conn), column(conn, "reason")) == ("blocked", "effect_contradicted")
        assert effect(conn, "contradicted") and effect(conn, "receipt") == "r-late"
        assert claim(conn, "w", [CLASS], 1) == [] and column(conn, "open_effects") == 1
        applied(conn, effect(conn, "version"), receipt="r-late")
        publish(conn, claimed(conn).fence, lambda tx: save(tx))


def test_a_contradiction_stops_the_attempt_that_runs_meanwhile(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        job, attempt = unknown(conn)
        age_effect(conn)
        not_applied(conn, 2)
        successor = claimed(conn)
        effects.record(conn, job.fence, "e1", attempt, "success", receipt="r-late")
        with pytest.raises(StaleFence):
            publish(conn, successor.fence, lambda tx: save(tx))
        with pytest.raises(StaleFence):
            again(conn, successor.fence)
        assert show(conn) == "blocked" and results(conn) == []


def test_a_begin_is_read_back_by_its_effect_attempt(database: Database) -> None:
    with two(database) as (auto, manual):
        given(auto)
        job = claimed(auto)
        attempt = uuid4()
        digest = effects.request_digest(b"bytes")
        effects.begin(manual, job.fence, "e1", kind="opaque", effect_attempt=attempt, digest=digest, timeout=5.0)
        reader = Background(database, lambda conn: effects.begun(conn, job.fence, "e1", attempt))
        waiting(auto, reader.pid)
        manual.commit()
        assert reader.outcome() == 1
        assert effects.begun(auto, job.fence, "e1", uuid4()) is None


def test_keys_and_digests_tell_effects_apart(database: Database) -> None:
    keys = {
        effects.idempotency_key(*parts)
        for parts in (("a", "b:c", "k"), ("a:b", "c", "k"), ("a", "b", "c:k"), ("A", "b", "c:k"), ("a", "b", "ck"))
    }
    assert len(keys) == 5
    assert effects.idempotency_key("a", "b", "c") == effects.idempotency_key("a", "b", "c")
    assert effects.request_digest({"a": 1, "b": 2}) == effects.request_digest({"b": 2, "a": 1})
    assert effects.request_digest({"a": 1}) != effects.request_digest({"a": "1"})
    with pytest.raises(InvalidInput) as refused:
        effects.request_digest({"price": 1.5})
    assert refused.value.field == "request.price"


def test_the_reconcile_command_quotes_what_a_shell_would_read(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        given(conn, "o p; $(x)")
        f = claimed(conn, "o p; $(x)").fence
    line = effects.reconcile_command(f, "e'1", 3, "r 1")
    assert line.startswith("fencepost effects reconcile --tenant t --operation 'o p; $(x)' --effect 'e'\"'\"'1'")
    assert "--version 3" in line and line.endswith("--receipt 'r 1'")
