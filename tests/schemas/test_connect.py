"""Connections: a silent server is left within our own deadline, and a server off this machine must be verified."""

import asyncio
import time

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fencepost.schemas.connect import NoAnswer, checked_address, connect, connect_async
from fencepost.schemas.errors import ConfigError
from support.database import Database
from support.processes import wait_for
from support.proxy import Proxy

LIMIT = 0.6
# No promise of ours: how far a machine that does other things as well may be behind.
SLACK = 30.0


def through(proxy: Proxy, database: Database) -> str:
    return make_conninfo(database.dsn, port=proxy.port)


def port_of(database: Database) -> int:
    return int(str(conninfo_to_dict(database.dsn)["port"]))


def test_a_server_that_acknowledges_and_never_answers_is_left_at_the_deadline(database18: Database) -> None:
    with Proxy(port_of(database18)) as proxy:
        with connect(through(proxy, database18), autocommit=True) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            conn.answer_within = LIMIT
            proxy.blackhole()
            began = time.monotonic()
            with pytest.raises(NoAnswer):
                conn.execute("SELECT 1")
            assert LIMIT <= time.monotonic() - began < LIMIT + SLACK
            assert conn.closed
        proxy.heal()
        connect(through(proxy, database18)).close()


def test_a_silent_server_in_the_middle_of_a_transaction_and_of_a_pipeline_is_left_too(database18: Database) -> None:
    with Proxy(port_of(database18)) as proxy:
        for pipelined in (False, True):
            with pytest.raises(NoAnswer), connect(through(proxy, database18)) as conn:
                with conn.transaction():
                    conn.execute("SELECT 1")
                conn.answer_within = LIMIT
                proxy.blackhole()
                if pipelined:
                    with conn.pipeline(), conn.transaction():
                        conn.execute("SELECT 1").fetchone()
                else:
                    with conn.transaction():
                        conn.execute("SELECT 1")
            assert conn.closed
            proxy.heal()


def test_an_asyncio_connection_leaves_a_silent_server_at_the_deadline_while_others_go_on(database18: Database) -> None:
    async def scene(proxy: Proxy) -> None:
        silent = await connect_async(through(proxy, database18), autocommit=True)
        direct = await connect_async(database18.dsn, autocommit=True)
        async with silent, direct:
            assert await (await silent.execute("SELECT 1")).fetchone() == (1,)  # the control
            silent.answer_within = LIMIT
            proxy.blackhole()
            began = time.monotonic()
            waiting = asyncio.create_task(silent.execute("SELECT 1"))
            while not waiting.done():
                assert await (await direct.execute("SELECT 2")).fetchone() == (2,)
                await asyncio.sleep(0.05)
            assert isinstance(waiting.exception(), NoAnswer)
            assert LIMIT <= time.monotonic() - began < LIMIT + SLACK
            assert silent.closed and not direct.closed

    with Proxy(port_of(database18)) as proxy:
        asyncio.run(scene(proxy))


def test_an_asyncio_wait_for_a_lock_ends_at_the_deadline_on_both_sides(database18: Database) -> None:
    async def scene() -> None:
        async with await connect_async(database18.dsn, autocommit=True, answer_within=LIMIT) as conn:
            with pytest.raises(NoAnswer):
                await conn.execute("SELECT FROM locked")

    with database18.connect(autocommit=True) as direct:
        direct.execute("CREATE TABLE locked (value int)")
        with direct.transaction():
            direct.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
            asyncio.run(scene())
            wait_for(lambda: direct.execute(WAITING).fetchone() == (0,), 10, "nobody to wait for the lock")


def test_a_wait_for_a_lock_ends_at_the_deadline_on_both_sides(database18: Database) -> None:
    with database18.connect(autocommit=True) as direct, connect(database18.dsn) as conn:
        direct.execute("CREATE TABLE locked (value int)")
        conn.execute("SELECT FROM locked")
        conn.rollback()
        conn.answer_within = LIMIT
        with direct.transaction():
            direct.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(NoAnswer):
                conn.execute("SELECT FROM locked")
            wait_for(lambda: direct.execute(WAITING).fetchone() == (0,), 10, "nobody to wait for the lock")


WAITING = """SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'"""


def test_a_long_statement_is_allowed_where_no_deadline_was_asked_for(database18: Database) -> None:
    with connect(database18.dsn, autocommit=True) as conn:
        assert conn.execute("SELECT 1 FROM pg_sleep(0.8)").fetchone() == (1,)
    with pytest.raises(NoAnswer), connect(database18.dsn, autocommit=True, answer_within=LIMIT) as conn:
        conn.execute("SELECT 1 FROM pg_sleep(10)")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app@127.0.0.1/app",
        "postgresql://app@127.9.9.9,localhost/app",
        "postgresql://app@[::1]:5432/app",
        "host=/var/run/postgresql dbname=app",
        "dbname=app",
        "postgresql://app@db.example/app?sslmode=verify-full",
    ],
)
def test_addresses_of_this_machine_and_verified_servers_are_taken(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE"):
        monkeypatch.delenv(name, raising=False)
    assert checked_address(dsn, insecure=False) == dsn


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:hunter2@db.example/app",
        "postgresql://app:hunter2@127.0.0.1,db.example/app",
        "postgresql://app:hunter2@db.example/app?sslmode=require",
        "postgresql://app:hunter2@localhost/app?hostaddr=192.0.2.7",
    ],
)
def test_a_server_off_this_machine_that_would_not_be_verified_is_refused(dsn: str) -> None:
    assert checked_address(dsn, insecure=True) == dsn
    with pytest.raises(ConfigError) as caught:
        checked_address(dsn, insecure=False)
    assert caught.value.field == "database"
    assert "hunter2" not in str(caught.value)


def test_the_environment_of_libpq_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOSTADDR", "PGSSLMODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGHOST", "db.example")
    with pytest.raises(ConfigError):
        checked_address("dbname=app", insecure=False)
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert checked_address("dbname=app", insecure=False)
