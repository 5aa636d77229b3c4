"""`fencepost jobs retention`, `purge` and `show`: how long finished jobs stay, what a purge would move, and what it leaves."""

from __future__ import annotations

import json

import pytest

from fencepost.jobs.result import complete_with, keepable
from support.command_line import Fencepost
from support.database import Database
from support.jobs import CLASS, claimed, given

WHY = ("--reason", "a test", "--actor", "ann")
ONE = ("--tenant", "t", "--operation", "op-1", "--class", CLASS)


@pytest.fixture
def finished(database18: Database) -> Database:
    """A job that was done a month ago and one that is queued."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        with conn.transaction():
            complete_with(conn, claimed(conn).fence, keepable("secret"))
        given(conn, "op-2")
        conn.execute("UPDATE fencepost.job SET changed_at = changed_at - interval '31 days'")
    return database18


def test_how_long_finished_jobs_stay_is_declared_for_one_class_with_a_reason_and_shown(
    finished: Database, fencepost: Fencepost
) -> None:
    assert "finished jobs stay for ever" in fencepost(finished, "jobs", "retention").out
    for words, field in (
        (("--keep", "30d", *WHY), "class"),
        (("--class", CLASS, "--keep", "30d"), "reason"),
        (("--class", CLASS, "--keep", "soon", *WHY), "keep"),
        (("--class", CLASS, "--keep", "30d", "--forever", *WHY), "keep"),
        (("--class", CLASS, "--keep", "5m", *WHY), "finished_keep"),
        (("--archive", "1h", *WHY), "archive_keep"),
        (("--class", "nobody", "--keep", "30d", *WHY), "class"),
    ):
        refused = fencepost(finished, "jobs", "retention", *words)
        assert refused.code == 1 and f"[{field}]" in refused.line, refused.err
    done = fencepost(
        finished, "jobs", "retention", "--class", CLASS, "--keep", "30d", "--archive", "365d", "--json", *WHY
    )
    assert json.loads(done.out) == {
        "classes": [{"class": CLASS, "finished_keep": 2592000.0, "passed_at": None}],
        "archive_keep": 31536000.0,
    }
    gone = fencepost(finished, "jobs", "retention", "--class", CLASS, "--forever", "--archive-forever", *WHY)
    assert "stay for ever" in gone.out and "keeps what it was given for ever" in gone.out


def test_a_purge_moves_what_its_dry_run_said_and_show_still_tells_what_happened(
    finished: Database, fencepost: Fencepost
) -> None:
    fencepost(finished, "jobs", "retention", "--class", CLASS, "--keep", "30d", *WHY)
    before = json.loads(fencepost(finished, "jobs", "show", *ONE, "--json").out)
    assert len(before["attempted"]) == 1 and before["archived_at"] is None
    said = json.loads(fencepost(finished, "jobs", "purge", "--dry-run", "--json").out)
    assert (said["jobs"], said["months"], said["dry_run"]) == (1, [], True)
    assert [(c["class"], c["jobs"]) for c in said["classes"]] == [(CLASS, 1)]
    assert "nothing was changed" in fencepost(finished, "jobs", "purge", "--dry-run").out

    assert json.loads(fencepost(finished, "jobs", "purge", "--json").out) == {
        "dry_run": False, "jobs": 1, "months": [],
    }  # fmt: skip

    assert "purged" in fencepost(finished, "jobs", "purge").out
    after = json.loads(fencepost(finished, "jobs", "show", *ONE, "--json").out)
    assert after["archived_at"] is not None and after["status"] == "done"
    for part in ("attempted", "history", "signals", "effects"):
        assert after[part] == before[part], part
    shown = fencepost(finished, "jobs", "show", *ONE)
    assert shown.code == 0 and "secret" not in shown.out + shown.err
    assert json.loads(fencepost(finished, "jobs", "list", "--all", "--json").out)[0]["operation"] == "op-1"


def test_doctor_tells_of_finished_jobs_that_nobody_archives(finished: Database, fencepost: Fencepost) -> None:
    def told() -> str:
        (line,) = [r for r in json.loads(fencepost(finished, "doctor", "--json").out) if r["check"] == "archive"]
        return f"{line['level']}: {line['message']}"

    assert told().startswith("ok")
    fencepost(finished, "jobs", "retention", "--class", CLASS, "--keep", "30d", *WHY)
    assert told().startswith("ok"), "there was a day to do it"
    with finished.connect() as conn:
        conn.execute("UPDATE fencepost.job_retention SET changed_at = changed_at - interval '25 hours'")
    assert told().startswith("warn") and CLASS in told()
    fencepost(finished, "jobs", "purge")
    assert told().startswith("ok")
