"""What a run stands on: a PostgreSQL of its own, a proxy in front of it, the provider, and children that are supervised."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.chaos.provider import Accepted, read
from psycopg.conninfo import make_conninfo

from stack import places
from stack.postgres import PostgresServer
from support.database import Database, Databases
from support.processes import Child, wait_for
from support.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("", "schemas", "relay", "consumer", "jobs", "operate", "compose", "tests")
PYTHONPATH = os.pathsep.join(str(ROOT / root) for root in ROOTS)


class Stage:
    """Opened and closed as one; `migrated` says whether the database has our schema."""

    def __init__(self, seed: int, *, major: str = "18", migrated: bool = True) -> None:
        self.seed = seed
        self._major = major
        self._migrated = migrated
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self.folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            self.server = self._opened.enter_context(PostgresServer(self._major))
            databases = Databases(self.server.dsn, self.folder)
            self.database: Database = databases.migrated() if self._migrated else databases.empty()
            self.proxy = self._opened.enter_context(Proxy(self.server.port))
            self.port = places.free_port()
            self.provider = self.child(
                "provider",
                *("-m", "bench.chaos.provider", "--port", str(self.port)),
                *("--ledger", str(self.ledger_path), "--seed", str(self.seed)),
            )
            self.provider.start()
            wait_for(lambda: places.listens(self.port), 20, "the provider to listen")
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def ledger_path(self) -> Path:
        """Where the provider keeps what it accepted."""
        return self.folder / "ledger.jsonl"

    def ledger(self) -> list[Accepted]:
        """Everything that the provider accepted."""
        return read(self.ledger_path)[0]

    @property
    def through_proxy(self) -> str:
        """The database as the workers reach it."""
        return make_conninfo(self.database.dsn, port=self.proxy.port)

    @property
    def provider_url(self) -> str:
        """Where the workers find the provider."""
        return f"http://{places.LOOPBACK}:{self.port}"

    def child(self, name: str, *arguments: str, python: str = sys.executable, **env: str) -> Child:
        """A child that ends with the stage; its output is in the stage's folder."""
        log = self.folder / f"{name}.log"
        made = Child(arguments, output=log, env={"PYTHONPATH": PYTHONPATH, **env}, python=python)
        self._opened.callback(made.kill)
        return made
