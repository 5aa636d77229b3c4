"""A projection: tables that a handler makes from events alone, so that they can be made again from the history.

    @projection(name="totals", tables=("totals",))
    def totals(tx, events: Sequence[ReportAccepted]) -> None:
        tx.cursor().executemany("INSERT INTO totals ... ON CONFLICT ... DO UPDATE ...", [...])

A handler takes ``(tx, event)``, or ``(tx, events)`` where the second is annotated as a sequence: then it gets many at once.
It names its tables without a schema: during a replay they are those of the shadow schema. It is given a transaction and
events, and nothing else: no client of a provider, of a broker, or of another database belongs into it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args, get_origin

from psycopg import Connection

from fencepost.consumer.reading import Reading, resolved
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Event

__all__ = ["Projection", "projection"]

E = TypeVar("E")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,40}\Z")


@dataclass(frozen=True, slots=True)
class Projection(Generic[E]):
    """A handler with the tables that are its own; calling it runs the bare handler, as a test may want."""

    name: str
    handler: Callable[[Connection[Any], E], object] = field(repr=False)
    tables: tuple[str, ...]
    schema: str
    batch: bool
    newest_only: bool
    reading: Reading = field(repr=False)

    def __call__(self, tx: Connection[Any], event: E) -> None:
        self.handler(tx, event)

    @property
    def shadow(self) -> str:
        """The schema in which a replay builds."""
        return f"{self.name}_shadow"

    @property
    def old(self) -> str:
        """The schema in which replaced tables are kept."""
        return f"{self.name}_old"

    def takes(self, type: str) -> bool:
        """Whether events of this type are its own; others of the same history are passed over."""
        for each in self.reading.classes:
            if each.event_type == type:
                return True
        return not self.reading.classes

    def apply(self, tx: Connection[Any], events: Sequence[Event | Envelope]) -> None:
        """Runs the handler on these, in their order, in the caller's transaction."""
        handler: Callable[[Connection[Any], Any], object] = self.handler
        if self.batch:
            handler(tx, events)
            return
        for event in events:
            handler(tx, event)


def projection(
    *, name: str, tables: Sequence[str], schema: str = "public", newest_only: bool = True
) -> Callable[[Callable[[Connection[Any], E], object]], Projection[E]]:
    """Makes a handler a projection that `fencepost replay` can build anew from the history.

    ``tables`` in ``schema`` belong to it and are written by nothing else. With ``newest_only`` it is given only events
    that are newer, by ``sequence``, than what it had of their source, tenant and ordering key: copies, and events that
    were overtaken, are dropped. Raises ConfigError for a handler or a name that cannot be used.
    """
    for what, value in (("name", name), ("schema", schema), *(("tables", table) for table in tables)):
        if _IDENTIFIER.match(value) is None:
            raise ConfigError(
                f"{what} is not made of lower-case letters, digits and _ (at most 41)", field=what, hint="rename it"
            )
    if not tables or isinstance(tables, str) or len(set(tables)) < len(tables):
        raise ConfigError("tables is not a list of different names", field="tables")

    def decorate(handler: Callable[[Connection[Any], E], object], /) -> Projection[E]:
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
            raise ConfigError("the handler of a projection is not a coroutine", field="handler", hint="write def")
        batch, reading = _form(handler)
        return Projection(name, handler, tuple(tables), schema, batch, newest_only, reading)

    return decorate


def _form(handler: Callable[..., object]) -> tuple[bool, Reading]:
    """Whether it takes many at once, and what they are."""
    parameters = list(inspect.signature(handler).parameters.values())
    annotation: object = parameters[1].annotation if len(parameters) > 1 else inspect.Parameter.empty
    if annotation is not inspect.Parameter.empty:
        found = resolved(handler, annotation)
        origin = get_origin(found)
        if isinstance(origin, type) and issubclass(origin, Iterable):
            return True, Reading.accepting(get_args(found)[0])
    return False, Reading.of(handler)
