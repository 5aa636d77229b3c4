"""Destinations: where routes lead, and the reserved one for events that no destination answers for.

Invariant: every event is somebody's business, decided by its type and number alone: that of each destination that had a
route for it when it was accepted, which publishes it or parks it, or else that of the reserved destination, which parks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, LiteralString

from psycopg import Connection
from psycopg.types.json import Jsonb

from fencepost.relay.publisher import Declarer, Inspectable, OutboxRow, Outcome, Outgoing, Publisher, Route
from fencepost.relay.spans import Spans
from fencepost.schemas.errors import ConfigError, RoutesChanged, Unreachable

REGISTER: LiteralString = """
SELECT fencepost.register_destination(%(destination)s, %(kind)s, %(routes)s, %(accept)s, %(on_refusal)s)"""
SOURCE: LiteralString = "SELECT id FROM fencepost.installation"
KNOWN: LiteralString = "SELECT FROM fencepost.destination WHERE destination = '-'"
STANDING: LiteralString = """
SELECT d.kind, d.routes_digest, d.on_refusal, r.match, r.since, r.until
FROM fencepost.destination AS d LEFT JOIN fencepost.route AS r ON r.destination = d.destination
WHERE d.destination = %(destination)s ORDER BY r.match, r.since"""
SPANS: LiteralString = "SELECT DISTINCT r.match, r.since, r.until FROM fencepost.route AS r ORDER BY r.match, r.since"


def source(conn: Connection[Any]) -> str:
    """The CloudEvents source of this installation's events: a name that a restore or a move does not change."""
    row = conn.execute(SOURCE).fetchone()
    assert row is not None
    return f"urn:fencepost:{row[0]}"


def as_stored(routes: Sequence[Route]) -> list[dict[str, str]]:
    """Routes as a destination row keeps them."""
    return [{"match": r.match, "to": r.to, "routing_key": r.routing_key} for r in routes]


def routes_from(stored: object) -> tuple[Route, ...]:
    """Routes as a destination row keeps them."""
    assert isinstance(stored, list)
    return tuple(Route(r["match"], r["to"], r["routing_key"]) for r in stored)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


class Destination:
    """One broker with the routes that lead to it; the first route that matches a type is taken.

    `make` is called with the installation's source when the loop first connects. With `on_refusal` "block" a refused event
    holds its key back, with "pass" later events of its key go on. `declare` makes the topics or exchanges of the routes
    when the broker is first reached; otherwise they must be there.
    """

    holds_keys = True
    publishes = True
    routes_everything = False

    def __init__(
        self,
        name: str,
        kind: str,
        routes: Sequence[Route],
        make: Callable[[str], Publisher],
        *,
        accept_routes: bool = False,
        on_refusal: Literal["block", "pass"] = "block",
        declare: bool = False,
    ) -> None:
        if not routes:
            raise ConfigError("a destination needs at least one route", field=f"destinations.{name}.routes")
        self.name = name
        self.kind = kind
        self.routes = tuple(routes)
        self.on_refusal = on_refusal
        self.served_with: tuple[Destination, ...] = ()
        self.make = make
        self._accept = accept_routes
        self._declare = declare
        self._made: Publisher | None = None
        self._cache: dict[str, Route | None] = {}
        self._spans = Spans()
        self._standing: tuple[str, bytes, str] | None = None

    @property
    def blocks(self) -> bool:
        """Whether a refused event holds its key back."""
        return self.on_refusal == "block"

    @property
    def publisher(self) -> Publisher:
        """A stable handle; the broker's client behind it exists from the first `open` on."""
        return _Later(self)

    def register(self, conn: Connection[Any]) -> None:
        """Makes the destination known to the database; raises `RoutesChanged` when it knows it with other routes.

        Those that are served together are registered together, so that none of them misses what others begin with.
        """
        with conn.transaction():
            for destination in (self, *self.served_with):
                destination.announce(conn)
            self._standing = None
            self.reload(conn)

    def announce(self, conn: Connection[Any]) -> None:
        """Registers, or raises `RoutesChanged`, in the caller's transaction; remembers nothing."""
        conn.execute(
            REGISTER,
            {
                "destination": self.name,
                "kind": self.kind,
                "routes": Jsonb(as_stored(self.routes)),
                "accept": self._accept,
                "on_refusal": self.on_refusal,
            },
        )

    def open(self, conn: Connection[Any], deadline: float) -> None:
        """Registers, connects and declares; raises `Unreachable` when the broker does not answer before the deadline."""
        self.register(conn)
        if self._made is None:
            made = self.make(source(conn))
            try:
                made.open(deadline)
            except ConfigError as error:
                field = f"destinations.{self.name}.{error.field}"
                raise ConfigError(error.message, field=field, hint=error.hint) from None
            if self._declare:
                self._declare_on(made, deadline)
            self._made = made

    def _declare_on(self, made: Publisher, deadline: float) -> None:
        try:
            if not isinstance(made, Declarer):
                raise ConfigError("this publisher cannot declare", field="declare", hint="set it to false")
            made.declare(self.routes, deadline)
        except ConfigError as error:
            made.close(deadline)
            raise ConfigError(error.message, field=f"destinations.{self.name}.declare", hint=error.hint) from None
        except BaseException:
            made.close(deadline)
            raise

    def made(self) -> Publisher:
        """The broker's client; `open` came first. Raises `Unreachable` once it was closed."""
        if self._made is None:
            raise Unreachable(
                f"destination {self.name} was closed",
                field=f"destinations.{self.name}",
                hint="it is opened at the start",
            )
        return self._made

    @property
    def opened(self) -> bool:
        """Whether the broker has answered once."""
        return self._made is not None

    def answers(self, deadline: float) -> bool:
        """Whether the broker answers a question now that sends nothing; False before `open`. From any thread."""
        made = self._made
        if not isinstance(made, Inspectable):
            return made is not None
        try:
            made.inspect([self.routes[0].to], deadline)
        except Unreachable:
            return False
        return True

    def close(self, deadline: float) -> None:
        """Leaves the broker."""
        if self._made is not None:
            self._made.close(deadline)
            self._made = None

    def reload(self, conn: Connection[Any]) -> None:
        """Reads again what this destination answers for; raises `RoutesChanged` once it is no longer as registered.

        Invariant: read after the end tick of a page, it knows every change that concerns a row of that page.
        """
        rows = conn.execute(STANDING, {"destination": self.name}).fetchall()
        standing = (str(rows[0][0]), bytes(rows[0][1]), str(rows[0][2])) if rows else None
        if standing is None or standing != (self._standing or standing):
            raise RoutesChanged(
                f"destination {self.name} was {'removed' if standing is None else 'given other routes'} meanwhile",
                field="routes",
                hint="start this relay again with the settings that were accepted",
            )
        self._standing = standing
        self._spans.set(rows_of_spans(rows))

    def route(self, type_: str) -> Route | None:
        """The route that events of this type take here now, if any."""
        if type_ not in self._cache:
            self._cache[type_] = next((r for r in self.routes if r.matches(type_)), None)
        return self._cache[type_]

    def answers_for(self, type_: str, seq: int) -> bool:
        """True when this destination had a route for the type when the event was accepted: it publishes or parks it."""
        return self._spans.hold(type_, seq)

    def answers_throughout(self, type_: str, rows: Sequence[OutboxRow]) -> bool:
        """True when that is so for all these events of one type, which are in the order of the sequence."""
        return self._spans.hold(type_, rows[0].seq, rows[-1].seq)


def rows_of_spans(rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, int, int | None]]:
    """The spans in rows of `STANDING`; a destination has at least one."""
    return [(row[3], row[4], row[5]) for row in rows if row[3] is not None]


class NoRoute:
    """The reserved destination `-`: parks what no destination answers for, so that nothing is silently dropped."""

    name = "-"
    kind = "none"
    holds_keys = False
    publishes = False
    blocks = False

    def __init__(self) -> None:
        self.routes_everything = False
        self._spans = Spans()

    @property
    def publisher(self) -> Publisher:
        """Publishes nothing."""
        return _Nothing()

    def open(self, conn: Connection[Any], deadline: float) -> None:
        """Reads the routes of all destinations; raises `Unreachable` before the first of them was registered."""
        if conn.execute(KNOWN).fetchone() is None:
            raise Unreachable("no destination is registered yet", field="destination", hint="one is about to be")
        self.reload(conn)

    def close(self, deadline: float) -> None:
        """Holds nothing open."""

    def reload(self, conn: Connection[Any]) -> None:
        """Reads what all destinations answer for again; a relay elsewhere may have registered one.

        Invariant: read after the end tick of a page, it knows every change that concerns a row of that page.
        """
        self._spans.set(conn.execute(SPANS).fetchall())
        self.routes_everything = self._spans.everything

    def route(self, type_: str) -> Route | None:
        """None for every type: nothing is published here."""
        return None

    def answers_for(self, type_: str, seq: int) -> bool:
        """True when no destination had a route for the type when the event was accepted."""
        return not self._spans.hold(type_, seq)

    def answers_throughout(self, type_: str, rows: Sequence[OutboxRow]) -> bool:
        """Never taken for granted: each event is looked at."""
        return False


@dataclass(frozen=True, slots=True)
class _Later:
    destination: Destination

    def open(self, deadline: float) -> None:
        self.destination.made().open(deadline)

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        return self.destination.made().send(batch, deadline)

    def close(self, deadline: float) -> None:
        self.destination.close(deadline)


class _Nothing:
    def open(self, deadline: float) -> None: ...

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        raise AssertionError("the reserved destination publishes nothing")

    def close(self, deadline: float) -> None: ...
