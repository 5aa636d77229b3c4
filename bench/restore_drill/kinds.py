"""The five ways a database comes back older than it was; each on a server of its own, each with PostgreSQL's own tools."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from stack import places
from stack.postgres import PostgresServer, binaries
from stack.process import run

__all__ = ["KINDS", "Kind"]

NAME = "drill"
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
WAIT_SECONDS = 60.0

CAUGHT_UP: LiteralString = "SELECT pg_last_wal_replay_lsn() >= %(lsn)s::pg_lsn"
ARCHIVED: LiteralString = "SELECT coalesce(last_archived_wal >= %(file)s, false) FROM pg_stat_archiver"
WRITES: LiteralString = "SELECT NOT pg_is_in_recovery()"


class Kind:
    """A live database, a copy of it at one moment, and that copy in its place: `dsn` is where its users find it.

    ``differs`` is what the witness must notice first.
    """

    name = ""
    words = ""
    differs = ""

    def __init__(self, major: str = "18") -> None:
        self.major = major
        self.settings: dict[str, str] = {}
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self.server = self._opened.enter_context(PostgresServer(self.major, settings=self.settings))
            self.folder = places.service_folder("copies")
            self.admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(NAME)))
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def dsn(self) -> str:
        """The database as its superuser reaches it."""
        return make_conninfo(self.server.dsn, dbname=NAME)

    def prepare(self) -> None:
        """What has to happen before the day begins."""

    def copy(self) -> None:
        """Keeps the database as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Puts the kept one in the place of the live one; what happened since is lost."""
        raise NotImplementedError

    def admin(self, *statements: sql.Composed) -> None:
        """Statements at the database `postgres`, each by itself."""
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement)

    def tool(self, program: str, *arguments: str) -> None:
        """One of PostgreSQL's own programs; raises Unavailable with its last lines when it fails."""
        run([str(binaries(self.major) / program), *arguments], user=places.plain_user(), env=ENV, cwd=self.folder)

    def plain(self, *command: str) -> None:
        """A command as the user of the server."""
        run(command, user=places.plain_user(), env=ENV, cwd=self.folder)


class FileCopy(Kind):
    """The folder of a stopped server, copied."""

    name = "file-copy"
    words = "file copy of a stopped cluster"
    differs = "behind"

    def copy(self) -> None:
        self.server.stop()
        self.plain("cp", "-a", str(self.server.data), str(self.folder / "data"))
        self.server.start()

    def restore(self) -> None:
        self.server.stop()
        self.plain("rm", "-rf", str(self.server.data))
        self.plain("cp", "-a", str(self.folder / "data"), str(self.server.data))
        self.server.start()


class PointInTime(Kind):
    """A base backup from before, and the archived log up to a named moment."""

    name = "point-in-time"
    words = "base backup with point-in-time recovery"
    differs = "timeline"

    def __init__(self, major: str = "18") -> None:
        super().__init__(major)
        self._archive = places.service_folder("archive")
        self.settings = {"archive_mode": "on", "archive_command": f"'cp %p {self._archive}/%f'"}

    def prepare(self) -> None:
        self.tool("pg_basebackup", "--dbname", self.server.dsn, "-D", str(self.folder / "base"), "--checkpoint=fast")

    def copy(self) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            conn.execute("SELECT pg_create_restore_point(%s)", (NAME,))
            row = conn.execute("SELECT pg_walfile_name(pg_current_wal_insert_lsn())").fetchone()
            assert row is not None
            conn.execute("SELECT pg_switch_wal()")
            wait(lambda: _true(conn, ARCHIVED, {"file": row[0]}), "the log to be archived")

    def restore(self) -> None:
        self.server.stop()
        data = self.server.data
        self.plain("rm", "-rf", str(data))
        self.plain("cp", "-a", str(self.folder / "base"), str(data))
        with (data / "postgresql.conf").open("a") as file:
            file.write(f"restore_command = 'cp {self._archive}/%f %p'\n")
            file.write(f"recovery_target_name = '{NAME}'\nrecovery_target_action = 'promote'\n")
        self.plain("touch", str(data / "recovery.signal"))
        self.server.start()
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            wait(lambda: _true(conn, WRITES, {}), "the recovery to end")


class DumpNew(Kind):
    """A dump, restored into a new database that takes the old one's name."""

    name = "dump-new"
    words = "dump and restore into a new database"
    differs = "database"

    def copy(self) -> None:
        self.tool("pg_dump", "--dbname", self.dsn, "--format=custom", "--file", str(self.dump))

    def restore(self) -> None:
        database = sql.Identifier(NAME)
        self.admin(
            sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(database),
            sql.SQL("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = {}").format(NAME),
            sql.SQL("ALTER DATABASE {} RENAME TO lost").format(database),
            sql.SQL("CREATE DATABASE {}").format(database),
        )
        self.tool("pg_restore", "--dbname", self.dsn, "--exit-on-error", str(self.dump))

    @property
    def dump(self) -> Path:
        """The file."""
        return self.folder / "dump"


class DumpOver(DumpNew):
    """A dump, restored over the same database."""

    name = "dump-over"
    words = "dump and restore over the same database"
    differs = "behind"

    def restore(self) -> None:
        self.tool("pg_restore", "--dbname", self.dsn, "--clean", "--if-exists", "--exit-on-error", str(self.dump))


class Standby(Kind):
    """A standby that did not get the last commits, promoted when its primary is gone."""

    name = "standby"
    words = "standby promoted with lost commits"
    differs = "timeline"

    def copy(self) -> None:
        self._standby = self._opened.enter_context(PostgresServer(self.major, standby_of=self.server))
        self._standby.start()
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            row = conn.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        with psycopg.connect(self._standby.dsn, autocommit=True) as conn:
            wait(lambda: _true(conn, CAUGHT_UP, {"lsn": row[0]}), "the standby to catch up")
        self._standby.stop()

    def restore(self) -> None:
        self.server.kill()
        self._standby.start()
        self._standby.promote()
        self.server = self._standby


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (FileCopy, PointInTime, DumpNew, DumpOver, Standby)}


def wait(found: Callable[[], bool], what: str) -> None:
    """Returns once it is so; TimeoutError after a minute."""
    until = time.monotonic() + WAIT_SECONDS
    while not found():
        if time.monotonic() > until:
            raise TimeoutError(f"waited for {what}")
        time.sleep(0.05)


def _true(conn: psycopg.Connection[Any], query: LiteralString, values: dict[str, object]) -> bool:
    return conn.execute(query, values).fetchone() == (True,)
