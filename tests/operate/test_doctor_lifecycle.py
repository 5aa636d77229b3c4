"""What `fencepost doctor` says of a second owner of jobs, a copied database, and poolers in a wrong mode."""

import json
import uuid
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.jobs.authority import By
from fencepost.jobs.claim import JobClassPolicy, claim, register_class
from fencepost.jobs.lifecycle import hand_over
from fencepost.jobs.submit import submit
from fencepost.operate.lifecycle_checks import LOOPS, writers
from fencepost.schemas.errors import SecondOwner
from fencepost.schemas.identity import JobClass
from stack.obtain import Obtained
from stack.pgbouncer import PgBouncer
from stack.postgres import PostgresServer
from support.command_line import Fencepost, Result
from support.database import Database
from support.restores import copy_database
from support.services import Pooler

CLASS = "report.make"
THEM = "old-queue"
WHY = ("--reason", "moves", "--actor", "ann")
SECOND_AUTHOR = "UPDATE fencepost.job SET exec = $$queued$$"
NOT_PUBLIC = "REVOKE EXECUTE ON FUNCTION fencepost.retry_all FROM PUBLIC"
OTHER = "CREATE FUNCTION public.other() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"


def failing(result: Result) -> dict[str, str]:
    """Message by name of the check, of those that fail."""
    lines = [line.split(maxsplit=2) for line in result.out.splitlines()]
    return {line[1]: line[2] for line in lines if line[0] == "fail"}


def healthy(fencepost: Fencepost, database: Database, **more: str) -> Result:
    """The control: everything is looked at and nothing fails."""
    done = fencepost(database, "doctor", **more)
    assert (done.code, failing(done)) == (0, {}), done.out
    return done


def with_job(database: Database, operation: str = "op-1") -> None:
    """A queued job of a registered class."""
    with database.connect() as conn:
        register_class(conn, JobClassPolicy(JobClass(CLASS)))
        submit(conn, CLASS, tenant="acme", operation=operation, args={})


def test_every_loop_is_listed_and_every_function_that_writes_jobs_is_in_one(
    database: Database, fencepost: Fencepost
) -> None:
    done = healthy(fencepost, database)
    for loop, functions in LOOPS.items():
        assert f"ok    loop         {loop}: through {', '.join(functions)}\n" in done.out
    with database.connect(autocommit=True) as conn:
        found = [(schema, name) for schema, name, _ in writers(conn)]
    listed = sorted(("fencepost", name) for functions in LOOPS.values() for name in functions)
    assert sorted(found) == listed


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (
            f"CREATE FUNCTION public.cleanup() RETURNS void LANGUAGE sql AS '{SECOND_AUTHOR}'",
            "author",
            "a second author writes jobs: public.cleanup;",
        ),
        (
            "CREATE FUNCTION public.cleanup() RETURNS void LANGUAGE sql BEGIN ATOMIC DELETE FROM fencepost.agenda; END",
            "author",
            "a second author writes jobs: public.cleanup;",
        ),
        (
            f"CREATE FUNCTION fencepost.retry_all() RETURNS void LANGUAGE sql AS '{SECOND_AUTHOR}'; {NOT_PUBLIC}",
            "author",
            "a second author writes jobs: fencepost.retry_all;",
        ),
        ("GRANT UPDATE (exec) ON fencepost.job TO PUBLIC", "author", "public"),
        ("ALTER TABLE fencepost.job DISABLE TRIGGER agenda_update", "author", "agenda_update of the jobs is missing"),
        (
            f"{OTHER}; CREATE TRIGGER other BEFORE UPDATE ON fencepost.job FOR EACH ROW EXECUTE FUNCTION public.other()",
            "author",
            "other changes jobs as they are written",
        ),
        ("CREATE RULE other AS ON DELETE TO fencepost.job DO INSTEAD NOTHING", "author", "other changes jobs"),
        ("DROP FUNCTION fencepost._reap", "loop", "reaper of expired leases: _reap is not there"),
    ],
)
def test_a_second_author_is_one_line_and_exit_code_1(
    database18: Database, fencepost: Fencepost, damage: str, check: str, words: str
) -> None:
    healthy(fencepost, database18)

    with database18.connect(autocommit=True) as conn:
        conn.execute(damage.encode())
    done = fencepost(database18, "doctor")

    assert done.code == 1
    assert list(failing(done)) == [check], done.out
    assert words in failing(done)[check]


def test_a_login_that_may_write_jobs_past_their_functions_is_named(database18: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database18)
    name = f"fp_writer_{uuid.uuid4().hex[:8]}"
    with database18.connect(autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        try:
            healthy(fencepost, database18)
            conn.execute(sql.SQL("GRANT INSERT ON fencepost.agenda TO {}").format(sql.Identifier(name)))
            done = fencepost(database18, "doctor")
            conn.execute(sql.SQL("REVOKE ALL ON fencepost.agenda FROM {}").format(sql.Identifier(name)))
            conn.execute(sql.SQL("GRANT pg_write_all_data TO {}").format(sql.Identifier(name)))
            member = fencepost(database18, "doctor")
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {n}; DROP ROLE {n}").format(n=sql.Identifier(name)))
    for told in (done, member):
        assert told.code == 1
        assert failing(told)["author"].startswith(f"{name} may write jobs past their functions; revoke")


def test_a_class_is_handed_over_and_taken_back_by_command(database18: Database, fencepost: Fencepost) -> None:
    with_job(database18)
    assert "fencepost owns every class" in healthy(fencepost, database18).out
    hand = ("jobs", "owner", "hand-over", "--class", CLASS, "--to", THEM, *WHY)

    dry = fencepost(database18, *hand, "--dry-run")
    assert dry.out == f"dry run, nothing was changed: class {CLASS}: from fencepost to {THEM}\n"
    (row,) = json.loads(fencepost(database18, "jobs", "owner", "show", "--json").out)
    assert (row["class"], row["owner"], row["queued"], row["transferred"]) == (CLASS, "fencepost", 1, 0)

    assert fencepost(database18, *hand).out == f"class {CLASS}: from fencepost to {THEM}\n"
    assert THEM in fencepost(database18, "jobs", "owner", "show").out
    told = fencepost(database18, "doctor")
    assert (
        told.code == 0
        and f"warn  owner        nobody here claims what waits for its owner: {CLASS} ({THEM})" in told.out
    )
    assert f"owned by {THEM}" in fencepost(database18, "authority", "status").out

    back = ("jobs", "owner", "take-back", "--class", CLASS, *WHY)
    refused = fencepost(database18, *back)
    assert refused.code == 1 and "[evidence]" in refused.line
    assert fencepost(database18, *back, "--evidence", "stopped").out == f"class {CLASS}: from {THEM} to fencepost\n"
    with database18.connect() as conn:
        assert len(claim(conn, "w", [CLASS], 1)) == 1


def test_a_second_owner_is_refused_until_the_first_has_drained(database18: Database, fencepost: Fencepost) -> None:
    with_job(database18)
    hand = ("jobs", "owner", "hand-over", "--class", CLASS, "--to", THEM, *WHY)
    with database18.connect(autocommit=True) as conn:
        assert len(claim(conn, "w", [CLASS], 1)) == 1
        refused = fencepost(database18, *hand)
        assert refused.code == 1 and "[running]" in refused.line and "jobs pause" in refused.line
        conn.execute("UPDATE fencepost.job SET exec = 'cancelled', attempt = NULL, owner = NULL, lease_until = NULL")
        assert fencepost(database18, *hand).code == 0
        with pytest.raises(SecondOwner):
            claim(conn, "w", [CLASS], 1)


def test_two_owners_at_work_are_one_line_and_exit_code_1(database18: Database, fencepost: Fencepost) -> None:
    with_job(database18)
    with database18.connect(autocommit=True) as conn:
        healthy(fencepost, database18)
        assert len(claim(conn, "w", [CLASS], 1)) == 1
        healthy(fencepost, database18)
        conn.execute("INSERT INTO fencepost.lifecycle (class, implementation) VALUES (%s, %s)", (CLASS, THEM))
    done = fencepost(database18, "doctor")

    assert done.code == 1
    assert list(failing(done)) == ["owner"], done.out
    assert failing(done)["owner"].startswith(f"two owners: jobs run here of {CLASS} ({THEM}); stop those workers")


@contextmanager
def copied(database: Database) -> Generator[Database]:
    """The same database once more beside it, as a dump restored under another name would be, with the original's witness."""
    parts = conninfo_to_dict(database.dsn)
    name = f"{parts['dbname']}_copy"
    with psycopg.connect(make_conninfo(database.dsn, dbname="postgres"), autocommit=True) as conn:
        copy_database(conn, str(parts["dbname"]), name)
        try:
            yield Database(make_conninfo(database.dsn, dbname=name), database.state)
        finally:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_a_copy_is_told_apart_from_a_plain_restart(database18: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database18)
    with copied(database18) as copy:
        done = fencepost(copy, "doctor")
        migrated = fencepost(copy, "migrate")
    healthy(fencepost, database18)

    assert done.code == 1 and set(failing(done)) == {"armed", "witness"}
    assert "another database than the witness saw: a copy or a restore" in failing(done)["armed"]
    assert "fencepost authority recover" in failing(done)["armed"]
    assert migrated.code == 1 and "[database]" in migrated.out


@pytest.mark.parametrize("mode", ["statement", "session"])
def test_a_pooler_that_keeps_no_transaction_together_is_refused(
    database18: Database, pg18: Obtained[PostgresServer], fencepost: Fencepost, mode: str
) -> None:
    assert "direct connection" in healthy(fencepost, database18).out
    with PgBouncer(pg18.address, mode=mode) as pooler:
        behind = Database(pooler.in_front_of(database18.dsn), database18.state)
        done = fencepost(behind, "doctor")

    if mode == "statement":
        assert done.code == 1
        assert (
            "statement mode" in failing(done)["pooler"]
            and "pool_mode to transaction or session" in failing(done)["pooler"]
        )
    else:
        assert (done.code, failing(done)) == (0, {}), done.out
        assert "ok    pooler       a pooler stands in between" in done.out


def test_a_doorbell_behind_a_pooler_in_transaction_mode_is_refused(
    database18: Database, pgbouncer18: Pooler, fencepost: Fencepost
) -> None:
    for setting in ("FENCEPOST_RELAY_DOORBELL", "FENCEPOST_WORKER_DOORBELL"):
        assert "ok    doorbell     a notification arrives" in healthy(fencepost, database18, **{setting: "true"}).out
    behind = Database(pgbouncer18.dsn(database18.dsn), database18.state)
    assert "doorbell" not in healthy(fencepost, behind).out, "nobody asked for one"

    done = fencepost(behind, "doctor", FENCEPOST_WORKER_DOORBELL="true")

    assert done.code == 1 and list(failing(done)) == ["doorbell"]
    assert "connect to the server itself" in failing(done)["doorbell"]


def test_handing_over_twice_by_two_admins_is_refused_by_the_version(database18: Database, fencepost: Fencepost) -> None:
    with_job(database18)
    seen = json.loads(fencepost(database18, "authority", "status", "--json").out)["version"]
    with database18.connect() as conn:
        hand_over(conn, By("ben", "first", version=seen), CLASS, to="a-third")
    late = ("jobs", "owner", "hand-over", "--class", CLASS, "--to", THEM, *WHY, "--evidence", "x")
    refused = fencepost(database18, *late, "--expect-version", str(seen))
    assert refused.code == 1 and "[version]" in refused.line
    assert fencepost(database18, *late, "--expect-version", str(seen + 1)).code == 0
