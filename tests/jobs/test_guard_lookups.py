"""Unknown effects, each by its own name: who is asked about, who escalates, and who waits for whom."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from fencepost.jobs import effects, lookup
from fencepost.jobs.claim import claim
from fencepost.jobs.escalation import assign
from fencepost.jobs.lookup import DidNotHappen, Landed, Taken
from fencepost.jobs.reconcile import reconcile
from fencepost.schemas.errors import NotArmed, NotUnknown, StaleEffectAttempt
from support.database import Database
from support.jobs import CLASS, Background, Conn, begun, given, two, waiting

OTHER = "another.class"
# Same tenant, operation or key, each with one part that differs.
NAMES = (("t", "op-1", "e1"), ("u", "op-1", "e1"), ("t", "op-2", "e1"), ("t", "op-1", "e2"))
ONE, *NAMESAKES = NAMES
BY: dict[str, Any] = {"actor": "ann", "reason": "looked"}


def unknown(conn: Conn, *names: tuple[str, str, str], kind: effects.Kind = "lookup") -> None:
    """An unknown effect of each name, each job with what it has."""
    for tenant, operation in dict.fromkeys((tenant, operation) for tenant, operation, _ in names):
        given(conn, operation, tenant=tenant, policy="resumable", network_bound=60.0)
        (job,) = claim(conn, "w", [CLASS], 1)
        assert (job.tenant, job.operation) == (tenant, operation)
        keys = [name[2] for name in names if name[:2] == (tenant, operation)]
        attempts = {key: begun(conn, job.fence, key, kind=kind) for key in keys}
        # The others are unknown with it: the job is taken from whoever ran it.
        effects.record(conn, job.fence, keys[0], attempts[keys[0]], "unknown", reason="timeout")


def take(conn: Conn, by: UUID | None = None, limit: int = 10) -> list[Taken]:
    return lookup.take(conn, [CLASS], by or uuid4(), limit=limit, lease=60.0, patience=1.0)


def named(taken: list[Taken]) -> list[tuple[str, str, str]]:
    return [(str(t.asked.tenant), str(t.asked.operation), str(t.asked.effect_key)) for t in taken]


def rows(conn: Conn, columns: str, table: str = "effect") -> dict[tuple[str, str, str], Any]:
    found = conn.execute(f"SELECT tenant, operation, effect_key, {columns} FROM fencepost.{table}".encode())
    return {(row[0], row[1], row[2]): row[3:] for row in found.fetchall()}


def at(conn: Conn, name: tuple[str, str, str], change: str, table: str = "effect") -> None:
    """Changes one row behind everybody's back."""
    conn.execute(
        f"UPDATE fencepost.{table} SET {change} WHERE (tenant, operation, effect_key) = (%s, %s, %s)".encode(), name
    )


@pytest.mark.parametrize("namesake", NAMESAKES)
def test_a_question_about_one_effect_is_none_about_its_namesake(
    database18: Database, namesake: tuple[str, str, str]
) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        assert named(take(conn)) == [ONE]
        if namesake[:2] == ONE[:2]:
            conn.execute(
                "INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt,"
                " dispatch_deadline, quiescent_at) SELECT tenant, operation, 'e2', class, kind, state, gen_random_uuid(),"
                " dispatch_deadline, quiescent_at FROM fencepost.effect"
            )
        else:
            unknown(conn, namesake)
        assert named(take(conn)) == [namesake]
        assert take(conn) == []


def test_a_begin_in_a_journal_is_about_its_own_effect_and_about_another_attempt_of_it(database18: Database) -> None:
    """The effect, and one that has the begin."""
    event = (
        "INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, reason, version)"
        " SELECT %s, %s, %s, %s, 'unknown', 'unknown', %s, 1"
    )
    with database18.connect(autocommit=True) as conn:
        unknown(conn, *NAMES)
        attempts = rows(conn, "effect_attempt")
        conn.execute(event, (*ONE, attempts[ONE][0], "journalled_begin"))
        conn.execute(event, (*ONE, uuid4(), "begun_before"))
        for name in NAMESAKES:
            conn.execute(event, (*name, uuid4(), "journalled_begin"))
        assert named(take(conn)) == [ONE]
        # A provider that knows all begins under one key is asked all the same.
        conn.execute("UPDATE fencepost.effect SET kind = 'keyed'")
        assert sorted(named(take(conn))) == sorted(NAMESAKES)


def test_who_asks_at_the_same_moment_waits_and_asks_nothing_twice(database18: Database) -> None:
    with two(database18) as (auto, manual):
        unknown(auto, ONE)
        assert named(take(manual)) == [ONE]
        late = Background(database18, take)
        waiting(auto, late.pid)
        manual.commit()
        assert late.outcome() == []


@pytest.mark.parametrize("namesake", NAMESAKES)
def test_an_answer_to_a_question_that_another_has_taken_over_settles_nothing(
    database18: Database, namesake: tuple[str, str, str]
) -> None:
    """Both were taken under one name, and the namesake's still is."""
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE, namesake)
        by = uuid4()
        taken = {name: t for t in take(conn, by) for name in named([t])}
        at(conn, ONE, f"taken_by = '{uuid4()}'", "lookup")
        landed = Landed("r", "provider/1")
        with pytest.raises(StaleEffectAttempt):
            lookup.settle(conn, taken[ONE], landed, decision_id=uuid4(), actor="w")
        assert not lookup.defer(conn, taken[ONE], "none", 1.0)
        assert rows(conn, "answer", "lookup")[ONE] == rows(conn, "answer", "lookup")[namesake] == (None,)
        assert lookup.defer(conn, taken[namesake], "none", 1.0)
        at(conn, ONE, f"taken_by = '{by}'", "lookup")
        assert lookup.settle(conn, taken[ONE], landed, decision_id=uuid4(), actor="w") == "resolved_applied"
        assert rows(conn, "answer", "lookup") == {ONE: ("applied",), namesake: ("none",)}


@pytest.mark.parametrize("of", NAMES)
def test_a_negative_answer_waits_for_the_quiescence_of_its_own_effect(
    database18: Database, of: tuple[str, str, str]
) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, *NAMES)
        at(conn, of, "dispatch_deadline = now() - interval '2 s', quiescent_at = now() - interval '1 s'")
        taken = {name: t for t in take(conn) for name in named([t])}
        settled = lookup.settle(conn, taken[of], DidNotHappen("provider/1"), decision_id=uuid4(), actor="w")
        assert settled == "resolved_not_applied"
        assert {name: state for name, (state,) in rows(conn, "state").items() if name != of} == {
            name: "unknown" for name in NAMES if name != of
        }


def test_an_effect_whose_begin_nobody_knows_is_asked_about_only_where_one_key_is_enough(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, *NAMES)
        at(conn, ONE, "effect_attempt = NULL")
        assert sorted(named(take(conn))) == sorted(NAMESAKES)
        at(conn, ONE, "kind = 'keyed'")
        assert named(take(conn)) == [ONE]


def test_questions_are_counted_for_each_version_and_a_quiescence_that_is_over_is_none(database18: Database) -> None:
    ask = "SELECT asks, quiescent_ms FROM fencepost.take_lookups(%s, gen_random_uuid(), 1, '1 min')"
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        for change, expected in (("", 1), ("", 2), ("version = version + 1", 1), ("", 2)):
            if change:
                at(conn, ONE, change)
            row = conn.execute(ask, ([CLASS],)).fetchone()
            assert row is not None and row[0] == expected and 0 < row[1] < 90_000
            at(conn, ONE, "due_at = now() - interval '1 s'", "lookup")
        at(conn, ONE, "dispatch_deadline = now() - interval '2 s', quiescent_at = now() - interval '1 s'")
        assert conn.execute(ask, ([CLASS],)).fetchone() == (3, 0)


def test_an_answer_is_not_written_over_the_question_of_who_took_it_over_meanwhile(database18: Database) -> None:
    with two(database18) as (auto, manual):
        unknown(auto, ONE)
        (taken,) = take(auto)
        manual.execute("SELECT FROM fencepost.job FOR UPDATE")
        settling = Background(
            database18,
            lambda conn: lookup.settle(conn, taken, Landed("r", "provider/1"), decision_id=uuid4(), actor="w"),
        )
        waiting(auto, settling.pid)
        at(auto, ONE, f"taken_by = '{uuid4()}'", "lookup")
        manual.rollback()
        assert settling.outcome() == "resolved_applied"
        assert rows(auto, "answer", "lookup") == {ONE: (None,)}


def test_a_pending_effect_of_a_running_job_does_not_expire_for_a_namesake_that_rests(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        (job,) = claim(conn, "w", [CLASS], 1)
        begun(conn, job.fence)
        at(conn, ONE, "dispatch_deadline = now() - interval '2 s', quiescent_at = now() - interval '1 s'")
        given(conn, job_class=OTHER)
        given(conn, tenant="u")
        given(conn, "op-2")
        expired = "SELECT fencepost._expire_effects(ARRAY[%s, %s], 10)"
        assert conn.execute(expired, (CLASS, OTHER)).fetchone() == (0,)
        assert rows(conn, "state") == {ONE: ("pending",)}
        # What is unknown already is not counted once more.
        at(conn, ONE, "state = 'unknown'")
        conn.execute(
            "UPDATE fencepost.job SET exec = 'blocked', attempt = NULL, owner = NULL, lease_until = NULL WHERE attempt IS NOT NULL"
        )
        assert conn.execute(expired, (CLASS, OTHER)).fetchone() == (0,)
        at(conn, ONE, "state = 'pending'")
        conn.execute(
            "UPDATE fencepost.job SET exec = 'cancelled', attempt = NULL, owner = NULL, lease_until = NULL WHERE class = %s",
            (CLASS,),
        )
        assert conn.execute(expired, (CLASS, OTHER)).fetchone() == (1,)


def test_an_outcome_leaves_a_running_job_as_it_is_but_for_its_count(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        (job,) = claim(conn, "w", [CLASS], 1)
        attempt = begun(conn, job.fence)
        look = "SELECT run_at, reason, exec, generation, open_effects FROM fencepost.job"
        before = conn.execute(look).fetchone()
        effects.record(conn, job.fence, "e1", attempt, "success", receipt="r")
        assert before is not None and conn.execute(look).fetchone() == (*before[:4], 0)


def record(conn: Conn, name: tuple[str, str, str], attempt: UUID, receipt: str = "r") -> str:
    """A success, as a client of any kind may say it."""
    row = conn.execute(
        "SELECT fencepost.record_effect(%s, %s, %s, %s, 'success', %s, NULL, NULL)", (*name, attempt, receipt)
    ).fetchone()
    assert row is not None
    return str(row[0])


def test_a_receipt_belongs_to_a_begin_of_its_own_effect(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, *NAMES)
        attempts = {name: attempt for name, (attempt,) in rows(conn, "effect_attempt").items()}
        for namesake in NAMESAKES:
            with pytest.raises(StaleEffectAttempt):
                record(conn, ONE, attempts[namesake])
        at(conn, ONE, f"effect_attempt = '{uuid4()}', version = version + 1")
        assert record(conn, ONE, attempts[ONE]) == "superseded"
        assert {name for name, (flag,) in rows(conn, "contradicted").items() if flag} == {ONE}
        assert record(conn, NAMES[1], attempts[NAMES[1]]) == "success"


def test_nothing_is_forgotten_of_an_effect_that_is_not_pending(database18: Database) -> None:
    count = "SELECT count(*) FROM fencepost.effect_event"
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        before = conn.execute(count).fetchone()
        conn.execute("SELECT fencepost._forget('t', 'op-1', 'e1', 'deadline_passed')")
        assert conn.execute(count).fetchone() == before
        conn.execute("ALTER TABLE fencepost.effect DISABLE TRIGGER USER")
        try:
            at(conn, ONE, "state = 'pending', unknown_since = NULL")
        finally:
            conn.execute("ALTER TABLE fencepost.effect ENABLE TRIGGER USER")
        conn.execute("SELECT fencepost._forget('t', 'op-1', 'e1', 'deadline_passed')")
        assert before is not None and conn.execute(count).fetchone() == (before[0] + 1,)


def test_another_receipt_of_an_effect_that_happened_is_kept_beside_the_first(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        ((attempt,),) = rows(conn, "effect_attempt").values()
        for receipt in ("r-1", "r-1", "r-2"):
            assert record(conn, ONE, attempt, receipt) == "success"
        assert rows(conn, "receipt") == {ONE: ("r-1",)}
        kept = conn.execute("SELECT receipt FROM fencepost.effect_event WHERE reason = 'another_receipt'").fetchall()
        assert kept == [("r-2",)]


@pytest.mark.parametrize("state", ["unknown", "success", "resolved_applied"])
def test_a_begin_of_a_journal_changes_no_effect_that_happened_or_may_have(database18: Database, state: str) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        if state == "success":
            record(conn, ONE, rows(conn, "effect_attempt")[ONE][0])
        elif state == "resolved_applied":
            (taken,) = take(conn)
            lookup.settle(conn, taken, Landed("r", "provider/1"), decision_id=uuid4(), actor="w")
        assert conn.execute(PRESENT, {"c": CLASS, "e": uuid4(), "a": uuid4()}).fetchone() == ("superseded",)
        assert rows(conn, "state") == {ONE: (state,)}


def test_an_outcome_that_unblocks_a_job_queues_it_now_and_says_so(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, ONE)
        conn.execute("UPDATE fencepost.job SET run_at = now() - interval '1 h'")
        record(conn, ONE, rows(conn, "effect_attempt")[ONE][0])
        look = "SELECT exec, reason, run_at > now() - interval '1 min' FROM fencepost.job"
        assert conn.execute(look).fetchone() == ("queued", "effect_settled", True)


def test_an_unknown_outcome_of_another_attempts_begin_takes_nothing_from_who_runs(database18: Database) -> None:
    """As after somebody wrote to the tables himself."""
    said = "SELECT fencepost.record_effect('t', 'op-1', 'e1', %s, 'unknown', NULL, NULL, 'timeout')"
    with database18.connect(autocommit=True) as conn:
        given(conn)
        (job,) = claim(conn, "w", [CLASS], 1)
        attempt = begun(conn, job.fence)
        at(conn, ONE, f"begun_by = '{uuid4()}'")
        assert conn.execute(said, (attempt,)).fetchone() == ("unknown",)
        assert conn.execute("SELECT exec FROM fencepost.job").fetchone() == ("running",)


PRESENT = "SELECT fencepost.present_begin('t', 'op-1', %(c)s, 'e1', 'lookup', %(e)s, %(a)s, sha256('x'))"


def presented(conn: Conn, key: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
    return conn.execute(PRESENT.replace("'e1'", f"'{key}'").encode(), values).fetchone()


def test_a_begin_that_may_still_commit_is_waited_for_and_then_known(database18: Database) -> None:
    for commits, verdict in ((False, "unknown"), (True, "known")):
        with two(database18) as (auto, manual):
            auto.execute(
                "UPDATE fencepost.job SET exec = 'cancelled', attempt = NULL, owner = NULL, lease_until = NULL"
            )
            given(auto, "op-1", job_class=(name := f"class.{verdict}"))
            (job,) = claim(auto, "w", [name], 1)
            key = f"of-{verdict}"
            attempt = begun(manual, job.fence, key)
            values = {"c": name, "e": attempt, "a": job.fence.attempt}
            late = Background(database18, partial(presented, key=key, values=values))
            waiting(auto, late.pid)
            manual.commit() if commits else manual.rollback()
            assert late.outcome() == (verdict,)


def test_a_begin_of_a_journal_blocks_its_own_job_and_shortens_no_quiescence(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        for tenant, operation, job_class in (
            ("t", "op-1", CLASS),
            ("u", "op-1", CLASS),
            ("t", "op-2", CLASS),
            ("t", "op-1", OTHER),
        ):
            given(conn, operation, tenant=tenant, job_class=job_class)
        conn.execute(
            "INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by,"
            " request_digest, dispatch_deadline, quiescent_at) VALUES ('t', 'op-1', 'e1', %s, 'lookup', 'failed_before_dispatch',"
            " gen_random_uuid(), gen_random_uuid(), sha256('x'), now() - interval '1 d', now() + interval '1 d')",
            (CLASS,),
        )
        assert conn.execute(PRESENT, {"c": CLASS, "e": uuid4(), "a": uuid4()}).fetchone() == ("unknown",)
        row = conn.execute("SELECT quiescent_at > now() + interval '23 h' FROM fencepost.effect").fetchone()
        assert row == (True,)
        states = conn.execute("SELECT tenant, operation, class, exec FROM fencepost.job").fetchall()
        assert {row[:3] for row in states if row[3] == "blocked"} == {("t", "op-1", CLASS)}
        assert len([row for row in states if row[3] == "queued"]) == 3
        # And what was quiescent is so no longer: a call of this begin may be under way.
        at(conn, ONE, "state = 'failed_before_dispatch', quiescent_at = now() - interval '1 h', reason = NULL")
        assert conn.execute(PRESENT, {"c": CLASS, "e": uuid4(), "a": uuid4()}).fetchone() == ("unknown",)
        assert conn.execute("SELECT quiescent_at > now() - interval '1 min' FROM fencepost.effect").fetchone() == (
            True,
        )


def test_each_effect_escalates_alone(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        unknown(conn, *NAMES)
        conn.execute(
            "UPDATE fencepost.job_class SET escalate_after = '{1 h}', escalate_severity = '{high}', escalate_to = '{boss}'"
        )
        at(conn, ONE, "unknown_since = now() - interval '2 h'")
        assert conn.execute("SELECT fencepost.escalate_effects(10)").fetchone() == (1,)
        severities = rows(conn, "severity")
        assert severities == {name: ("normal",) for name in NAMESAKES} | {ONE: ("high",)}


def test_what_is_not_due_takes_nobodys_place_when_effects_escalate(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, "old", job_class=OTHER)
        unknown(conn, ONE)
        conn.execute(
            "INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt, dispatch_deadline,"
            " quiescent_at) VALUES ('t', 'old', 'e1', %s, 'opaque', 'unknown', gen_random_uuid(), now(), now())",
            (OTHER,),
        )
        conn.execute(
            "UPDATE fencepost.job_class SET escalate_after = '{1 h}', escalate_severity = '{high}', escalate_to = '{boss}'"
        )
        conn.execute("UPDATE fencepost.job_class SET escalate_after = '{9 d}' WHERE class = %s", (OTHER,))
        conn.execute("UPDATE fencepost.effect SET unknown_since = now() - interval '2 h'")
        at(conn, ("t", "old", "e1"), "unknown_since = now() - interval '1 d'")
        assert conn.execute("SELECT fencepost.escalate_effects(1)").fetchone() == (1,)
        assert rows(conn, "severity") == {ONE: ("high",), ("t", "old", "e1"): ("normal",)}


def test_nothing_escalates_in_a_database_that_is_not_armed(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        assert conn.execute("SELECT fencepost.escalate_effects(1)").fetchone() == (0,)
        conn.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            conn.execute("SELECT fencepost.escalate_effects(1)")


def test_what_is_settled_at_this_moment_is_given_to_nobody(database18: Database) -> None:
    with two(database18) as (auto, manual):
        unknown(auto, ONE)
        at(auto, ONE, "dispatch_deadline = now() - interval '2 s', quiescent_at = now() - interval '1 s'")
        version: int = rows(auto, "version")[ONE][0]
        assign(auto, *ONE, version=version, assignee="bob", **BY)
        reconcile(
            manual, *ONE, version=version, verdict="not_applied", evidence_kind="operator", evidence_ref="mail", **BY
        )
        late = Background(database18, lambda conn: assign(conn, *ONE, version=version, assignee="eve", **BY))
        waiting(auto, late.pid)
        manual.commit()
        with pytest.raises(NotUnknown):
            late.outcome()
        assert rows(auto, "assignee")[ONE] == ("bob",)
