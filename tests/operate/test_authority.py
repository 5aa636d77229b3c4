"""`fencepost authority`: every act with its dry run, its version, its refusals and exit codes, by the right login only."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fencepost.jobs.claim import claim
from fencepost.schemas.witness import FileWitness
from support.command_line import Fencepost
from support.database import Database, Databases
from support.jobs import CLASS, begun, claimed, effect, given, show
from support.restores import Restores, restores
from support.roles import Roles, separated

WHY = ("--reason", "why", "--evidence", "ticket 7", "--actor", "ann")


@pytest.fixture
def made(databases18: Databases) -> Iterator[Restores]:
    with restores(databases18) as found:
        yield found


def version(database: Database) -> int:
    with database.connect() as conn:
        row = conn.execute("SELECT max(seq) FROM fencepost.authority_log").fetchone()
    assert row is not None
    return int(row[0])


def test_each_change_is_tried_made_and_shown(database18: Database, fencepost: Fencepost) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn, tenant="acme")
    before = version(database18)
    acts = (
        ("rotate", "--tenant", "acme"),
        ("rotate", "--all"),
        ("freeze", "--tenant", "acme"),
        ("thaw", "--tenant", "acme"),
        ("thaw", "--all"),
        ("release", "--tenant", "acme"),
        ("restrict", "tenant", "acme"),
        ("lift", "tenant", "acme"),
        ("restrict", "class", CLASS),
        ("lift", "class", CLASS),
        ("restrict", "principal", "eve"),
        ("lift", "principal", "eve"),
    )
    for act in acts:
        looked_at = str(version(database18))
        tried = fencepost(database18, "authority", *act, *WHY, "--dry-run", "--expect-version", looked_at)
        if act[0] != "lift":
            assert tried.out.startswith("dry run, nothing was changed: "), act
        assert tried.code == 0, (act, tried.err)
        assert str(version(database18)) == looked_at, act
        done = fencepost(database18, "authority", *act, *WHY, "--expect-version", looked_at)
        assert (done.code, done.err) == (0, ""), act
        late = fencepost(database18, "authority", *act, *WHY, "--expect-version", looked_at)
        assert late.code == 1 and "look again: fencepost authority status" in late.line, act
    found = json.loads(fencepost(database18, "authority", "status", "--json", "--history", "100").out)
    assert found["armed"] is True and found["history"] == "verified" and found["version"] == before + len(acts)
    newest = found["changes"][0]
    assert (newest["kind"], newest["actor"], newest["reason"]) == ("lifted", "ann", "why")
    assert newest["detail"]["evidence"] == "ticket 7"
    shown = fencepost(database18, "authority", "status").out
    assert "armed: this database may publish" in shown and "lifted" in shown


def test_what_does_not_hold_is_refused_in_one_line_with_its_exit_code(
    database18: Database, fencepost: Fencepost
) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        begun(conn, claimed(conn).fence)
    nobody = fencepost(database18, "authority", "rotate", *WHY)
    assert nobody.code == 1 and "--tenant NAME or --all" in nobody.line
    assert fencepost(database18, "authority", "rotate", "--tenant", "t", *WHY).code == 0  # the control
    named = ("--tenant", "t", "--class", CLASS, "--operation", "op-1")
    assert fencepost(database18, "authority", "release", *named, *WHY).code == 4  # not known what became of its effect
    done = fencepost(database18, "authority", "release", "--tenant", "t", *WHY, "--json")
    assert json.loads(done.out) == {"released": 0, "open": 1, "dry_run": False}
    assert fencepost(database18, "authority", "lift", "tenant", "nobody", *WHY).code == 1
    listed = fencepost(database18, "jobs", "list", "--state", "blocked", "--json")
    assert len(json.loads(listed.out)) == 1


def test_a_sealed_database_is_armed_again_on_purpose(database18: Database, fencepost: Fencepost) -> None:
    assert fencepost(database18, "authority", "seal", *WHY, "--dry-run").code == 0
    assert fencepost(database18, "authority", "arm").out == "armed already\n"
    assert fencepost(database18, "authority", "seal", *WHY).code == 0
    assert fencepost(database18, "authority", "freeze", "--all", *WHY).code == 1
    found = json.loads(fencepost(database18, "authority", "status", "--json").out)
    assert found["armed"] is False and "sealed for a planned move" in found["why"]
    assert fencepost(database18, "authority", "arm").out == "armed\n"
    assert fencepost(database18, "authority", "freeze", "--all", *WHY).code == 0


def test_a_restored_database_is_recovered_and_says_what_can_resume(made: Restores, fencepost: Fencepost) -> None:
    with made.live.connect(autocommit=True) as conn:
        given(conn)
        begun(conn, claimed(conn).fence)
    old = made.restored(made.backup())
    refused = fencepost(old, "authority", "freeze", "--all", *WHY)
    assert refused.code == 1 and "not armed" in refused.line
    assert fencepost(old, "authority", "arm").code == 1
    tried = fencepost(old, "authority", "recover", *WHY, "--dry-run")
    assert tried.code == 0 and tried.out.startswith("dry run, nothing was changed: ")

    done = json.loads(fencepost(old, "authority", "recover", *WHY, "--json").out)

    assert (done["jobs"], done["unknown"], done["epoch"]) == (1, 1, 2)
    assert {h["what"]: h["owner"] for h in done["holds"]} == {
        "frozen": "authority admin",
        "effect unknown": "operator",
    }
    again = fencepost(old, "authority", "recover", *WHY)
    assert again.code == 0 and "nothing to recover" in again.out
    with old.connect(autocommit=True) as conn:
        assert (show(conn), effect(conn, "state")) == ("blocked", "unknown")
        assert claim(conn, "b", [CLASS], 1) == []


def test_a_dump_of_this_moment_in_another_database_is_not_taken_for_a_restart(
    made: Restores, fencepost: Fencepost
) -> None:
    live = fencepost(made.live, "authority", "status")
    assert live.out.startswith("armed: this database may publish")

    # Its tip is equal: nothing was lost yet, and the other one may still be at work.
    copy = made.restored(made.copy())

    for asked in (fencepost(copy, "authority", "status"), fencepost(copy, "doctor")):
        assert "another database than the witness saw" in asked.out and "after a plain restart" not in asked.out
    assert asked.code == 1


def test_a_lost_witness_is_replaced_by_a_floor_on_evidence(made: Restores, fencepost: Fencepost) -> None:
    old = made.restored(made.backup())
    FileWitness(old.state).path.unlink()
    lost = fencepost(old, "authority", "recover", *WHY)
    assert lost.code != 0 and "--epoch-floor" in lost.line
    bare = fencepost(old, "authority", "recover", "--reason", "why", "--epoch-floor", "8")
    assert bare.code == 1 and "evidence" in bare.line

    done = fencepost(old, "authority", "recover", *WHY, "--epoch-floor", "8", "--json")

    assert (done.code, json.loads(done.out)["epoch"]) == (0, 9)
    assert "armed: this database may publish" in fencepost(old, "authority", "status").out


def test_a_sealed_database_that_was_moved_is_not_taken_for_a_restored_one(made: Restores, fencepost: Fencepost) -> None:
    assert fencepost(made.live, "authority", "seal", *WHY).code == 0
    elsewhere = made.restored(made.copy())

    for asked in (fencepost(elsewhere, "authority", "status"), fencepost(elsewhere, "doctor")):
        assert "sealed for a planned move" in asked.out and "another database" not in asked.out

    assert fencepost(elsewhere, "authority", "arm").code == 0
    assert "armed: this database may publish" in fencepost(elsewhere, "authority", "status").out
    left = fencepost(made.live, "authority", "status")
    assert "another database than the witness saw" in left.out and "sealed for" not in left.out


@pytest.fixture(scope="module")
def roles(databases18: Databases) -> Iterator[Roles]:
    with separated(databases18) as made:
        yield made


ACTS = (
    ("rotate", "--tenant", "t"),
    ("freeze", "--all"),
    ("thaw", "--all"),
    ("release", "--all"),
    ("restrict", "class", "c"),
    ("lift", "class", "c"),
    ("seal", "--dry-run"),
)


def test_only_an_authority_admin_changes_authority(roles: Roles, fencepost: Fencepost) -> None:
    admin = roles.login("authority_admin")
    # The whole matrix is another test's; here is what an operator of another role sees.
    for role, acts in (("reconciler", ACTS), ("executor", ACTS[:1]), ("armer", ACTS[:1]), ("reader", ACTS[:1])):
        other = roles.login(role)
        for act in acts:
            refused = fencepost(other, "authority", *act, *WHY)
            assert refused.code == 1 and "permission denied" in refused.line, (role, act, refused.err)
    for act in ACTS:
        done = fencepost(admin, "authority", *act, *WHY)
        assert done.code == 0, (act, done.err)
    assert fencepost(admin, "authority", "status").code == 0
    with roles.database.connect(autocommit=True) as conn:
        conn.execute("DELETE FROM fencepost.ticket")
    for role in ("executor", "reconciler", "armer"):
        assert fencepost(roles.login(role), "authority", "recover", *WHY).code == 1
    assert fencepost(admin, "authority", "recover", *WHY).code == 0
