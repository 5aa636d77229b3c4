"""`fencepost doctor`: one line for each thing that must be so, with what to do where it is not; changes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, assert_never

import psycopg
import typer
from psycopg import Connection
from rich.console import Console
from rich.text import Text

from fencepost.operate import (
    authority_checks,
    contract_checks,
    finished,
    inbox,
    lifecycle_checks,
    printing,
    protected,
    queues,
    retention,
    schedules,
    settings,
    unknown_effects,
)
from fencepost.operate.findings import Finding, Level, fail, ok, warn
from fencepost.operate.refusals import ExitCode, line_of
from fencepost.schemas.connect import address, connect
from fencepost.schemas.errors import Unreachable
from fencepost.schemas.witness import Witness

__all__ = ["doctor", "examine", "show"]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Look at connection, contract, authority and settings; exit code 1 when something must be changed."""
    chosen = settings.load()
    bell = chosen.relay.doorbell or chosen.worker.doorbell
    if show(examine(chosen.dsn(), chosen.outside(), doorbell=bell), as_json=as_json):
        raise typer.Exit(int(ExitCode.REFUSED))


def show(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints findings as they come, or all of them as JSON; returns how many failed."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            _show(finding)
    failed = sum(f.level is Level.FAIL for f in found)
    warned = sum(f.level is Level.WARN for f in found)
    if as_json:
        printing.as_json([asdict(f) for f in found])
    else:
        printing.say(f"{len(found)} checks, {failed} failed, {warned} with a warning")
    return failed


def examine(dsn: str, state: Path | Witness, *, doorbell: bool = False) -> Iterator[Finding]:
    """Every finding, in the order in which one would look; stops where the rest cannot be looked at."""
    yield _variables()
    try:
        conn = connect(dsn, autocommit=True)
    except Unreachable as error:
        yield fail("connection", line_of(error))
        return
    with conn:
        yield ok("connection", f"{address(dsn)} answers")
        for check in (contract_checks.server, contract_checks.encoding):
            yield _checked(check, conn)
        yield _checked(lambda c: contract_checks.pooler(c, dsn), conn, "pooler")
        if doorbell:
            yield _checked(lambda c: contract_checks.doorbell(c, dsn), conn, "doorbell")
        missing = contract_checks.installed(conn)
        if missing is not None:
            yield missing
            return
        for check in (
            contract_checks.migrations,
            contract_checks.public,
            contract_checks.definers,
            contract_checks.roles,
        ):
            yield _checked(check, conn)
        yield from lifecycle_checks.loops(conn)
        yield _checked(lifecycle_checks.author, conn)
        yield _checked(lifecycle_checks.owners, conn, "owner")
        yield _checked(lambda c: authority_checks.armed(c, state), conn, "armed")
        yield _checked(lambda c: authority_checks.witness(c, state), conn, "witness")
        yield _checked(authority_checks.heartbeat, conn)
        yield _checked(retention.recycling, conn)
        yield _checked(inbox.remembering, conn, "inbox")
        yield _checked(inbox.set_aside, conn, "deadletters")
        yield _checked(finished.archiving, conn, "archive")
        yield _checked(protected.whole, conn, "protected")
        yield _checked(queues.paused, conn, "queues")
        yield _checked(unknown_effects.unsettled, conn, "effects")
        yield _checked(schedules.on_time, conn, "schedules")


def _checked(check: Callable[[Connection[Any]], Finding], conn: Connection[Any], name: str = "") -> Finding:
    """The finding, or why it could not be made: a check that cannot look never says ok."""
    name = name or check.__name__
    try:
        return check(conn)
    except psycopg.errors.InsufficientPrivilege:
        return warn(name, "this login may not look; use one with the reader role")
    except psycopg.Error as error:
        return fail(name, line_of(error))


def _variables() -> Finding:
    unknown = settings.unknown_variables()
    if not unknown:
        return ok("settings", "every FENCEPOST_* variable is known")
    shown = [f"{name}{_meant(name)}" for name in unknown[:5]]
    return warn("settings", f"nothing reads {', '.join(shown)}; correct or unset")


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, settings.known_variables(), n=1, cutoff=0.8)
    return f" (meant {close[0]}?)" if close else ""


def _show(finding: Finding) -> None:
    if not printing.is_terminal():
        printing.say(f"{finding.level.value:<4}  {finding.check:<11}  {finding.message}")
        return
    match finding.level:
        case Level.OK:
            style = "green"
        case Level.WARN:
            style = "yellow"
        case Level.FAIL:
            style = "bold red"
        case _ as never:
            assert_never(never)
    Console().print(Text.assemble((f"{finding.level.value:<4}", style), f"  {finding.check:<11}  ", finding.message))
