"""`fencepost effects` and `fencepost jobs`: what is known, side by side, and the operator's acts with their refusals."""

import json
from dataclasses import dataclass
from hashlib import sha256
from uuid import uuid4

import pytest

from fencepost.jobs import effects, lookup
from fencepost.jobs.claim import Job, JobClassPolicy, claim, register_class
from fencepost.jobs.effects import Begun
from fencepost.jobs.escalation import escalate
from fencepost.jobs.submit import submit
from fencepost.schemas.identity import JobClass
from support.command_line import Fencepost
from support.database import Database

CLASS = "report.make"
WHICH = ("--tenant", "acme", "--operation", "op")
CONTENT = "secret-content"


@dataclass(frozen=True, slots=True)
class Work:
    """A job whose effect is unknown."""

    database: Database
    job: Job
    version: int

    def reconcile(self, *more: str, version: int | None = None) -> list[str]:
        """The arguments that settle it, but for what a test changes."""
        number = str(self.version if version is None else version)
        return ["effects", "reconcile", *WHICH, "--effect", "send", "--version", number, *more]


@pytest.fixture
def work(database: Database) -> Work:
    """One job with one effect that was begun and whose answer was lost."""
    with database.connect() as conn:
        register_class(conn, JobClassPolicy(JobClass(CLASS), network_bound=30))
        submit(conn, CLASS, tenant="acme", operation="op", args={"text": CONTENT})
    with database.connect() as conn:
        (job,) = claim(conn, "worker-1", [CLASS], 1)
    attempt = uuid4()
    with database.connect() as conn:
        digest = sha256(CONTENT.encode()).digest()
        begun = effects.begin(conn, job.fence, "send", kind="lookup", effect_attempt=attempt, digest=digest, timeout=20)
        assert isinstance(begun, Begun)
    with database.connect() as conn:
        effects.record(conn, job.fence, "send", attempt, "unknown", reason="timeout")
    return Work(database, job, begun.version + 1)


APPLIED = ("--verdict", "applied", "--receipt", "rcpt-1")
EVIDENCE = ("--evidence-kind", "receipt_lookup", "--evidence-ref", "https://provider.example/rcpt-1")


LIST = ("effects", "list", "--json")


def test_open_effects_are_found_by_whose_how_old_and_how_urgent_they_are(work: Work, fencepost: Fencepost) -> None:
    def found(*more: str) -> int:
        return len(json.loads(fencepost(work.database, *LIST, *more).out))

    with work.database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.effect SET unknown_since = unknown_since - interval '3 hours'")
        assert escalate(conn) == 1
    for mine, others in (
        (("--class", CLASS), ("--class", "report.other")),
        (("--assignee", "operator"), ("--assignee", "eve")),
        (("--severity", "high"), ("--severity", "critical")),
        (("--older-than", "2h"), ("--older-than", "4h")),
        (("--state", "unknown"), ("--state", "pending")),
        (("--tenant", "acme"), ("--tenant", "other")),
    ):
        assert (found(*mine), found(*others)) == (1, 0), mine
    assert fencepost(work.database, *LIST, "--older-than", "soon").code != 0
    shown = fencepost(work.database, "effects", "list").out
    assert "high" in shown and "operator" in shown and "3 h" in shown and CONTENT not in shown


def test_an_effect_is_assigned_once_for_a_decision_and_a_dry_run_changes_nothing(
    work: Work, fencepost: Fencepost
) -> None:
    decision = str(uuid4())
    give = ["effects", "assign", *WHICH, "--effect", "send", "--version", "2", "--assignee", "bob", "--reason", "shift"]
    named = [*give, "--decision-id", decision, "--actor", "ann"]

    tried = fencepost(work.database, *named, "--dry-run")
    assert (tried.code, tried.out.startswith("dry run, nothing was changed: ")) == (0, True)
    assert json.loads(fencepost(work.database, *LIST).out)[0]["assignee"] == "operator"
    for _ in range(2):
        done = fencepost(work.database, *named, "--severity", "critical", "--json")
        assert done.code == 0
        assert json.loads(done.out) == {
            "tenant": "acme",
            "operation": "op",
            "effect": "send",
            "assignee": "bob",
            "decision_id": decision,
            "dry_run": False,
        }
    refused = fencepost(work.database, *named)
    assert refused.code == 1 and "[decision_id]" in refused.line
    assert "[version]" in fencepost(work.database, *give, "--version", "1").line
    (row,) = json.loads(fencepost(work.database, *LIST).out)
    assert (row["assignee"], row["severity"], row["state"], row["version"]) == ("bob", "critical", "unknown", 2)
    shown = json.loads(fencepost(work.database, "effects", "show", *WHICH, "--effect", "send", "--json").out)
    assert [(d["kind"], d["verdict"], d["actor"], d["reason"]) for d in shown["decisions"]] == [
        ("assign", "bob, critical", "ann", "shift")
    ]
    assert [(h["reason"], h["assignee"], h["became"]) for h in shown["history"]][-1] == ("assigned", "bob", "unknown")


def test_a_reconciliation_can_be_tried_and_repeated_under_its_id(work: Work, fencepost: Fencepost) -> None:
    settle = work.reconcile(*APPLIED, *EVIDENCE, "--actor", "ann", "--decision-id", str(uuid4()))

    tried = fencepost(work.database, *settle, "--dry-run")
    assert tried.out == "dry run, nothing was changed: effect send of operation op is resolved_applied\n"
    assert len(json.loads(fencepost(work.database, *LIST).out)) == 1
    refused = fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE, "--dry-run", version=1))
    assert refused.code == 1 and "[version]" in refused.line
    for _ in range(2):
        assert fencepost(work.database, *settle).out == "effect send of operation op is resolved_applied\n"
    another = fencepost(work.database, *settle, "--reason", "another")
    assert another.code == 1 and "[decision_id]" in another.line

    shown = fencepost(work.database, "effects", "show", *WHICH, "--effect", "send")
    assert effects.idempotency_key("acme", "op", "send") in shown.out and CONTENT not in shown.out
    with work.database.connect(autocommit=True) as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.decision").fetchone() == (1,)


def test_doctor_tells_how_many_are_unknown_and_whether_somebody_escalates(work: Work, fencepost: Fencepost) -> None:
    def told() -> tuple[str, str]:
        findings = json.loads(fencepost(work.database, "doctor", "--json").out)
        (found,) = [f for f in findings if f["check"] == "effects"]
        return found["level"], found["message"]

    level, message = told()
    assert level == "warn" and message.startswith("unknown effects: 1 normal (oldest ")
    with work.database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.effect SET unknown_since = unknown_since - interval '3 hours'")
        level, message = told()
        assert level == "warn" and message.startswith("nobody escalates: 1 ")
        assert escalate(conn) == 1
    assert told()[1].startswith("unknown effects: 1 high (oldest 3 h)")
    assert fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE)).code == 0
    assert told() == ("ok", "no unknown effects")


def test_what_was_asked_about_an_effect_is_shown_with_it(work: Work, fencepost: Fencepost) -> None:
    show = ("effects", "show", *WHICH, "--effect", "send")
    assert json.loads(fencepost(work.database, *show, "--json").out)["look_up"] is None
    with work.database.connect(autocommit=True) as conn:
        (taken,) = lookup.take(conn, [CLASS], uuid4(), limit=1, lease=30.0, patience=5.0)
        lookup.defer(conn, taken, "provider_down", 60.0)
    look_up = json.loads(fencepost(work.database, *show, "--json").out)["look_up"]
    assert (look_up["asks"], look_up["answer"]) == (1, "provider_down")
    assert "provider_down" in fencepost(work.database, *show).out


def test_unknown_effect_is_listed_and_shown_with_the_command_that_settles_it(work: Work, fencepost: Fencepost) -> None:
    listed = json.loads(fencepost(work.database, "effects", "list", "--json").out)
    assert [(e["operation"], e["effect"], e["state"], e["version"]) for e in listed] == [("op", "send", "unknown", 2)]

    shown = fencepost(work.database, "effects", "show", *WHICH, "--effect", "send")
    assert shown.code == 0
    assert f"fencepost effects reconcile {' '.join(WHICH)} --effect send --version 2" in shown.out
    for output in (shown.out, fencepost(work.database, "effects", "list").out):
        assert CONTENT not in output
    assert fencepost(work.database, "effects", "list", "--tenant", "other").out == "effects: none\n"


def test_reconcile_settles_once_and_keeps_who_decided(work: Work, fencepost: Fencepost) -> None:
    settle = work.reconcile(*APPLIED, *EVIDENCE, "--actor", "ann", "--reason", "looked up")

    done = fencepost(work.database, *settle)
    assert (done.code, done.out) == (0, "effect send of operation op is resolved_applied\n")
    again = fencepost(work.database, *settle)
    assert again.code == 1 and "not unknown [state]" in again.line

    shown = json.loads(fencepost(work.database, "effects", "show", *WHICH, "--effect", "send", "--json").out)
    assert (shown["state"], shown["receipt"]) == ("resolved_applied", "rcpt-1")
    assert [h["became"] for h in shown["history"]] == ["pending", "unknown", "resolved_applied"]
    assert [(d["actor"], d["reason"], d["evidence_kind"]) for d in shown["decisions"]] == [
        ("ann", "looked up", "receipt_lookup")
    ]
    job = json.loads(fencepost(work.database, "jobs", "show", *WHICH, "--class", CLASS, "--json").out)
    assert (job["state"], job["effects"][0]["state"]) == ("queued", "resolved_applied")


@pytest.mark.parametrize(
    ("arguments", "version", "field"),
    [
        ((*APPLIED, *EVIDENCE), 1, "[version]"),
        (("--verdict", "applied", *EVIDENCE), None, "[receipt]"),
        ((*APPLIED, "--evidence-kind", "operator", "--evidence-ref", ""), None, "[evidence_ref]"),
        (("--verdict", "not-applied", *EVIDENCE), None, "[quiescent_at]"),
        ((*APPLIED, *EVIDENCE, "--actor", " padded"), None, "[actor]"),
    ],
)
def test_refused_decision_is_one_line_and_changes_nothing(
    work: Work, fencepost: Fencepost, arguments: tuple[str, ...], version: int | None, field: str
) -> None:
    done = fencepost(work.database, *work.reconcile(*arguments, version=version))

    assert done.code == 1
    assert field in done.line
    assert fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE)).code == 0


def test_wrong_words_on_the_command_line_are_refused_with_code_2(work: Work, fencepost: Fencepost) -> None:
    for arguments in (
        ("--verdict", "maybe", *EVIDENCE),
        (*APPLIED, "--evidence-kind", "hearsay", "--evidence-ref", "x"),
    ):
        assert fencepost(work.database, *work.reconcile(*arguments)).code == 2
    assert fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE)).code == 0


def test_cancel_shows_execution_and_effect_side_by_side(work: Work, fencepost: Fencepost) -> None:
    which = (*WHICH, "--class", CLASS)
    done = fencepost(work.database, "jobs", "cancel", *which, "--reason-text", "not needed")
    assert (done.code, done.out) == (0, "report.make of operation op: cancelled\n")
    assert "already_cancelled" in fencepost(work.database, "jobs", "cancel", *which, "--reason-text", "again").out

    shown = json.loads(fencepost(work.database, "jobs", "show", *which, "--json").out)
    assert (shown["state"], [e["state"] for e in shown["effects"]]) == ("cancelled", ["unknown"])
    plain = fencepost(work.database, "jobs", "show", *which).out
    assert "cancelled" in plain and "unknown" in plain and CONTENT not in plain

    refused = fencepost(work.database, "jobs", "retry", *which, "--reason-text", "after all")
    assert refused.code == 4
    assert "[effect]" in refused.line
    assert fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE)).code == 0
    assert fencepost(work.database, "jobs", "retry", *which, "--reason-text", "after all").code == 0


def test_jobs_are_listed_by_state_and_unknown_ones_refused(work: Work, fencepost: Fencepost) -> None:
    assert [j["state"] for j in json.loads(fencepost(work.database, "jobs", "list", "--json").out)] == ["blocked"]
    assert json.loads(fencepost(work.database, "jobs", "list", "--state", "queued", "--json").out) == []

    nobody = ("--tenant", "acme", "--operation", "nobody", "--class", CLASS)
    for arguments in (
        ("show", *nobody),
        ("cancel", *nobody, "--reason-text", "r"),
        ("retry", *nobody, "--reason-text", "r"),
    ):
        done = fencepost(work.database, "jobs", *arguments)
        assert done.code == 1
        assert "there is no such job [operation]" in done.line
    effect = fencepost(work.database, "effects", "show", *WHICH, "--effect", "nothing")
    assert effect.code == 1 and "there is no such effect [effect]" in effect.line


def test_disarmed_database_takes_no_decision(work: Work, fencepost: Fencepost) -> None:
    with work.database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")

    done = fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE))
    assert done.code == 1
    assert "[armed]" in done.line

    assert fencepost(work.database, "migrate").code == 0
    assert fencepost(work.database, *work.reconcile(*APPLIED, *EVIDENCE)).code == 0
