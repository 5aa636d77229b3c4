"""An older version of an event becomes the one that a handler takes, by functions that its application declares.

    @upcast(ReportAcceptedV1, ReportAccepted)
    def with_kind(old: ReportAcceptedV1) -> ReportAccepted:
        return ReportAccepted(tenant=old.tenant, operation=old.operation, ordering_key=old.ordering_key,
                              submission_id=old.submission_id, kind="unknown")

Only what a handler reads changes: digest, meaning and reservation are those of the event that arrived. Each version
has at most one function, which leads to a newer one; several are gone through in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Arrival, Event, registry

__all__ = ["lifted", "upcast"]

Old = TypeVar("Old", bound=Event)
New = TypeVar("New", bound=Event)

_steps: dict[tuple[str, int], tuple[type[Event], Callable[[Any], Event]]] = {}


def upcast(old: type[Old], new: type[New]) -> Callable[[Callable[[Old], New]], Callable[[Old], New]]:
    """Declares the decorated function as the way from ``old`` to ``new``; ConfigError unless newer, of one type, and the only one."""
    if not old.event_type or old.event_type != new.event_type:
        raise ConfigError(f"{old.__name__} and {new.__name__} are not versions of one type", field="type")
    if old.event_version >= new.event_version:
        raise ConfigError(f"{new.__name__} is not newer than {old.__name__}", field="version")

    def declare(function: Callable[[Old], New]) -> Callable[[Old], New]:
        key = (old.event_type, old.event_version)
        known = _steps.get(key)
        if known is not None and _name(known[1]) != _name(function):
            raise ConfigError(
                f"version {key[1]} of {key[0]} is led on by {_name(known[1])} and by {_name(function)}", field="version"
            )
        _steps[key] = (new, function)
        return function

    return declare


def lifted(envelope: Arrival, taken: Collection[type[Event]]) -> Event | None:
    """The event in ``envelope`` as one of the classes ``taken``; None when no declared way leads there.

    Raises Undecodable when the content does not fit the version that arrived, and whatever a function raises. One that
    changes tenant, operation or ordering key is refused with ConfigError: it would be another event.
    """
    version = envelope.version
    ways: list[Callable[[Any], Event]] = []
    reached: type[Event] | None = None
    while reached is None or reached not in taken:
        if (step := _steps.get((envelope.type, version))) is None:
            return None
        reached, function = step
        ways.append(function)
        version = reached.event_version
    event: Event = registry.find(envelope.type, envelope.version).parse(envelope)
    for function in ways:
        made = function(event)
        for name in ("tenant", "operation", "ordering_key"):
            if getattr(made, name) != getattr(event, name):
                raise ConfigError(f"{_name(function)} changes the {name}", field=name, hint="carry it over as it is")
        event = made
    object.__setattr__(event, "_arrived_as", envelope.id)
    return event


def _name(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
