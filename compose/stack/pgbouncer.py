"""PgBouncer in transaction mode in front of one PostgreSQL server, on loopback, as a plain user."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from . import places
from .process import Process, Unavailable, run

START_SECONDS = 15.0
PROGRAM = "pgbouncer"


class PgBouncer:
    """A pooler, in transaction mode unless told otherwise, for every database of the target; `pool_size` server connections per database."""

    def __init__(
        self, target: str, *, pool_size: int = 4, users: Sequence[str] = ("postgres",), mode: str = "transaction"
    ) -> None:
        self._program = program()
        self.version = run([self._program, "--version"], user=places.plain_user(), cwd=Path("/")).split()[1]
        self.pool_size = pool_size
        self.port = places.free_port()
        self._target = target
        self._folder = places.service_folder("pgbouncer")
        ini = self._folder / "pgbouncer.ini"
        accounts = self._folder / "users.txt"
        accounts.write_text("".join(f'"{user}" ""\n' for user in users))
        server = conninfo_to_dict(target)
        lines = [
            "[databases]",
            f"* = host={server['host']} port={server.get('port', '5432')}",
            "[pgbouncer]",
            f"listen_addr = {places.LOOPBACK}",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = trust",
            f"auth_file = {accounts}",
            "admin_users = postgres",
            f"pool_mode = {mode}",
            f"default_pool_size = {pool_size}",
            "reserve_pool_size = 0",
            "max_client_conn = 200",
            "server_connect_timeout = 5",
            "server_login_retry = 1",
            "ignore_startup_parameters = extra_float_digits",
        ]
        ini.write_text("\n".join(lines) + "\n")
        for file in (ini, accounts):
            places.hand_over(file)
        self._process = Process(
            "PgBouncer",
            [self._program, str(ini)],
            log=self._folder / "log",
            cwd=self._folder,
            user=places.plain_user(),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def dsn(self) -> str:
        """Address of the target's own database through the pooler."""
        return self.in_front_of(self._target)

    @property
    def pid(self) -> int:
        """The pooler's process id."""
        return self._process.pid

    def in_front_of(self, dsn: str) -> str:
        """The same database and user as `dsn`, through the pooler."""
        return make_conninfo(dsn, host=places.LOOPBACK, port=self.port)

    def start(self) -> None:
        """Starts the pooler and returns when a query passes through it; StartFailed with its log after 15 s."""
        self._process.start()
        self._process.wait_ready(self._answers, START_SECONDS)

    def stop(self) -> None:
        """Ends the pooler at once; its clients see a broken connection."""
        self._process.stop()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def close(self) -> None:
        """Stops the pooler and removes its files."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.dsn, connect_timeout=2, autocommit=True, prepare_threshold=None) as conn:
                conn.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


def program() -> str:
    """The pgbouncer program; raises Unavailable, saying what to run."""
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Unavailable("PgBouncer: not found; as root on Debian run compose/install")
    return found
