"""The command line as a caller sees it: exit code, standard output and standard error of one command."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from fencepost.operate.commands import app
from support.database import Database
from support.processes import Child

PASSWORD = "hunter2"
CLI = ("-m", "fencepost.operate.cli")


@dataclass(frozen=True, slots=True)
class Result:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a refusal."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


Fencepost = Callable[..., Result]


def with_password(dsn: str) -> str:
    """The same database by an address with a password, which the server does not ask for and nobody may show."""
    if "://" in dsn:
        return f"{dsn}{'&' if '?' in dsn else '?'}password={PASSWORD}"
    return f"{dsn} password={PASSWORD}"


def environment(database: Database, more: Mapping[str, str]) -> dict[str, str]:
    """The settings of a process that works on this database."""
    return {"FENCEPOST_DATABASE": with_password(database.dsn), "FENCEPOST_STATE": str(database.state), **more}


def run_here(database: Database | None, *arguments: str, **more: str) -> Result:
    """Runs a command in this process."""
    done = CliRunner().invoke(app, list(arguments), env=more if database is None else environment(database, more))
    assert PASSWORD not in done.output, "the password was shown"
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return Result(done.exit_code, done.stdout, done.stderr)


def run_apart(database: Database, *arguments: str, folder: Path, **more: str) -> "subprocess.Popen[str]":
    """Starts a command as a process of its own, for races between two of them."""
    return subprocess.Popen(
        [sys.executable, *CLI, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(database, more),
    )


def running(database: Database, *arguments: str, folder: Path, **more: str) -> Child:
    """A command that stays until it is told to end; use it as a context manager."""
    return Child([*CLI, *arguments], output=folder / "output", env=environment(database, more))
