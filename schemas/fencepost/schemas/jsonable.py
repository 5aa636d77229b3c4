"""A Python value of a model becomes the one JSON value that stands for it, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import cast
from uuid import UUID

from pydantic import SecretBytes, SecretStr
from pydantic_core import to_jsonable_python

from fencepost.schemas.content import DEPTH_MAX, JsonObject, JsonValue, canonical, shown_path
from fencepost.schemas.errors import InvalidInput

__all__ = ["jsonable"]


def jsonable(value: object, field: str, depth: int = 0) -> JsonValue:
    """The JSON value for ``value``, or InvalidInput naming the dotted path below ``field``.

    datetime: RFC 3339 in UTC, fraction only if there is one; Decimal: its digits as a string; sets: sorted by
    their canonical form. Floating point, naive datetimes and secrets (they would be sent masked) are refused.
    """
    if depth > DEPTH_MAX:
        raise InvalidInput(f"{field} is nested more than {DEPTH_MAX} levels deep", field=field)
    match value:
        case None | bool():
            return value
        case Enum():
            return jsonable(value.value, field, depth + 1)
        case int():
            return int(value)
        case str():
            return str(value)
        case float():
            raise InvalidInput(
                f"{field} is floating point",
                field=field,
                hint="use Decimal, a string, or a whole number of a smaller unit",
            )
        case Decimal():
            if not value.is_finite():
                raise InvalidInput(f"{field} is not a finite number", field=field)
            return str(value)
        case datetime():
            return _instant(value, field)
        case date() | time():
            return value.isoformat()
        case UUID():
            return str(value)
        case Mapping():
            return _object(cast(Mapping[object, object], value), field, depth)
        case list() | tuple():
            items = cast(list[object] | tuple[object, ...], value)
            return [jsonable(item, f"{field}.{index}", depth + 1) for index, item in enumerate(items)]
        case set() | frozenset():
            members = [jsonable(item, f"{field}.*", depth + 1) for item in cast(set[object], value)]
            return sorted(members, key=canonical)
        case _:
            return _other(value, field, depth)


def _instant(value: datetime, field: str) -> str:
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidInput(f"{field} is a time without a zone", field=field, hint="make it aware, e.g. with tzinfo=UTC")
    try:
        return value.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"
    except OverflowError:
        raise InvalidInput(f"{field} is outside the years 1 to 9999 in UTC", field=field) from None


def _object(value: Mapping[object, object], field: str, depth: int) -> JsonObject:
    found: JsonObject = {}
    for key, item in value.items():
        name = jsonable(key, f"{field}.*", depth + 1) if not isinstance(key, str) or isinstance(key, Enum) else key
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str):
            raise InvalidInput(f"{field} has a key that is not a string", field=field)
        name = str(name)
        if name in found:
            raise InvalidInput(f"{field} has two keys with the same text", field=field)
        found[name] = jsonable(item, f"{field}.{shown_path((name,))}", depth + 1)
    return found


def _other(value: object, field: str, depth: int) -> JsonValue:
    if isinstance(value, SecretStr | SecretBytes):
        raise InvalidInput(f"{field} is a secret and would be sent masked", field=field, hint="use Private[str]")
    try:
        plain: object = to_jsonable_python(value)
    except ValueError:  # also PydanticSerializationError
        raise InvalidInput(f"{field} is a {type(value).__name__}, which JSON does not have", field=field) from None
    if type(plain) is type(value):
        raise InvalidInput(f"{field} is a {type(value).__name__}, which JSON does not have", field=field)
    return jsonable(plain, field, depth + 1)
