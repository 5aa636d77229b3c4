"""The loop: within one session of pytest, one mutant after the other in every database there is, until a test fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, cast

import psycopg
import pytest
from _pytest.runner import runtestprotocol
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.schemas import migrate
from mutation import catalog
from mutation.areas import Area
from mutation.predicates import Mutant

Verdict = Literal["killed", "survived", "equivalent", "not equivalent", "does not run"]
MAJOR = "18"
ITEM_SECONDS = 60.0
# A test that takes longer is tried only for mutants of the files that name it.
QUICK_SECONDS = 3.0
# After the tests of its own file this one, which notices most of what changes a state.
THEN = "model/test_conformance.py"
OURS = "SELECT datname FROM pg_database WHERE datname ~ '^fp_' ORDER BY 1"
ALONE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: who noticed it, and why."""

    mutant: Mutant
    verdict: Verdict
    by: str
    why: str
    seconds: float
    tried: int


class Hang(Exception):
    """A test that a mutant keeps from ending."""


class Loop:
    """Runs tests against mutants: `choose` picks them once those of the catalog are known too, `tell` hears of each outcome."""

    def __init__(
        self,
        area: Area,
        made: Iterable[Mutant],
        choose: Callable[[list[Mutant]], list[Mutant]],
        equivalent: dict[str, str],
        tell: Callable[[Outcome], None],
        *,
        near: bool = False,
        first: tuple[str, ...] = (),
    ) -> None:
        self._area = area
        self._made = list(made)
        self._choose = choose
        self._equivalent = equivalent
        self._tell = tell
        self._near = near
        self._first = first
        self._items: list[pytest.Item] = []
        self._wins: dict[tuple[str, str], int] = {}
        self._cost: dict[str, float] = {}
        self._unsound: set[str] = set()
        self._why = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "pg15" not in item.nodeid and "-15]" not in item.nodeid]
        self._items = list(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            self._why = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}".split("\n")[0][:160]
            if _does_not_run(call.excinfo.value):
                self._why = f"SQL: {self._why}"
        return report

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("tests cannot be collected")
        # A first test makes the services and the database that the catalog is read from.
        control = self._run(self._items[0])
        assert control is None, f"fails without any mutant: {self._items[0].nodeid}: {control}"
        server = _server(session.config)
        mutants = list(self._made)
        if self._area.tables:
            mutants += _of_the_catalog(server)
        for mutant in self._choose(mutants):
            self._tell(self._try(server, mutant))
        # Whoever asks for the exit status of pytest itself: nothing of it is ours.
        session.testsfailed = 0
        return True

    def _try(self, server: str, mutant: Mutant) -> Outcome:
        began, tried, unexplained = time.monotonic(), 0, mutant.key not in self._equivalent
        for item in self._candidates(mutant, everything=unexplained and not self._near):
            with _in_place(server, mutant):
                why = self._run(item)
            tried += 1
            if why is None:
                continue
            if self._run(item) is not None:
                # It fails without the mutant too, so it says nothing.
                self._unsound.add(item.nodeid)
                print(f"{'':>12} says nothing, it fails without a mutant too: {item.nodeid}: {self._why}", flush=True)
                continue
            for name in (mutant.file, mutant.function):
                self._wins[name, item.nodeid] = self._wins.get((name, item.nodeid), 0) + 1
            verdict: Verdict = "killed" if unexplained else "not equivalent"
            if why.startswith("SQL: ") and not mutant.key.endswith(": does nothing"):
                verdict = "does not run"
            return Outcome(mutant, verdict, item.nodeid, why, time.monotonic() - began, tried)
        verdict = "survived" if unexplained else "equivalent"
        return Outcome(mutant, verdict, "", self._equivalent.get(mutant.key, ""), time.monotonic() - began, tried)

    def _candidates(self, mutant: Mutant, *, everything: bool) -> list[pytest.Item]:
        near = self._area.first[mutant.file]
        words = [word.rstrip("s") for word in mutant.function.split("_") if word]

        def order(item: pytest.Item) -> tuple[float, ...]:
            wins = 2 * self._wins.get((mutant.function, item.nodeid), 0) + self._wins.get((mutant.file, item.nodeid), 0)
            place = next((n for n, file in enumerate(near) if file in item.nodeid), len(near))
            alike = sum(word in item.nodeid.lower() for word in words)
            turn = 0 if place < len(near) else 1 if THEN in item.nodeid else 2
            turn -= 3 * any(name in item.nodeid for name in self._first)
            return turn, -wins, -alike, place, self._cost.get(item.nodeid, 0.0)

        def may(item: pytest.Item) -> bool:
            if item.nodeid in self._unsound:
                return False
            if any(file in item.nodeid for file in (*near, THEN)):
                return True
            quick = self._cost.get(item.nodeid, 0.0) <= QUICK_SECONDS
            return everything and quick and any(file in item.nodeid for file in self._area.tests)

        return sorted((item for item in self._items if may(item)), key=order)

    def _run(self, item: pytest.Item) -> str | None:
        """Why the test failed, or nothing."""
        self._why = ""
        began = time.monotonic()
        previous = signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, ITEM_SECONDS)
        try:
            # What the last test shared with its neighbours ends only when this one does not share it.
            item.session._setupstate.teardown_exact(item)  # pyright: ignore[reportPrivateUsage]
            # Nothing but the services is kept: what a module shares may be what a mutant left behind.
            reports = runtestprotocol(item, log=False, nextitem=cast(pytest.Item, item.session))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        failed = any(report.failed for report in reports)
        if not failed:
            self._cost[item.nodeid] = time.monotonic() - began
        return (self._why or "failed") if failed else None


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"still running after {ITEM_SECONDS:.0f} s")


def _does_not_run(error: BaseException | None) -> bool:
    """Whether PostgreSQL could not even read the mutant: that proves nothing about a guard."""
    while error is not None:
        state = getattr(error, "sqlstate", None)
        if isinstance(state, str) and state in ("42601", "42804", "42883", "42703", "42702", "42P01", "42P10", "42846"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _server(config: pytest.Config) -> str:
    """The PostgreSQL that the tests of this session use."""
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "SERVICES"):
            address: str = config.stash[plugin.SERVICES].postgres(MAJOR).address
            return address
    raise AssertionError("the tests' own conftest.py is not loaded")


def _databases(server: str) -> list[str]:
    with psycopg.connect(server, autocommit=True) as conn:
        return [make_conninfo(server, dbname=name) for (name,) in conn.execute(OURS)]


def _of_the_catalog(server: str) -> list[Mutant]:
    for dsn in _databases(server):
        with psycopg.connect(dsn, autocommit=True) as conn:
            if conn.execute("SELECT to_regclass('fencepost.job') IS NOT NULL").fetchone() == (True,):
                return catalog.mutants(conn)
    raise AssertionError("no migrated database was made")


@contextmanager
def _in_place(server: str, mutant: Mutant) -> Generator[None]:
    """The mutant in every database that is there, and in every one that is migrated meanwhile."""
    real = migrate.functions

    def mutated() -> list[migrate.Migration]:
        return [
            replace(made, text=made.text.replace(mutant.undo.encode(), mutant.apply.encode()))
            if made.name == mutant.file
            else made
            for made in real()
        ]

    migrate.functions = mutated
    try:
        _everywhere(server, mutant.apply)
        yield
    finally:
        migrate.functions = real
        _everywhere(server, mutant.undo)


def _everywhere(server: str, statement: str) -> None:
    for dsn in _databases(server):
        with psycopg.connect(dsn, autocommit=True) as conn:
            if conn.execute("SELECT to_regclass('fencepost.job') IS NULL").fetchone() == (True,):
                continue
            try:
                _act(conn, statement)
            except psycopg.errors.LockNotAvailable:
                conn.execute(ALONE)
                _act(conn, statement)


def _act(conn: psycopg.Connection[Any], statement: str) -> None:
    with conn.transaction():
        owner = conn.execute("SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'fencepost'").fetchone()
        assert owner is not None
        conn.execute("SET LOCAL lock_timeout = '2s'")
        conn.execute("SET LOCAL check_function_bodies = off")
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.SQL(owner[0])))
        conn.execute(statement.encode())
