"""`fencepost journal`: what verifies, where it does not, and what an operator does about it; never a request."""

import json
from pathlib import Path
from uuid import UUID, uuid4

from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.journal_records import Begin, Outcome
from fencepost.jobs.journal_writer import Writer
from fencepost.jobs.submit import submit
from fencepost.schemas.identity import JobClass
from support.command_line import Fencepost
from support.database import Database
from support.journals import QUICK

CLASS = "report.make"
FIRST = "00000001.journal"


def journal(folder: Path, *begins: Begin, matched: bool = False) -> Path:
    """A journal of this machine with these begins, closed."""
    made = Writer(folder, owner="worker-1", disk=QUICK)
    for begin in begins:
        made.append(begin)
        if matched:
            made.note(Outcome(effect_attempt=begin.effect_attempt, outcome="success"))
    made.close()
    return folder


def begin(operation: str = "op", attempt: UUID | None = None) -> Begin:
    return Begin(
        tenant="acme",
        operation=operation,
        job_class=CLASS,
        effect_key="send",
        effect_attempt=uuid4(),
        kind="opaque",
        generation=1,
        attempt=attempt or uuid4(),
        epoch=1,
        request_digest="00" * 32,
    )


def tear(folder: Path) -> None:
    """The end of the newest record is missing, and nobody has closed the file."""
    data = bytearray((folder / FIRST).read_bytes())
    data[108] = 0x5A
    (folder / FIRST).write_bytes(data[:-5])


def test_a_journal_is_verified_shown_torn_repaired_and_shown_again(tmp_path: Path, fencepost: Fencepost) -> None:
    folder = journal(tmp_path / "j", begin("op-1"), begin("op-2"))
    where = {"FENCEPOST_WORKER_JOURNAL": str(folder)}
    done = fencepost(None, "journal", "verify", **where)
    assert done.code == 0 and "4 records verify" in done.out
    report = json.loads(fencepost(None, "journal", "verify", "--json", "--journal", str(folder)).out)
    assert (report["records"], report["damage"], report["segments"][0]["open"]) == (4, None, False)
    assert "nothing to repair" in fencepost(None, "journal", "repair", **where).out

    tear(folder)
    done = fencepost(None, "journal", "verify", "--json", **where)
    assert done.code == 1 and "fencepost journal repair" in done.line
    report = json.loads(done.out)
    assert report["records"] == 3 and report["damage"]["kind"] == "torn"
    shown = fencepost(None, "journal", "show", "--json", **where)
    assert shown.code == 1
    assert [r["record"] for r in json.loads(shown.out)] == ["opened", "begin", "begin"]

    done = fencepost(None, "journal", "repair", "--actor", "ann", "--json", **where)
    moved = json.loads(done.out)
    assert done.code == 0 and (folder / moved["quarantine"]).stat().st_size == moved["length"]
    shown = fencepost(None, "journal", "show", **where)
    assert shown.code == 0 and "actor=ann" in shown.out and "op-2" in shown.out
    listed = json.loads(fencepost(None, "journal", "show", "--unmatched", "--json", **where).out)
    assert [b["operation"] for b in listed] == ["op-1", "op-2"]
    assert moved["quarantine"] in fencepost(None, "journal", "verify", **where).out


def test_a_corrupt_journal_is_not_repaired(tmp_path: Path, fencepost: Fencepost) -> None:
    folder = journal(tmp_path / "j", begin())
    data = bytearray((folder / FIRST).read_bytes())
    data[200] ^= 1
    (folder / FIRST).write_bytes(data)
    for command in ("verify", "show", "repair"):
        done = fencepost(None, "journal", command, "--journal", str(folder))
        assert done.code == 1 and "does not verify: 00000001.journal at byte" in done.line
    assert (folder / FIRST).read_bytes() == data


def test_begins_that_the_database_does_not_know_are_listed_and_acknowledged_once(
    database: Database, tmp_path: Path, fencepost: Fencepost
) -> None:
    with database.connect() as conn:
        register_class(conn, JobClassPolicy(JobClass(CLASS)))
        submit(conn, CLASS, tenant="acme", operation="here", args={})
    with database.connect() as conn:
        (job,) = claim(conn, "worker-1", [CLASS], 1)
    folder = journal(tmp_path / "j", begin("here", job.fence.attempt), begin("gone"), matched=True)
    where = {"FENCEPOST_WORKER_JOURNAL": str(folder)}
    listed = json.loads(fencepost(database, "journal", "show", "--missing", "--json", **where).out)
    assert [b["operation"] for b in listed] == ["here", "gone"]
    assert fencepost(database, "journal", "acknowledge", "--reason", "looked", **where).code == 1

    one = ("--effect-attempt", listed[1]["effect_attempt"])
    done = fencepost(database, "journal", "acknowledge", "--reason", "looked", "--actor", "ann", *one, **where)
    assert done.code == 0 and "no_job" in done.out
    done = fencepost(database, "journal", "acknowledge", "--reason", "looked", "--all", "--json", **where)
    assert [(b["operation"], b["became"]) for b in json.loads(done.out)] == [("here", "unknown")]
    assert fencepost(database, "journal", "show", "--missing", **where).out == "missing: none\n"
    effects = json.loads(fencepost(database, "effects", "list", "--json").out)
    assert [(e["operation"], e["state"], e["reason"]) for e in effects] == [("here", "unknown", "journalled_begin")]


def test_a_folder_must_be_named_and_be_there(tmp_path: Path, fencepost: Fencepost) -> None:
    done = fencepost(None, "journal", "verify")
    assert done.code == 2 and "[FENCEPOST_WORKER_JOURNAL]" in done.line
    done = fencepost(None, "journal", "verify", "--journal", str(tmp_path / "nothing"))
    assert done.code == 2 and "there is no folder" in done.line
    (tmp_path / "fencepost.toml").write_text('[worker]\njournal = "kept"\n')
    journal(tmp_path / "kept", begin())
    assert fencepost(None, "journal", "verify").code == 0
