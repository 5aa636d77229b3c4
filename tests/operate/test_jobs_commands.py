"""`fencepost jobs list|show|retry|cancel|schedules`: found by how they stand, told in full, moved one by one or in bulk."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import complete
from fencepost.jobs.periodic import Periodic
from fencepost.jobs.schedule import define
from fencepost.jobs.stage import stage
from fencepost.jobs.submit import submit
from fencepost.operate import job_views
from fencepost.operate.job_views import Filter, StateName
from fencepost.schemas.identity import as_class
from support.command_line import Fencepost, Result
from support.database import Database
from support.jobs import Conn, begun, expire

CLASS = "report.make"
SECRET = "secret-content"
WHY = ("--reason-text", "looked at it", "--actor", "ann")


def job(conn: Conn, operation: str, *, tenant: str = "acme", job_class: str = CLASS) -> None:
    with conn.transaction():
        register_class(conn, JobClassPolicy(as_class(job_class), max_attempts=2, backoff_base=0, backoff_max=0))
        submit(conn, job_class, tenant=tenant, operation=operation, args={"text": SECRET})


def failed(conn: Conn, operation: str, reason: str = "not_retried", **of: Any) -> None:
    """A job that is poison for this reason."""
    job(conn, operation, **of)
    (one,) = claim(conn, "worker-1", [of.get("job_class", CLASS)], 1)
    assert (one.operation, fail(conn, one.fence, reason, detail="ValueError", final=True)) == (operation, "poison")


@pytest.fixture
def shop(database18: Database) -> Database:
    """One job in every state that a job can be in without an authority's help, and two effects that are unknown."""
    with database18.connect(autocommit=True) as conn:
        failed(conn, "poison")
        failed(conn, "poison-other", "unusable", tenant="other", job_class="report.other")
        for operation, cancelled in (("blocked", False), ("cancelled", True)):
            job(conn, operation)
            (one,) = claim(conn, "worker-1", [CLASS], 1)
            attempt = begun(conn, one.fence)
            effects.record(conn, one.fence, "e1", attempt, "unknown", reason="timeout")
            if cancelled:
                cancel(conn, "acme", operation, CLASS, actor="ann", reason="not needed")
        job(conn, "done")
        (one,) = claim(conn, "worker-1", [CLASS], 1)
        complete(conn, one.fence)
        job(conn, "running")
        assert len(claim(conn, "worker-1", [CLASS], 1)) == 1
        job(conn, "queued")
        job(conn, "held", tenant="rotated")
        conn.execute("INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('rotated', 1000)")
        conn.execute(
            "UPDATE fencepost.effect SET unknown_since = unknown_since - interval '3 hours', assignee = 'payments-ops'"
        )
    return database18


def operations(done: Result) -> set[str]:
    """Which jobs a command listed or moved."""
    assert done.code == 0, done.err
    found: dict[str, Any] | list[dict[str, Any]] = json.loads(done.out)
    rows: list[dict[str, Any]] = found["jobs"] if isinstance(found, dict) else found
    return {row["operation"] for row in rows}


STATES = {
    "poison": {"poison", "poison-other"},
    "blocked": {"blocked"},
    "cancelled": {"cancelled"},
    "done": {"done"},
    "running": {"running"},
    "queued": {"queued"},
    "held": {"held"},
    "waiting": set[str](),
}


def test_jobs_are_listed_by_state_class_tenant_reason_and_age_without_payloads(
    shop: Database, fencepost: Fencepost
) -> None:
    def listed(*more: str) -> set[str]:
        return operations(fencepost(shop, "jobs", "list", "--json", *more))

    assert {state: listed("--state", state) for state in STATES} == STATES
    everything = set[str]().union(*STATES.values())
    assert listed() == everything - {"done"} and listed("--all") == everything
    assert listed("--state", "poison", "--state", "done") == {"poison", "poison-other", "done"}
    assert listed("--tenant", "other") == {"poison-other"}
    assert listed("--class", CLASS, "--state", "poison") == {"poison"}
    assert listed("--operation", "running") == {"running"}
    assert listed("--reason", "not_retried") == {"poison"} and listed("--reason", "nothing") == set()
    with shop.connect(autocommit=True) as conn:
        for table, column in (("job_hold", "since"), ("job", "changed_at")):
            conn.execute(
                f"UPDATE fencepost.{table} SET {column} = {column} - interval '2 hours'"
                " WHERE operation IN ('poison', 'queued')".encode()
            )
    assert listed("--older-than", "1h") == {"poison", "queued"} and listed("--older-than", "3h") == set()
    shown = fencepost(shop, "jobs", "list", "--all", "--limit", "3")
    assert len(shown.out.splitlines()) == 5 and shown.out.splitlines()[2].split()[1] in {"poison", "queued"}
    assert SECRET not in fencepost(shop, "jobs", "list", "--all").out


def test_execution_and_effects_are_told_side_by_side(shop: Database, fencepost: Fencepost) -> None:
    status = {row["operation"]: row["status"] for row in json.loads(fencepost(shop, "jobs", "list", "--json").out)}
    assert status["cancelled"] == "cancelled + 1 effect unknown (3 h, owner payments-ops)"
    assert status["blocked"] == "blocked + 1 effect unknown (3 h, owner payments-ops)"
    assert (status["poison"], status["held"]) == ("poison", "held")
    assert "cancelled + 1 effect unknown (3 h, owner payments-ops)" in fencepost(shop, "jobs", "list").out
    pending = {"state": "running", "unknown": 2, "pending": 1, "effect_age": timedelta(minutes=5), "assignee": "ops"}
    assert job_views.standing(pending) == "running + 2 effects unknown (5 min, owner ops) + 1 effect pending"


def test_one_job_is_shown_with_every_attempt_and_what_else_happened(database18: Database, fencepost: Fencepost) -> None:
    which = ("--tenant", "acme", "--operation", "op", "--class", CLASS)
    with database18.connect(autocommit=True) as conn:
        job(conn, "op")
        (one,) = claim(conn, "worker-1", [CLASS], 1)
        with conn.transaction():
            stage(conn, one.fence, {"text": SECRET})
        assert fail(conn, one.fence, "handler_raised", detail="OSError", delay=timedelta(0)) == "queued"
        claim(conn, "worker-2", [CLASS], 1)
        expire(conn, "op")
        assert claim(conn, "worker-2", [CLASS], 1) == []
        done = fencepost(database18, "jobs", "retry", *which, *WHY)
        assert (done.code, done.out) == (0, f"{CLASS} of operation op: queued\n")
        claim(conn, "worker-3", [CLASS], 1)

    shown = json.loads(fencepost(database18, "jobs", "show", *which, "--json").out)
    assert (shown["status"], shown["attempts"], shown["staged"]) == ("running", 1, 1)
    assert [(a["owner"], a["became"], a["reason"], a["detail"]) for a in shown["attempted"]] == [
        ("worker-1", "queued", "handler_raised", "OSError"),
        ("worker-2", "poison", "attempts_exhausted", "lease_expired"),
        ("worker-3", "running", None, None),
    ]
    assert [(h["what"], h["reason"], h["detail"]) for h in shown["history"]] == [
        ("running -> queued", "handler_raised", "OSError"),
        ("running -> poison", "attempts_exhausted", "lease_expired"),
        ("poison -> queued", "requeued", "looked at it"),
        ("decision: requeue", "queued", "looked at it"),
    ]
    assert shown["history"][-1]["by"] == "ann"
    plain = fencepost(database18, "jobs", "show", *which).out
    assert "worker-2" in plain and SECRET not in plain + json.dumps(shown)


def test_poison_is_retried_in_bulk_with_a_fresh_budget_and_each_is_a_decision(
    shop: Database, fencepost: Fencepost
) -> None:
    with shop.connect(autocommit=True) as conn:
        # The most urgent is claimed first.
        conn.execute("UPDATE fencepost.job SET priority = -1 WHERE operation IN ('queued', 'held')")
        for number in range(4):
            failed(conn, f"bulk-{number}", "unusable")
    retry = ("jobs", "retry", *WHY, "--json")
    tried = fencepost(shop, *retry, "--class", CLASS, "--reason", "unusable", "--dry-run")
    assert operations(tried) == {f"bulk-{n}" for n in range(4)} and json.loads(tried.out)["dry_run"] is True
    assert operations(fencepost(shop, "jobs", "list", "--state", "poison", "--class", CLASS, "--json")) == {
        *(f"bulk-{n}" for n in range(4)),
        "poison",
    }
    some = fencepost(shop, *retry, "--class", CLASS, "--reason", "unusable", "--limit", "3")
    assert len(operations(some)) == 3 and "stopped at 3 jobs" in some.err
    assert len(operations(fencepost(shop, *retry, "--class", CLASS, "--reason", "unusable"))) == 1
    assert operations(fencepost(shop, *retry, "--class", CLASS, "--reason", "unusable")) == set()
    with shop.connect(autocommit=True) as conn:
        assert conn.execute(
            "SELECT count(*), min(actor), min(reason) FROM fencepost.decision WHERE kind = 'requeue'"
        ).fetchone() == (4, "ann", "looked at it")
        assert conn.execute(
            "SELECT DISTINCT exec, attempts FROM fencepost.job WHERE operation LIKE 'bulk-%'"
        ).fetchall() == [("queued", 0)]
    # Nothing is moved without a word about which.
    assert fencepost(shop, *retry).code == 2
    assert fencepost(shop, *retry, "--state", "running", "--all").code == 2
    assert operations(fencepost(shop, *retry, "--all")) == {"poison", "poison-other"}


def test_what_may_not_be_moved_is_refused_by_itself_and_the_others_are_moved(
    shop: Database, fencepost: Fencepost
) -> None:
    # One of the two cancelled jobs has an open effect.
    with shop.connect(autocommit=True) as conn:
        job(conn, "cancelled-too")
        cancel(conn, "acme", "cancelled-too", CLASS, actor="ann", reason="not needed")
    done = fencepost(shop, "jobs", "retry", *WHY, "--state", "cancelled", "--all", "--json")
    assert done.code == 4
    results = {row["operation"]: row["result"] for row in json.loads(done.out)["jobs"]}
    assert results["cancelled-too"] == "queued" and "[effect]" in results["cancelled"]

    living = operations(fencepost(shop, "jobs", "cancel", *WHY, "--tenant", "acme", "--dry-run", "--json"))
    assert living == {"poison", "blocked", "running", "queued", "cancelled-too"}
    ended = fencepost(shop, "jobs", "cancel", *WHY, "--class", CLASS, "--state", "queued", "--state", "held", "--json")
    assert operations(ended) == {"queued", "held", "cancelled-too"}
    named = ("--tenant", "acme", "--operation", "done", "--class", CLASS)
    late = fencepost(shop, "jobs", "cancel", *WHY, *named)
    assert (late.code, late.out) == (1, f"{CLASS} of operation done: too_late\n")


MANY = """
WITH a AS (SELECT n, gen_random_uuid() AS attempt FROM generate_series(1, %(n)s) AS n)
INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, run_at, exec, done_attempt)
SELECT 't' || n %% 10, 'done-' || n, 'report.make', '\\x7b7d', decode(repeat('00', 33), 'hex'), decode(repeat('00', 33), 'hex'),
       1, 1, clock_timestamp(), 'done', a.attempt FROM a"""
READ = """
SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables
WHERE schemaname = 'fencepost'"""


@contextmanager
def counted(conn: Conn) -> Generator[list[int]]:
    """How many rows of our tables were read meanwhile, by whatever plan."""
    read: list[int] = []
    with conn.transaction(force_rollback=True):
        before = conn.execute(READ).fetchone()
        yield read
        after = conn.execute(READ).fetchone()
    assert before is not None and after is not None
    read.append(after[0] - (before[0] or 0))


def test_what_stands_still_is_found_among_many_that_are_done_by_reading_few_rows(shop: Database) -> None:
    """Rows read, by PostgreSQL's own count: the same however many jobs are done."""
    many = 30_000
    with shop.connect(autocommit=True) as conn:
        conn.execute(MANY, {"n": many})
        conn.execute("ANALYZE fencepost.job")
        costs: dict[str, int] = {}
        for name, which in {
            "open": Filter(tuple(state for state in StateName if state is not StateName.DONE)),
            "poison": Filter((StateName.POISON,), reason="not_retried"),
            "queued": Filter((StateName.QUEUED,), job_class=CLASS),
            "done": Filter((StateName.DONE,)),
        }.items():
            with counted(conn) as read:
                rows, cut = job_views.find(conn, which, 100)
                assert rows and not cut
            costs[name] = read[0]
        assert max(costs["open"], costs["poison"], costs["queued"]) < 300, costs
        assert costs["done"] >= many, f"the control, which looks at every job: {costs}"


def test_looking_has_a_limit_and_says_so(shop: Database, fencepost: Fencepost, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fencepost(shop, "jobs", "list", "--state", "done").err == ""
    monkeypatch.setattr("fencepost.operate.job_views.LOOKED_MAX", 3)
    looked = fencepost(shop, "jobs", "list", "--state", "done")
    assert looked.code == 0 and "not all were looked at" in looked.line
    assert fencepost(shop, "jobs", "list", "--state", "poison").err == ""


def test_holds_follow_the_jobs_whatever_moves_them(shop: Database) -> None:
    """Compared with the jobs themselves, before and after each is moved."""
    differ = """SELECT count(*) FROM fencepost.job AS j FULL JOIN fencepost.job_hold AS h USING (tenant, operation, class)
                WHERE coalesce(j.exec, '') NOT IN ('queued', 'running', 'done') AND h.state IS DISTINCT FROM j.exec
                   OR h.state IS NOT NULL AND j.exec IN ('queued', 'running', 'done')"""
    with shop.connect(autocommit=True) as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.job_hold").fetchone() == (4,)
        for statement in (
            "SELECT",
            "SELECT fencepost.cancel('acme', 'poison', 'report.make', 'ann', 'why')",
            "SELECT fencepost.requeue('acme', 'poison', 'report.make', 'ann', 'why')",
            "SELECT fencepost.cancel('acme', 'queued', 'report.make', 'ann', 'why')",
            "SELECT fencepost.cancel('acme', 'running', 'report.make', 'ann', 'why')",
        ):
            conn.execute(statement.encode())
            assert conn.execute(differ).fetchone() == (0,), statement
        conn.execute("DELETE FROM fencepost.job_hold WHERE operation = 'blocked'")
        assert conn.execute(differ).fetchone() == (1,), "the control"


def test_status_counts_every_state_with_its_age_and_reason(shop: Database, fencepost: Fencepost) -> None:
    found = json.loads(fencepost(shop, "status", "--json").out)["states"]
    jobs = {(s["state"], s["tenant"], s["kind"], s["reason"]): s["count"] for s in found if s["axis"] == "job"}
    assert jobs[("poison", "acme", CLASS, "not_retried")] == 1 == jobs[("poison", "other", "report.other", "unusable")]
    assert {state for state, *_ in jobs} >= {"poison", "blocked", "cancelled", "done", "running", "queued"}
    assert all(s["age_seconds"] >= 0 for s in found) and SECRET not in json.dumps(found)


def test_schedules_are_listed_and_removed_and_doctor_tells_what_is_late(
    database18: Database, fencepost: Fencepost
) -> None:
    def told() -> tuple[str, str]:
        findings = json.loads(fencepost(database18, "doctor", "--json").out)
        (found,) = [f for f in findings if f["check"] == "schedules"]
        return found["level"], found["message"]

    assert fencepost(database18, "jobs", "schedules", "list").out == "schedules: none\n"
    assert told() == ("ok", "no schedules")
    daily = define(
        "report.daily",
        as_class(CLASS),
        tenant="acme",
        cron="0 3 * * *",
        every=None,
        time_zone="Europe/Berlin",
        args={"text": SECRET},
        missed="last",
        grace=60.0,
    )
    with database18.connect(autocommit=True) as conn:
        Periodic(database18.dsn, "worker-1", [daily, replace(daily, name="report.late")]).turn(conn)
        assert told() == ("ok", "2 schedules on time")
        conn.execute(
            "UPDATE fencepost.schedule SET next_at = next_at - interval '3 days', position = position - interval '4 days'"
            " WHERE schedule = 'report.late'"
        )
        listed = json.loads(fencepost(database18, "jobs", "schedules", "list", "--json").out)
        assert [(s["schedule"], s["timetable"], s["tenant"], s["late"] is not None) for s in listed] == [
            ("report.daily", "0 3 * * * Europe/Berlin", "acme", False),
            ("report.late", "0 3 * * * Europe/Berlin", "acme", True),
        ]
        assert told()[0] == "warn" and told()[1].startswith("1 of 2 schedules are overdue")
        remove = ("jobs", "schedules", "remove", "report.late", "--reason-text", "moved")
        refused = fencepost(database18, *remove)
        assert refused.code == 1 and "[seen_at]" in refused.line
        conn.execute("UPDATE fencepost.schedule SET seen_at = seen_at - interval '3 minutes'")
        assert fencepost(database18, *remove).out == "schedule report.late is removed\n"
        assert told()[1].startswith("no worker runs 1 of 1 schedules")
        assert SECRET not in fencepost(database18, "jobs", "schedules", "list").out
