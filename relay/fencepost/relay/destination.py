"""Destinations: where routes lead. The reserved one finds events that no route of any destination takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection
from psycopg.types.json import Jsonb

from fencepost.relay.publisher import Inspectable, Outcome, Outgoing, Publisher, Route
from fencepost.schemas.errors import ConfigError, Unreachable

REGISTER: LiteralString = """
SELECT fencepost.register_destination(%(destination)s, %(kind)s, %(routes)s, %(accept)s)"""
SOURCE: LiteralString = "SELECT id FROM fencepost.installation"
KNOWN: LiteralString = "SELECT FROM fencepost.destination WHERE destination = '-'"
ROUTES: LiteralString = "SELECT routes FROM fencepost.destination WHERE destination <> '-' ORDER BY destination"


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

    `make` is called with the installation's source when the loop first connects.
    """

    holds_keys = True
    routes_everything = False

    def __init__(
        self,
        name: str,
        kind: str,
        routes: Sequence[Route],
        make: Callable[[str], Publisher],
        *,
        accept_routes: bool = False,
    ) -> None:
        if not routes:
            raise ConfigError("a destination needs at least one route", field=f"destinations.{name}.routes")
        self.name = name
        self.kind = kind
        self.routes = tuple(routes)
        self.make = make
        self._accept = accept_routes
        self._made: Publisher | None = None
        self._cache: dict[str, Route | None] = {}

    @property
    def publisher(self) -> Publisher:
        """A stable handle; the broker's client behind it exists from the first `open` on."""
        return _Later(self)

    def register(self, conn: Connection[Any]) -> None:
        """Makes the destination known to the database; raises `RoutesChanged` when it knows it with other routes."""
        conn.execute(
            REGISTER,
            {
                "destination": self.name,
                "kind": self.kind,
                "routes": Jsonb(as_stored(self.routes)),
                "accept": self._accept,
            },
        )

    def open(self, conn: Connection[Any], deadline: float) -> None:
        """Registers and connects; raises `Unreachable` when the broker does not answer before the deadline."""
        self.register(conn)
        if self._made is None:
            made = self.make(source(conn))
            made.open(deadline)
            self._made = made

    def made(self) -> Publisher:
        """The broker's client; `open` came first."""
        assert self._made is not None
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
        """Routes of a destination come from its settings; nothing to reload."""

    def route(self, type_: str) -> Route | None:
        """The route that events of this type take here, if any."""
        if type_ not in self._cache:
            self._cache[type_] = next((r for r in self.routes if r.matches(type_)), None)
        return self._cache[type_]

    def parks(self, type_: str) -> bool:
        """Never: what has no route here may have one elsewhere."""
        return False


class NoRoute:
    """The reserved destination `-`: parks what no destination has a route for, so that nothing is silently dropped."""

    name = "-"
    kind = "none"
    holds_keys = False

    def __init__(self) -> None:
        self.routes: tuple[Route, ...] = ()
        self.routes_everything = False

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
        """Reads the routes of all destinations again; a relay elsewhere may have registered one."""
        self.routes = tuple(r for (stored,) in conn.execute(ROUTES) for r in routes_from(stored))
        self.routes_everything = any(r.match == "*" for r in self.routes)

    def route(self, type_: str) -> Route | None:
        """None for every type; those that some destination takes are not this one's business."""
        return None

    def parks(self, type_: str) -> bool:
        """True when no destination has a route for this type."""
        return not any(r.matches(type_) for r in self.routes)


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
