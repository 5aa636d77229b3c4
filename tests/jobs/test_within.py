"""Acts of principals: allowed while their authority stands, refused in every other case, with nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.rows import dict_row, tuple_row
from sqlalchemy.orm import Session

from fencepost.jobs import authority, principals
from fencepost.jobs.authority import By, lift, restrict, rotate, within
from fencepost.jobs.recovery import holds
from fencepost.schemas import arming
from fencepost.schemas.errors import (
    FencepostError,
    InvalidInput,
    NotArmed,
    Restricted,
    StaleFence,
    WrongTransaction,
    WrongVersion,
)
from support.database import Database, Databases
from support.jobs import RESULTS, Background, Conn, results, save, two, waiting
from support.processes import wait_for
from support.restores import recovered, restores
from support.roles import separated
from support.transactions import engine

BY = By("ann", "why", "ticket 7")
ASKED = "SELECT count(*) FROM pg_locks WHERE mode = 'ExclusiveLock' AND NOT granted AND relation = 'fencepost.gate'::regclass"


def made(conn: Conn, principal: str = "web", *, tenant: str = "t", job_class: str = "refund") -> None:
    """A principal with one grant, committed."""
    with conn.transaction():
        principals.register(conn, BY, principal)
        principals.grant(conn, BY, principal, tenant=tenant, job_class=job_class)


def act(conn: Conn, principal: str = "web", tenant: str = "t", job_class: str | None = "refund", by: str = "") -> int:
    """An act in a transaction of its own."""
    with conn.transaction():
        epoch = within(conn, principal, tenant, job_class)
        if by:
            save(conn, by=by)
        return epoch


def refused(error: type[FencepostError], field: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and caught.value.field == field


@contextmanager
def restricted(database: Database, kind: authority.Kind, subject: str) -> Generator[None]:
    restrict(database.dsn, database.state, BY, kind, subject)
    try:
        yield
    finally:
        # The witness would remember it for the tests that come.
        lift(database.dsn, database.state, BY, kind, subject)


def test_a_principal_acts_for_the_tenants_and_classes_that_it_was_granted(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        made(conn)
        assert act(conn) == 1  # the control
        refused(Restricted, "grant", lambda: act(conn, tenant="u"))
        refused(Restricted, "grant", lambda: act(conn, job_class="report"))
        refused(Restricted, "grant", lambda: act(conn, job_class=None))
        refused(Restricted, "principal", lambda: act(conn, "other"))
        principals.register(conn, BY, "other")
        refused(Restricted, "grant", lambda: act(conn, "other"))
        for field, values in {
            "principal": ("", "t", "refund"),
            "tenant": ("web", " t", "refund"),
            "class": ("web", "t", "x" * 201),
        }.items():
            refused(InvalidInput, field, partial(conn.execute, "SELECT fencepost.within(%s, %s, %s)", values))

        for tenant, job_class in (("t", "*"), ("*", "report"), ("*", "*")):
            principals.grant(conn, BY, "web", tenant=tenant, job_class=job_class)
        for tenant in ("t", "u"):
            for wanted in ("refund", "report", None):
                act(conn, tenant=tenant, job_class=wanted)

        assert principals.revoke(conn, BY, "web", tenant="*", job_class="*") == 1
        refused(Restricted, "grant", lambda: act(conn, tenant="u", job_class="refund"))
        act(conn, tenant="u", job_class="report")
        assert principals.revoke(conn, BY, "web", job_class="report") == 1
        refused(Restricted, "grant", lambda: act(conn, tenant="u", job_class="report"))
        assert principals.revoke(conn, BY, "web") == 2
        refused(Restricted, "grant", lambda: act(conn))
        assert [g.state for g in principals.granted(conn)] == ["nothing granted", "nothing granted"]


def test_what_restricts_principal_tenant_or_class_refuses_the_act_until_it_is_lifted(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        made(conn)
        made(conn, "other", tenant="u", job_class="report")
        subjects: dict[authority.Kind, str] = {"principal": "web", "tenant": "t", "class": "refund"}
        for kind, subject in subjects.items():
            act(conn)  # the control
            with restricted(database18, kind, subject):
                refused(Restricted, kind, lambda: act(conn))
                act(conn, "other", "u", "report")
        act(conn)
        with restricted(database18, "principal", "web"):
            assert {g.principal: g.state for g in principals.granted(conn)} == {"web": "revoked", "other": "stands"}


def test_a_rotation_ends_the_grants_for_its_tenant_until_they_are_given_anew(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        made(conn)
        made(conn, "all", tenant="*", job_class="*")

        rotate(database18.dsn, database18.state, BY, tenant="u")

        assert act(conn) == act(conn, "all") == 1
        refused(StaleFence, "epoch", lambda: act(conn, "all", "u"))
        epoch = rotate(database18.dsn, database18.state, BY, tenant="t").epoch
        for principal in ("web", "all"):
            refused(StaleFence, "epoch", partial(act, conn, principal))
        act(conn, "all", "another")
        assert [h.what for h in holds(conn) if h.job_class == "refund"] == ["grant of an old epoch: web"]
        assert {g.principal: g.state for g in principals.granted(conn)} == {"web": "old epoch", "all": "stands"}

        assert principals.grant(conn, BY, "web", tenant="t", job_class="refund") == epoch
        assert act(conn) == epoch
        rotate(database18.dsn, database18.state, BY)
        for principal, tenant in (("web", "t"), ("all", "t"), ("all", "another")):
            refused(StaleFence, "epoch", partial(act, conn, principal, tenant))
        assert {h.what for h in holds(conn) if h.what != "frozen"} == {
            "grant of an old epoch: web",
            "grant of an old epoch: all",
        }


def test_no_restore_brings_a_revoked_grant_back(databases18: Databases) -> None:
    with restores(databases18) as found:
        with found.live.connect(autocommit=True) as conn:
            made(conn)
            act(conn)  # the control
        backup = found.backup()
        with found.live.connect(autocommit=True) as conn:
            principals.revoke(conn, BY, "web")
        old = found.restored(backup)
        with old.connect(autocommit=True) as conn:
            with pytest.raises(NotArmed):
                act(conn)
            recovered(old)
            refused(StaleFence, "epoch", lambda: act(conn))
            principals.grant(conn, BY, "web", tenant="t", job_class="refund")
            act(conn)


def changes(database: Database) -> dict[str, tuple[Callable[[Conn], object], type[FencepostError], str]]:
    """Each change, and what an act that comes after it is told."""
    dsn, state = database.dsn, database.state
    return {
        "rotate a tenant": (lambda _: rotate(dsn, state, BY, tenant="t"), StaleFence, "epoch"),
        "revoke a grant": (lambda conn: principals.revoke(conn, BY, "web"), Restricted, "grant"),
        "revoke a principal": (lambda _: restrict(dsn, state, BY, "principal", "web"), Restricted, "principal"),
        "another login": (lambda conn: principals.register(conn, BY, "web", login="eve"), Restricted, "principal"),
    }


@pytest.mark.parametrize("change", ["rotate a tenant", "revoke a grant", "revoke a principal", "another login"])
def test_a_change_waits_for_an_act_under_way_and_an_act_that_comes_later_is_refused(
    database18: Database, change: str
) -> None:
    made_change, error, field = changes(database18)[change]
    with two(database18) as (auto, manual):
        auto.execute(RESULTS)
        made(auto)
        within(manual, "web", "t", "refund")
        changing = Background(database18, made_change)
        wait_for(lambda: auto.execute(ASKED).fetchone() == (1,), 10, "the change to wait for the gate")
        later = Background(database18, lambda conn: act(conn, by="later"))
        waiting(auto, later.pid)
        # Still nothing has changed for whoever was there first.
        within(manual, "web", "t", "refund")
        save(manual, by="first")
        manual.commit()

        changing.outcome()
        refused(error, field, later.outcome)
        assert results(auto) == ["first"]
    lift(database18.dsn, database18.state, BY, "principal", "web")


@pytest.mark.parametrize("change", ["rotate a tenant", "revoke a grant", "revoke a principal", "another login"])
def test_an_older_snapshot_does_not_show_an_authority_that_was_taken_away_since(
    database18: Database, change: str
) -> None:
    made_change, error, field = changes(database18)[change]
    with two(database18) as (auto, manual):
        made(auto)
        for level in (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE):
            manual.isolation_level = level
            assert within(manual, "web", "t", "refund") == 1  # the control
            manual.rollback()
        manual.execute("SELECT 1 FROM fencepost.installation")
        made_change(auto)
        with pytest.raises(psycopg.errors.SerializationFailure):
            within(manual, "web", "t", "refund")
        manual.rollback()
        refused(error, field, lambda: within(manual, "web", "t", "refund"))
    lift(database18.dsn, database18.state, BY, "principal", "web")


def test_it_leaves_the_callers_transaction_as_it_was_but_for_the_lock(database18: Database) -> None:
    settings = "SELECT name, setting FROM pg_settings WHERE context NOT IN ('internal', 'postmaster') ORDER BY name"
    mine = (
        "SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND granted"
        " AND (relation = 'fencepost.gate'::regclass OR mode NOT IN ('AccessShareLock', 'ExclusiveLock'))"
    )
    with two(database18) as (auto, manual):
        made(auto)
        within(manual, "web", "t", "refund")
        manual.rollback()
        before = manual.execute(settings).fetchall()
        manual.row_factory = dict_row  # type: ignore[assignment]

        within(manual, "web", "t", "refund")

        manual.row_factory = tuple_row
        assert manual.execute(mine).fetchall() == [("RowShareLock",)]
        assert manual.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)
        assert manual.execute(settings).fetchall() == before
        manual.rollback()
        assert manual.execute(mine).fetchall() == []


def test_without_a_transaction_or_an_armed_database_nobody_acts(database18: Database) -> None:
    with two(database18) as (auto, manual):
        made(auto)
        refused(WrongTransaction, "autocommit", lambda: within(auto, "web", "t", "refund"))
        within(manual, "web", "t", "refund")  # the control
        manual.rollback()
        auto.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            within(manual, "web", "t", "refund")
        manual.rollback()
        for changing in (
            lambda: principals.register(auto, BY, "another"),
            lambda: principals.grant(auto, BY, "web", tenant="u", job_class="*"),
            lambda: principals.revoke(auto, BY, "web"),
        ):
            with pytest.raises(NotArmed):
                changing()
        arming.ensure_armed(database18.dsn, database18.state)
        act(auto)


def test_it_takes_transactions_for_asyncio_and_of_an_engine(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        made(conn)

    async def acting() -> None:
        async with await psycopg.AsyncConnection.connect(database18.dsn, autocommit=True) as conn:
            async with conn.transaction():
                assert await within(conn, "web", "t", "refund") == 1
            with pytest.raises(WrongTransaction):
                await within(conn, "web", "t", "refund")
            with pytest.raises(Restricted):
                async with conn.transaction():
                    await within(conn, "web", "t")

    asyncio.run(acting())
    with engine(database18.dsn) as made_engine, Session(made_engine) as session:
        assert within(session, "web", "t", "refund") == 1
        session.rollback()
        with pytest.raises(Restricted):
            within(session, "other", "t", "refund")


def test_a_principal_of_a_login_is_nobody_elses_and_only_who_runs_user_code_may_ask(databases18: Databases) -> None:
    with separated(databases18) as roles:
        one, other = roles.login("producer"), roles.login("executor")
        with roles.database.connect(autocommit=True) as conn:
            principals.register(conn, BY, "web", login=roles.name("producer"))
            principals.grant(conn, BY, "web", tenant="*", job_class="*")
            made(conn, "anyone")
        with one.connect(autocommit=True) as a, other.connect(autocommit=True) as b:
            act(a)
            act(b, "anyone")  # the control
            refused(Restricted, "principal", lambda: act(b))
            for login in (roles.login("reader"), roles.login("armer"), roles.login("authority_admin")):
                with login.connect(autocommit=True) as c, pytest.raises(psycopg.errors.InsufficientPrivilege):
                    act(c, "anyone")
            for late in (
                lambda: principals.register(a, BY, "web"),
                lambda: principals.grant(a, BY, "web", tenant="t", job_class="*"),
                lambda: principals.revoke(a, BY, "web"),
                lambda: a.execute("DELETE FROM fencepost.principal_grant"),
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    late()
            with roles.login("authority_admin").connect(autocommit=True) as admin:
                principals.grant(admin, BY, "anyone", tenant="u", job_class="*")
                assert len(principals.granted(admin)) == 3
            with restricted(roles.database, "principal", roles.name("executor")):
                refused(Restricted, "principal", lambda: act(b, "anyone"))
                act(a, "anyone")


def test_every_change_of_a_principal_is_one_entry_of_the_history(database18: Database) -> None:
    newest = "SELECT seq, kind, detail FROM fencepost.authority_log ORDER BY seq DESC LIMIT 1"
    acts: tuple[tuple[str, dict[str, Any], Callable[[Conn, By], object]], ...] = (
        ("registered", {"login": "eve"}, lambda conn, by: principals.register(conn, by, "web", login="eve")),
        (
            "granted",
            {"tenant": "t", "class": "*", "epoch": 1},
            lambda conn, by: principals.grant(conn, by, "web", tenant="t", job_class="*"),
        ),
        ("revoked", {"tenant": "t", "class": None, "grants": 1}, lambda conn, by: principals.revoke(conn, by, "web", tenant="t")),
    )  # fmt: skip
    with database18.connect(autocommit=True) as conn:
        for kind, detail, change in acts:
            before = conn.execute(newest).fetchone()
            assert before is not None
            change(conn, By("ann", "why", "ticket 7", before[0]))
            entry = conn.execute(newest).fetchone()
            assert entry is not None and entry[:2] == (before[0] + 1, kind)
            who = {"actor": "ann", "reason": "why", "evidence": "ticket 7", "principal": "web"}
            assert entry[2] == who | detail
            with pytest.raises(WrongVersion):
                change(conn, By("ann", "why", version=before[0]))
        assert principals.revoke(conn, BY, "web") == 0
        refused(InvalidInput, "principal", lambda: principals.grant(conn, BY, "nobody", tenant="t", job_class="*"))
        refused(InvalidInput, "reason", lambda: principals.register(conn, By("ann", ""), "other"))
        assert conn.execute("SELECT fencepost.verify_authority()").fetchone() == (None,)
