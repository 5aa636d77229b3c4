"""Connections as every part of fencepost needs them: with deadlines, without prepared statements, errors without secrets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from ipaddress import ip_address
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import Row

from fencepost.schemas.errors import ConfigError, Unreachable

CONNECT_TIMEOUT_SECONDS = 5
CANCEL_SECONDS = 1.0
VERIFIED = "verify-full"

ANSWER_SECONDS = 30.0
"""How long a statement of our own may take where nothing else is said."""

Value = TypeVar("Value")

_OPTIONS: dict[str, Any] = {
    # A pooler in transaction mode gives every transaction another session.
    "prepare_threshold": None,
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "application_name": "fencepost",
    # A peer that is gone is noticed; our own deadlines cover a peer that is silent.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def address(dsn: str) -> str:
    """Host, port and database of a connection string, never a user or a password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "an unreadable connection string"
    return f"postgresql://{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def is_loopback(dsn: str) -> bool:
    """True when every host of the connection string (else of PGHOSTADDR, PGHOST) is this machine."""
    return all(_is_here(host) for host in _hosts(conninfo_to_dict(dsn)))


def checked_address(dsn: str, *, insecure: bool) -> str:
    """The connection string as given, or ConfigError: off this machine the server must be verified (sslmode=verify-full).

    Anything less shows credentials and events to whoever answers in the server's place. `insecure` is for networks that
    are protected otherwise.
    """
    parts = _parts(dsn)
    mode = str(parts.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")
    if insecure or mode == VERIFIED or all(_is_here(host) for host in _hosts(parts)):
        return dsn
    raise ConfigError(
        f"the database is on another machine and sslmode is {mode}: the server would not be verified",
        field="database",
        hint="add sslmode=verify-full (and sslrootcert); FENCEPOST_INSECURE_DB=true where the network itself is protected",
    )


def _hosts(parts: dict[str, Any]) -> list[str]:
    for found in (parts.get("hostaddr"), parts.get("host"), os.environ.get("PGHOSTADDR"), os.environ.get("PGHOST")):
        if found:
            return str(found).split(",")
    return [""]


def _is_here(host: str) -> bool:
    bare = host.strip()
    if bare in {"", "localhost"} or bare.startswith(("/", "@")):
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False


def _parts(dsn: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigError(
            "the connection string cannot be read", field="database", hint="example: postgresql://user@host:5432/name"
        ) from None


def _kwargs(dsn: str) -> dict[str, Any]:
    given = _parts(dsn)
    return {k: v for k, v in _OPTIONS.items() if k not in given}


class NoAnswer(psycopg.OperationalError):
    """The server kept silent past our own deadline and the connection was closed; the outcome is as unknown as a cut's."""


class Punctual(Connection[Row]):
    """A connection whose every exchange with the server ends within `answer_within` seconds, if that is set.

    Invariant: a peer that acknowledges every packet and answers nothing is left like one that is gone.
    """

    answer_within: float | None = None

    def wait(self, gen: Generator[Any, Any, Value], *arguments: Any, **options: Any) -> Value:
        """As in psycopg; raises `NoAnswer` at the deadline, after asking the server to cancel."""
        if self.answer_within is None:
            return super().wait(gen, *arguments, **options)
        try:
            return super().wait(_within(gen, self.answer_within), *arguments, **options)
        except _Late:
            # What waits for a lock there would go on waiting; only a libpq that can give up asking is trusted with that.
            if psycopg.capabilities.has_cancel_safe():
                with contextlib.suppress(psycopg.Error):
                    self.cancel_safe(timeout=CANCEL_SECONDS)
            super().close()
            raise NoAnswer(f"PostgreSQL did not answer within {self.answer_within:g} s") from None


class AsyncPunctual(AsyncConnection[Row]):
    """As `Punctual`, for asyncio."""

    answer_within: float | None = None

    async def wait(self, gen: Generator[Any, Any, Value], *arguments: Any, **options: Any) -> Value:
        """As in psycopg; raises `NoAnswer` at the deadline, after asking the server to cancel."""
        if self.answer_within is None:
            return await super().wait(gen, *arguments, **options)
        try:
            return await super().wait(_within(gen, self.answer_within), *arguments, **options)
        except _Late:
            if psycopg.capabilities.has_cancel_safe():
                with contextlib.suppress(psycopg.Error):
                    await self.cancel_safe(timeout=CANCEL_SECONDS)
            await super().close()
            raise NoAnswer(f"PostgreSQL did not answer within {self.answer_within:g} s") from None


class _Late(Exception):
    """The deadline of one exchange has passed."""


def _within(gen: Generator[Any, Any, Value], seconds: float) -> Generator[Any, Any, Value]:
    # psycopg resumes the generator several times a second, also when the socket has nothing.
    until = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            wanted = gen.send(ready)
            if time.monotonic() >= until:
                break
    except StopIteration as done:
        found: Value = done.value
        return found
    raise _Late


def connect(dsn: str, *, autocommit: bool = False, answer_within: float | None = None) -> Punctual[tuple[Any, ...]]:
    """A connection, or `Unreachable` with the address (no password) within `connect_timeout` seconds (default 5).

    `answer_within` (seconds) bounds every later exchange: `NoAnswer`, an OperationalError, and the connection is closed.
    Leave it out where statements of the caller's own may rightly take long.
    """
    try:
        made = Punctual.connect(dsn, autocommit=autocommit, **_kwargs(dsn))
    except psycopg.OperationalError as error:
        raise _unreachable(dsn, error) from None
    made.answer_within = answer_within
    return made


async def connect_async(
    dsn: str, *, autocommit: bool = False, answer_within: float | None = None
) -> AsyncPunctual[tuple[Any, ...]]:
    """As `connect`, for asyncio."""
    try:
        made = await AsyncPunctual.connect(dsn, autocommit=autocommit, **_kwargs(dsn))
    except psycopg.OperationalError as error:
        raise _unreachable(dsn, error) from None
    made.answer_within = answer_within
    return made


def _unreachable(dsn: str, error: psycopg.OperationalError) -> Unreachable:
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    message, hint = f"PostgreSQL did not answer: {said}", "check that the server runs and that the address is right"
    if "authentication failed" in said:
        message, hint = "PostgreSQL refuses the login", "correct user and password"
    elif "certificate" in said:
        message = f"the server that answers for PostgreSQL is not verified: {said}"
        hint = "sslrootcert must hold the authority of its certificate, and host must be a name in it"
    return Unreachable(message, address=address(dsn), field="database", hint=hint)
