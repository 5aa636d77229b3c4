"""`fencepost authority principal`: every act with its dry run, its version, its refusals and exit codes."""

from __future__ import annotations

import json

import pytest

from fencepost.jobs.authority import within
from fencepost.schemas.errors import Restricted, StaleFence
from support.command_line import Fencepost
from support.database import Database

WHY = ("--reason", "why", "--evidence", "ticket 7", "--actor", "ann")
PRINCIPAL = ("authority", "principal")


def acts(database: Database, tenant: str = "acme", job_class: str | None = None) -> int:
    with database.connect() as conn:
        return within(conn, "web", tenant, job_class)


def version(database: Database) -> str:
    with database.connect() as conn:
        row = conn.execute("SELECT max(seq) FROM fencepost.authority_log").fetchone()
    assert row is not None
    return str(row[0])


def test_a_principal_is_added_granted_listed_and_revoked(database18: Database, fencepost: Fencepost) -> None:
    steps = (
        (("add", "web"), "registered: web, of any login\n"),
        (("grant", "web", "--tenant", "acme", "--class", "*"), "granted: web, tenant acme, class *, up to epoch 1\n"),
        (("revoke", "web", "--tenant", "acme"), "1 grants of web revoked\n"),
    )
    may: list[bool] = []
    for act, words in steps:
        looked_at = version(database18)
        checked = (*PRINCIPAL, *act, *WHY, "--expect-version", looked_at)
        tried = fencepost(database18, *checked, "--dry-run")
        assert (tried.code, tried.out) == (0, f"dry run, nothing was changed: {words}")
        assert version(database18) == looked_at
        done = fencepost(database18, *checked)
        assert (done.code, done.out) == (0, words)
        late = fencepost(database18, *checked)
        assert late.code == 1 and "look again: fencepost authority status" in late.line
        try:
            may.append(acts(database18) == 1)
        except Restricted:
            may.append(False)
    assert may == [False, True, False]
    again = fencepost(database18, *PRINCIPAL, "revoke", "web", *WHY)
    assert again.code == 1 and again.out == "0 grants of web revoked\n"
    nobody = fencepost(database18, *PRINCIPAL, "grant", "nobody", "--tenant", "acme", "--class", "*", *WHY)
    assert nobody.code == 1 and "fencepost authority principal add" in nobody.line
    history = json.loads(fencepost(database18, "authority", "status", "--json").out)["changes"]
    assert [(c["kind"], c["actor"], c["reason"]) for c in history[:3]] == [
        (kind, "ann", "why") for kind in ("revoked", "granted", "registered")
    ]


def test_the_list_says_what_stands_and_what_needs_a_grant_anew(database18: Database, fencepost: Fencepost) -> None:
    def states() -> dict[tuple[str, str | None], str]:
        found = json.loads(fencepost(database18, *PRINCIPAL, "list", "--json").out)
        return {(g["principal"], g["tenant"]): g["state"] for g in found}

    assert fencepost(database18, *PRINCIPAL, "list").out == "principals: none\n"
    fencepost(database18, *PRINCIPAL, "add", "web", *WHY)
    fencepost(database18, *PRINCIPAL, "add", "batch", "--login", "eve", *WHY)
    grant = (*PRINCIPAL, "grant", "web", "--class", "*", *WHY, "--tenant")
    for tenant in ("acme", "globex"):
        assert fencepost(database18, *grant, tenant).code == 0
    assert states() == {("batch", None): "nothing granted", ("web", "acme"): "stands", ("web", "globex"): "stands"}

    assert fencepost(database18, "authority", "rotate", "--tenant", "acme", *WHY).code == 0

    assert states()["web", "acme"] == "old epoch" and states()["web", "globex"] == "stands"
    assert "grant of an old epoch: web" in fencepost(database18, "authority", "status").out
    with pytest.raises(StaleFence):
        acts(database18)
    assert fencepost(database18, *grant, "acme").out == "granted: web, tenant acme, class *, up to epoch 2\n"
    assert acts(database18) == 2

    assert fencepost(database18, "authority", "restrict", "principal", "web", *WHY).code == 0
    assert states()["web", "acme"] == states()["web", "globex"] == "revoked"
    with pytest.raises(Restricted):
        acts(database18)
    assert fencepost(database18, "authority", "lift", "principal", "web", *WHY).code == 0
    assert acts(database18) == 2
    only = fencepost(database18, *PRINCIPAL, "list", "batch").out
    assert "nothing granted" in only and "acme" not in only
