"""Events as users declare them: pydantic models whose content becomes one payload, byte for byte.

    class ReportAccepted(Event, type="report.accepted", version=1):
        submission_id: str
        note: Private[str] | None = None

``tenant``, ``operation`` and ``ordering_key`` are arguments of the constructor and travel in the envelope, not in
the content. Private members travel in the payload's reserved member and stay out of bindings, digests and ``repr``.
Producers are strict and refuse unknown members; consumers ignore members they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeAlias, TypeVar, Union, cast, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from fencepost.schemas import content
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, InvalidInput, Undecodable
from fencepost.schemas.identity import as_operation, as_ordering_key, as_tenant, as_type, as_version
from fencepost.schemas.jsonable import jsonable

__all__ = ["ENVELOPE_FIELDS", "Arrival", "Event", "Private", "PrivateMark", "Registry", "registry", "unknown_version"]

_T = TypeVar("_T")


class PrivateMark:
    """Marks a field as private; write ``Private[T]``."""


Private: TypeAlias = Annotated[_T, PrivateMark()]
"""``Private[T]``: the field is stored and sent, but no digest, log or ``repr`` ever sees it."""


class Arrival(Protocol):
    """The parts of an envelope that an event is made from."""

    @property
    def id(self) -> UUID: ...
    @property
    def type(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def operation(self) -> str: ...
    @property
    def ordering_key(self) -> str: ...
    @property
    def payload(self) -> bytes: ...


class Event(BaseModel):
    """One accepted fact about an operation; immutable, and valid from the moment it exists.

    Subclasses give ``type`` and ``version`` as class arguments; one that gives neither is only a base for others.
    The constructor raises InvalidInput naming the field, never quoting a value.
    A nullable field needs the default None, because None is written as absence.
    """

    # Not a field: it belongs to the arrival, so a copy does not have it and equality does not see it.
    __slots__ = ("_arrived_as",)

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    event_type: ClassVar[str] = ""
    event_version: ClassVar[int] = 0
    _private: ClassVar[frozenset[str]] = frozenset()
    _public: ClassVar[frozenset[str]] = frozenset()

    tenant: str
    operation: str
    ordering_key: str = ""
    """Whose events keep their order; the operation unless given."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            where, what = _first(error)
            raise InvalidInput(f"{where} is not valid ({what})", field=where) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # validate_json must not come through here

    def __init_subclass__(cls, *, type: str | None = None, version: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

    @classmethod
    def __pydantic_init_subclass__(cls, *, type: str | None = None, version: int | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        fields = frozenset(cls.model_fields) - ENVELOPE_FIELDS
        for name in fields:
            _check_field(cls, name)
        for name in ENVELOPE_FIELDS:
            if cls.model_fields[name].annotation is not str or cls.model_fields[name].metadata:
                raise ConfigError(f"{cls.__name__}.{name} belongs to the envelope", field=name, hint="rename the field")
        cls._private = frozenset(name for name in fields if _is_private(cls, name))
        cls._public = fields - cls._private
        if (type is None) != (version is None):
            raise ConfigError(f"{cls.__name__} needs both type and version", field="version" if type else "type")
        if type is not None and version is not None:
            cls.event_type = as_type(type)
            cls.event_version = as_version(version)
            registry.register(cls)

    @field_validator("tenant")
    @classmethod
    def _tenant(cls, value: str) -> str:
        return as_tenant(value)

    @field_validator("operation")
    @classmethod
    def _operation(cls, value: str) -> str:
        return as_operation(value)

    @field_validator("ordering_key")
    @classmethod
    def _ordering_key(cls, value: str) -> str:
        return as_ordering_key(value)

    @model_validator(mode="after")
    def _default_ordering_key(self) -> Self:
        if not self.ordering_key:
            object.__setattr__(self, "ordering_key", self.operation)
        return self

    @property
    def event_id(self) -> UUID | None:
        """The id under which this event arrived; None for one that was made here, or copied."""
        found: UUID | None = getattr(self, "_arrived_as", None)
        return found

    @classmethod
    def private_members(cls) -> frozenset[str]:
        """The names of the fields that are marked private."""
        return cls._private

    def payload(self, *, limit: int = content.PAYLOAD_BYTES_MAX) -> bytes:
        """The content as compact UTF-8 JSON of the restricted profile: equal events give equal bytes.

        None is omitted, times become RFC 3339 in UTC, Decimal becomes a string. Raises InvalidInput naming the
        field for floating point, naive times, U+0000, lone surrogates, and more than ``limit`` bytes.
        """
        if not self.event_type:
            raise ConfigError(
                f"{type(self).__name__} is a base class", field="type", hint="give type= and version= to a subclass"
            )
        dumped = self.model_dump(exclude=set(ENVELOPE_FIELDS), exclude_none=True, warnings=False)
        value: content.JsonObject = {}
        hidden: content.JsonObject = {}
        for name, item in dumped.items():
            (hidden if name in self._private else value)[name] = jsonable(item, name)
        if hidden:
            value[content.PRIVATE_MEMBER] = hidden
        try:
            return content.encode(value, limit=limit)
        except InvalidInput as error:
            raise InvalidInput(error.message, field=_dotted(error.field), hint=error.hint) from None

    @classmethod
    def parse(cls, envelope: Arrival) -> Self:
        """The event in ``envelope``, or Undecodable; members this version does not know are ignored."""
        if envelope.type != cls.event_type:
            raise Undecodable(f"this is not a {cls.event_type}", reason="unknown_type", field="type")
        if envelope.version != cls.event_version:
            raise unknown_version(envelope.type, envelope.version, cls.event_version)
        value = envelope.decoded() if isinstance(envelope, Envelope) else content.decode(envelope.payload)
        hidden = value.get(content.PRIVATE_MEMBER, {})
        if not isinstance(hidden, dict):
            raise Undecodable(
                "the private member is not an object", reason="invalid_content", field=content.PRIVATE_MEMBER
            )
        known = {name: item for name, item in value.items() if name in cls._public}
        if hidden:
            known |= {name: item for name, item in hidden.items() if name in cls._private}
        known["tenant"] = envelope.tenant
        known["operation"] = envelope.operation
        known["ordering_key"] = envelope.ordering_key
        try:
            # As JSON, because strict fields accept a date or a Decimal from a JSON string only.
            event = cls.model_validate_json(to_json(known))
        except ValidationError as error:
            where, what = _first(error)
            raise Undecodable(f"{where} is not valid ({what})", reason="invalid_content", field=where) from None
        except InvalidInput as error:
            raise Undecodable(error.message, reason="invalid_content", field=error.field) from None
        object.__setattr__(event, "_arrived_as", envelope.id)
        return event

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if name not in self._private:
                yield name, value


ENVELOPE_FIELDS = frozenset({"tenant", "operation", "ordering_key"})
"""Arguments of the constructor that travel in the envelope, not in the content."""
_OWN_NAMES = frozenset(
    {"payload", "parse", "event_id", "event_type", "event_version", "private_members", content.PRIVATE_MEMBER}
)


class Registry:
    """The declared events by type and version; the same pair names one class."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], type[Event]] = {}

    def register(self, cls: type[Event]) -> None:
        """Add a class; another class under the same type and version raises ConfigError, a re-import does not."""
        key = (cls.event_type, cls.event_version)
        known = self._classes.get(key)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{key[0]} version {key[1]} is declared by {known.__module__}.{known.__qualname__}"
                f" and by {cls.__module__}.{cls.__qualname__}",
                field="type",
                hint="give one of them another type or version",
            )
        self._classes[key] = cls

    def versions(self, type: str) -> tuple[int, ...]:
        """The declared versions of a type, ascending; empty if it is not known."""
        return tuple(sorted(version for name, version in self._classes if name == type))

    def find(self, type: str, version: int) -> type[Event]:
        """The class of a type and version, or Undecodable: unknown_type, newer_version or unknown_version."""
        if (cls := self._classes.get((type, version))) is not None:
            return cls
        if known := self.versions(type):
            raise unknown_version(type, version, known[-1])
        raise Undecodable("no event of this type is declared", reason="unknown_type", field="type")

    def parse(self, envelope: Arrival) -> Event:
        """The event in ``envelope`` as its declared class, or Undecodable."""
        return self.find(envelope.type, envelope.version).parse(envelope)

    def __iter__(self) -> Iterator[type[Event]]:
        return iter(list(self._classes.values()))

    def __len__(self) -> int:
        return len(self._classes)


registry = Registry()
"""Every event declared in this process."""


def unknown_version(type: str, version: int, newest: int) -> Undecodable:
    """What to raise for a version that is not known where ``newest`` is: newer_version, or unknown_version."""
    return Undecodable(
        f"version {version} of {type} is not known",
        reason="newer_version" if version > newest else "unknown_version",
        field="version",
    )


def _check_field(cls: type[Event], name: str) -> None:
    """Refuse, when the class is made, a field whose payload could not be read back as it was written."""
    field = cls.model_fields[name]
    if name in _OWN_NAMES:
        raise ConfigError(f"{cls.__name__}.{name} is a name of Event itself", field=name, hint="rename the field")
    if field.alias is not None or field.validation_alias is not None or field.serialization_alias is not None:
        raise ConfigError(
            f"{cls.__name__}.{name} has an alias", field=name, hint="members are named as the field; remove the alias"
        )
    if field.exclude:
        raise ConfigError(f"{cls.__name__}.{name} is excluded", field=name, hint="a field of an event is always sent")
    if (field.is_required() or field.get_default() is not None) and _admits_none(field.annotation):
        raise ConfigError(
            f"{cls.__name__}.{name} may be None but does not default to None",
            field=name,
            hint="None is written as absence: give it the default None, or another type",
        )
    for model in _models(field.annotation, set()):
        _check_nested(cls, name, model)


def _check_nested(cls: type[Event], name: str, model: type[BaseModel]) -> None:
    for inner, field in model.model_fields.items():
        if _marked(field.annotation, field.metadata):
            raise ConfigError(
                f"{cls.__name__}.{name}: {model.__name__}.{inner} is private inside another model",
                field=name,
                hint="mark the field of the event itself as Private",
            )
        if (field.is_required() or field.get_default() is not None) and _admits_none(field.annotation):
            raise ConfigError(
                f"{cls.__name__}.{name}: {model.__name__}.{inner} may be None but does not default to None",
                field=name,
                hint="None is written as absence: give it the default None, or another type",
            )


def _is_private(cls: type[Event], name: str) -> bool:
    field = cls.model_fields[name]
    return _marked(field.annotation, field.metadata)


def _marked(annotation: object, metadata: object = ()) -> bool:
    """True if the mark is anywhere in an annotation: ``Private[str] | None`` is private as a whole."""
    if isinstance(metadata, list | tuple) and any(isinstance(m, PrivateMark) for m in cast(list[object], metadata)):
        return True
    if _marked_here(annotation):
        return True
    return any(_marked(argument) for argument in get_args(annotation))


def _marked_here(annotation: object) -> bool:
    return any(isinstance(m, PrivateMark) for m in getattr(annotation, "__metadata__", ()))


def _admits_none(annotation: object) -> bool:
    if annotation is None or annotation is type(None) or annotation is Any or annotation is object:
        return True
    origin = getattr(annotation, "__origin__", None)
    if hasattr(annotation, "__metadata__"):
        return _admits_none(origin)
    return _is_union(annotation) and any(_admits_none(argument) for argument in get_args(annotation))


def _is_union(annotation: object) -> bool:
    return isinstance(annotation, UnionType) or get_origin(annotation) is Union


def _models(annotation: object, seen: set[object]) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
        seen.add(annotation)
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation, seen)
    for argument in get_args(annotation):
        yield from _models(argument, seen)


def _first(error: ValidationError) -> tuple[str, str]:
    """Where and which kind; pydantic's sentence is dropped, since a validator may have quoted the value."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return content.shown_path(found["loc"]) or "event", found["type"]


def _dotted(path: str | None) -> str | None:
    if path is None or not path.startswith("/"):
        return path
    return path.removeprefix(f"/{content.PRIVATE_MEMBER}").removeprefix("/").replace("/", ".") or "payload"
