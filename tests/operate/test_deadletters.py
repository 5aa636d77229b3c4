"""`fencepost deadletters`: what consumers set aside and why, and the operator's acts with their refusals."""

from __future__ import annotations

import base64
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer.inbox import inbox
from fencepost.consumer.runner import Handling, RunnerOptions, Tries
from fencepost.relay.destination import source
from fencepost.schemas.event import Event
from support.command_line import Fencepost, Result
from support.database import Database
from support.deliveries import envelope, from_kafka

SECRET = "secret-content"
WHY = ("--reason-text", "looked into it", "--actor", "ann")
ONCE = RunnerOptions(max_attempts=1)


class Filed(Event, type="operate.set_aside", version=1):
    text: str = SECRET


@inbox(consumer="reports")
def failing(tx: Connection[Any], event: Filed) -> None:
    raise ValueError(event.text)


@inbox(consumer="reports")
def working(tx: Connection[Any], event: Filed) -> None:
    """Without any work."""


@inbox(consumer="other")
def untroubled(tx: Connection[Any], event: Filed) -> None:
    """Without any work."""


@pytest.fixture
def letters(database: Database) -> Database:
    """One that failed, one of another tenant that cannot be read, and a conflict at another consumer."""
    handling = Handling(failing, database.dsn, ONCE)
    handling.attempt(from_kafka(envelope(Filed(tenant="acme", operation="failed"))), Tries(ONCE))
    handling.attempt(from_kafka(envelope(Filed(tenant="rival", operation="garbled")), 1, payload=b"[]"), Tries(ONCE))
    handling.close()
    untroubled.handle(database.dsn, from_kafka(envelope(Filed(tenant="acme", operation="twice")), 2))
    untroubled.handle(database.dsn, from_kafka(envelope(Filed(tenant="acme", operation="twice", text="x" + SECRET)), 3))
    return database


def rows(done: Result) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def number_of(database: Database, operation: str) -> str:
    with database.connect() as conn:
        found = conn.execute("SELECT min(id) FROM fencepost.dead_letter WHERE operation = %s", (operation,)).fetchone()
    assert found is not None
    return str(found[0])


def decisions(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute(
            "SELECT kind, actor, reason, operation, verdict FROM fencepost.decision ORDER BY id"
        ).fetchall()


def test_letters_are_listed_by_tenant_consumer_type_reason_and_age(letters: Database, fencepost: Fencepost) -> None:
    def listed(*filters: str) -> list[tuple[str, str]]:
        found = rows(fencepost(letters, "deadletters", "list", "--json", *filters))
        return [(r["operation"], r["reason"]) for r in found]

    failed, garbled, twice = ("failed", "handler_failed"), ("garbled", "undecodable"), ("twice", "conflict")
    assert listed() == [failed, garbled, twice]
    assert listed("--tenant", "rival") == [garbled]
    assert listed("--consumer", "other") == [twice]
    assert listed("--type", "operate.set_aside", "--reason", "handler_failed") == [failed]
    assert listed("--older-than", "1h") == []
    with letters.connect() as conn:
        conn.execute(
            "UPDATE fencepost.dead_letter SET created_at = created_at - interval '2 hours' WHERE reason = 'conflict'"
        )
    assert listed("--older-than", "90m") == [twice]
    assert listed("--limit", "2") == [failed, garbled]
    assert fencepost(letters, "deadletters", "list", "--tenant", "nobody").out == "dead letters: none\n"


def test_no_command_prints_a_payload_and_both_digests_of_a_conflict_are_shown(
    letters: Database, fencepost: Fencepost
) -> None:
    twice = number_of(letters, "twice")
    for words in (
        ("list",),
        ("list", "--json"),
        ("show", twice),
        ("show", twice, "--json"),
        ("export",),
        ("retry", "--all", "--dry-run", *WHY),
        ("discard", "--all", "--dry-run", *WHY),
    ):
        done = fencepost(letters, "deadletters", *words)
        assert "twice" in done.out
        assert SECRET not in done.out + done.err
        assert base64.b64encode(SECRET.encode()).decode()[:12] not in done.out
    shown = json.loads(fencepost(letters, "deadletters", "show", twice, "--json").out)
    assert shown["stored_meaning"].startswith("sha256-v1:") and shown["arrived_meaning"].startswith("sha256-v1:")
    assert shown["stored_meaning"] != shown["arrived_meaning"]
    assert (shown["coordinates"], shown["attempts"]) == (from_kafka(envelope(), 3).coordinates, 1)
    assert shown["bytes"] > len(SECRET) and not {"payload", "headers"} & set(shown)
    refused = fencepost(letters, "deadletters", "show", "999")
    assert refused.code == 1 and "no such dead letter [id]" in refused.line


def test_retry_marks_due_the_consumer_handles_it_and_the_story_stays(letters: Database, fencepost: Fencepost) -> None:
    failed = number_of(letters, "failed")
    done = fencepost(letters, "deadletters", "retry", "--id", failed, "--json", *WHY)
    assert [r["result"] for r in rows(done)] == ["due"]
    handling = Handling(working, letters.dsn, ONCE)
    assert handling.retry()
    handling.close()

    again = fencepost(letters, "deadletters", "retry", "--id", failed, *WHY)
    assert again.code == 1 and f"no dead letter: {failed} [id]" in again.line
    shown = json.loads(fencepost(letters, "deadletters", "show", failed, "--json").out)
    assert shown["state"] == "handled or discarded"
    assert [(d["actor"], d["verdict"], d["evidence_kind"]) for d in shown["decisions"]] == [
        ("ann", "due", "handler_failed")
    ]


def test_discarded_letters_go_and_the_decision_stays(letters: Database, fencepost: Fencepost) -> None:
    done = fencepost(letters, "deadletters", "discard", "--tenant", "rival", "--json", *WHY)
    assert [r["result"] for r in rows(done)] == ["discarded"]
    assert decisions(letters) == [("discard_dead_letter", "ann", "looked into it", "garbled", "discarded")]
    assert len(rows(fencepost(letters, "deadletters", "list", "--json"))) == 2
    with letters.connect() as conn:
        (evidence,) = conn.execute("SELECT evidence_ref FROM fencepost.decision").fetchall()[0]
    assert from_kafka(envelope(), 1).coordinates in evidence and "sha256:" in evidence


def test_what_is_older_than_the_horizon_needs_the_operators_word(letters: Database, fencepost: Fencepost) -> None:
    with letters.connect() as conn:
        conn.execute("UPDATE fencepost.dead_letter SET reason = 'before_horizon' WHERE operation = 'failed'")
    which = ("--reason", "before_horizon", "--json", *WHY)
    done = fencepost(letters, "deadletters", "retry", *which)
    assert done.code == 1
    assert "nothing here can tell whether it was handled [unhandled]" in json.loads(done.out)[0]["result"]
    assert rows(fencepost(letters, "deadletters", "retry", "--unhandled", *which))[0]["result"] == "due"
    assert decisions(letters) == [("retry_dead_letter", "ann", "looked into it", "failed", "due, declared unhandled")]


def test_what_is_of_an_old_epoch_is_released_and_not_retried(letters: Database, fencepost: Fencepost) -> None:
    with letters.connect() as conn:
        here = source(conn)
    old = replace(envelope(Filed(tenant="acme", operation="early")), source=here)
    done = fencepost(letters, "authority", "rotate", "--all", "--reason", "a test", "--actor", "ann")
    assert done.code == 0, done.err
    working.handle(letters.dsn, from_kafka(old, 9))
    early = number_of(letters, "early")
    (listed,) = rows(fencepost(letters, "deadletters", "list", "--reason", "old_epoch", "--json"))
    assert (listed["id"], listed["field"], listed["released_epoch"]) == (int(early), "epoch", None)
    assert "accepted here under epoch 1, and the tenant stands at epoch 2" in listed["detail"]
    assert "`fencepost deadletters list`, and `release` for what is of an old epoch" in (
        fencepost(letters, "doctor").out
    )

    refused = fencepost(letters, "deadletters", "retry", "--id", early, "--json", *WHY)
    assert refused.code == 1 and "fencepost deadletters release" in json.loads(refused.out)[0]["result"]
    nobody = fencepost(letters, "deadletters", "release", *WHY)
    assert nobody.code == 2 and "--all" in nobody.err
    failed = fencepost(letters, "deadletters", "release", "--id", number_of(letters, "failed"), "--json", *WHY)
    assert failed.code == 1 and "not set aside for its epoch [epoch]" in json.loads(failed.out)[0]["result"]
    assert fencepost(letters, "deadletters", "release", "--all", "--dry-run", *WHY).code == 0
    assert decisions(letters) == []

    done = fencepost(letters, "deadletters", "release", "--tenant", "acme", "--json", *WHY)
    assert [(r["operation"], r["result"]) for r in rows(done)] == [("early", "released")], "the others are not old"
    assert json.loads(fencepost(letters, "deadletters", "show", early, "--json").out)["released_epoch"] == 2
    handling = Handling(working, letters.dsn, ONCE)
    assert handling.retry() and not handling.retry()
    handling.close()
    shown = json.loads(fencepost(letters, "deadletters", "show", early, "--json").out)
    assert shown["state"] == "handled or discarded"
    assert [(d["kind"], d["verdict"], d["evidence_kind"]) for d in shown["decisions"]] == [
        ("release_dead_letter", "released under epoch 2", "old_epoch")
    ]


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_a_dry_run_changes_nothing_and_nothing_is_done_to_everything_by_accident(
    letters: Database, fencepost: Fencepost, command: str
) -> None:
    def standing() -> list[tuple[Any, ...]]:
        with letters.connect() as conn:
            return conn.execute("SELECT id, due_at FROM fencepost.dead_letter ORDER BY 1").fetchall()

    before = standing()
    done = fencepost(letters, "deadletters", command, "--reason", "conflict", "--dry-run", *WHY)
    assert done.code == 0 and "dry run, nothing was changed" in done.out and "twice" in done.out
    refused = fencepost(letters, "deadletters", command, *WHY)
    assert refused.code == 2 and "--all" in refused.err
    assert (standing(), decisions(letters)) == (before, [])


def test_payloads_leave_only_into_a_new_private_file_and_who_read_them_is_kept(
    letters: Database, fencepost: Fencepost, tmp_path: Path
) -> None:
    file = tmp_path / "letters.jsonl"
    refused = fencepost(letters, "deadletters", "export", "--with-payload", str(file))
    assert refused.code == 1 and "[reason-text]" in refused.line and not file.exists()

    done = fencepost(
        letters, "deadletters", "export", "--id", number_of(letters, "failed"), "--with-payload", str(file), *WHY
    )

    assert done.code == 0 and SECRET not in done.out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (line,) = (json.loads(each) for each in file.read_text().splitlines())
    assert SECRET.encode() in base64.b64decode(line["payload_base64"])
    assert ["ce_fptenant", "acme"] in line["headers"]
    assert decisions(letters) == [("read_dead_letter", "ann", "looked into it", "failed", "read")]
    again = fencepost(letters, "deadletters", "export", "--with-payload", str(file), *WHY)
    assert again.code == 1 and "cannot be made" in again.line
