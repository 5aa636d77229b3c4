"""What a handler asks for, read from its signature, and how a delivery becomes just that.

A handler takes ``(tx, event)``. The annotation of the second argument decides: a class of events (or a union of them)
accepts those only (and older versions for which an
upcast is declared), ``Event`` or nothing accepts every declared event, ``Envelope`` takes what arrived unparsed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace, UnionType
from typing import Any, Protocol, Union, cast, get_args, get_origin, get_type_hints

from fencepost.schemas import upcasts
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, Undecodable
from fencepost.schemas.event import Event, registry, unknown_version

__all__ = ["Arrived", "Arriving", "Reading", "resolved"]


class Arriving(Protocol):
    """What an envelope can be had from: a delivery, or a record of a history."""

    def envelope(self) -> Envelope: ...


@dataclass(slots=True)
class Arrived:
    """A delivery whose digest is right, its binding, and once it was read what the handler is given, or why it cannot be."""

    envelope: Envelope
    binding: str
    argument: Event | Envelope | None = None
    unreadable: Undecodable | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How deliveries are read for one handler; ``classes`` is empty for every declared event."""

    classes: tuple[type[Event], ...]
    raw: bool

    @classmethod
    def of(cls, handler: Callable[..., object]) -> Reading:
        """From the annotation of the handler's second argument, or ConfigError."""
        parameters = list(inspect.signature(handler).parameters.values())
        if len(parameters) < 2 or any(p.default is p.empty for p in parameters[2:] if p.kind not in _VARIABLE):
            raise ConfigError(
                "a handler takes (tx, event)", field="handler", hint="def handler(tx, event: MyEvent): ..."
            )
        annotation = parameters[1].annotation
        if annotation is inspect.Parameter.empty:
            return cls((), raw=False)
        return cls.accepting(resolved(handler, annotation))

    @classmethod
    def accepting(cls, annotation: object) -> Reading:
        """From what the handler is to be given, or ConfigError."""
        if annotation is Envelope:
            return cls((), raw=True)
        if annotation is Event or annotation is Any:
            return cls((), raw=False)
        union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
        classes = get_args(annotation) if union else (annotation,)
        if not all(isinstance(each, type) and issubclass(each, Event) and each.event_type for each in classes):
            raise ConfigError(
                "the second argument of a handler is neither an event with type and version nor Envelope",
                field="handler",
                hint="annotate it with a class of events, a union of them, Event, or Envelope",
            )
        return cls(cast(tuple[type[Event], ...], tuple(classes)), raw=False)

    def read(self, delivery: Arriving) -> Arrived:
        """Envelope, digest, then content; Undecodable at the first that fails."""
        envelope, binding = self.verified(delivery)
        return Arrived(envelope, binding, self.argument(envelope))

    def finish(self, arrived: Arrived) -> None:
        """Reads the content, which may be left to when there is time for it."""
        if arrived.argument is None and arrived.unreadable is None:
            try:
                arrived.argument = self.argument(arrived.envelope)
            except Undecodable as error:
                arrived.unreadable = error

    def verified(self, delivery: Arriving) -> tuple[Envelope, str]:
        """The envelope, its digest verified, and its binding; or Undecodable."""
        envelope = delivery.envelope()
        return envelope, envelope.check()

    def argument(self, envelope: Envelope) -> Event | Envelope:
        """What the handler is given, or Undecodable."""
        if self.raw:
            return envelope
        return self._event_of(envelope) if self.classes else registry.parse(envelope)

    def _event_of(self, envelope: Envelope) -> Event:
        type, version = envelope.type, envelope.version
        for each in self.classes:
            if each.event_version == version and each.event_type == type:
                return each.parse(envelope)
        of_type = {each.event_version: each for each in self.classes if each.event_type == type}
        if not of_type:
            raise Undecodable("the handler does not take this type", reason="unknown_type", field="type")
        event = upcasts.lifted(envelope, of_type.values())
        if event is None:
            raise unknown_version(envelope.type, envelope.version, max(of_type))
        return event


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def resolved(handler: Callable[..., object], annotation: object) -> object:
    """The annotation as an object. Only this annotation is resolved: others may name what exists for type checkers alone."""
    if not isinstance(annotation, str):
        return annotation
    function = inspect.unwrap(handler)
    names: dict[str, object] = dict(getattr(function, "__globals__", {}))
    try:
        names |= inspect.getclosurevars(function).nonlocals
    except TypeError:
        pass
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"event": annotation}), globalns=names)["event"]
    except NameError as error:
        raise ConfigError(
            f"the handler's annotation names {error.name}, which cannot be found",
            field="handler",
            hint="declare the event at the level of the module",
        ) from None
