"""Within a version, an event may only grow by members that default to None; everything else needs a new version.

Both directions count: new code reads what old code wrote, during replay and recovery too, and old code reads what new
code writes, during a rolling upgrade. A default other than None would be written by new code and missing in old
events, so that the same operation would have two meanings; None is written as absence and has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from fencepost.schemas.content import PRIVATE_MEMBER, JsonObject, JsonValue, canonical

__all__ = ["Difference", "differences", "same"]

_NOTES = frozenset({"$schema", "title", "description", "default", "examples", "deprecated", "$defs"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that breaks: the dotted path of the member, and what became of it."""

    field: str
    what: str


def differences(old: JsonObject, new: JsonObject) -> list[Difference]:
    """What makes two schemas of one type and version incompatible in either direction; empty when nothing does."""
    return list(_Comparison(old, new).objects(old, new, "", closed=False))


def same(old: JsonObject, new: JsonObject) -> bool:
    """Whether two schemas say the same, titles and descriptions left aside."""
    return _plain(old) == _plain(new)


class _Comparison:
    def __init__(self, old: JsonObject, new: JsonObject) -> None:
        self._old = cast(JsonObject, old.get("$defs", {}))
        self._new = cast(JsonObject, new.get("$defs", {}))
        self._compared: set[tuple[str, str]] = set()

    def objects(self, old: JsonObject, new: JsonObject, path: str, *, closed: bool) -> Iterator[Difference]:
        """The members of two objects; `closed`: readers of the old one refuse members that it does not name."""
        was, now = _properties(old), _properties(new)
        for name in was:
            where = f"{path}.{name}" if path else name
            if name in now:
                yield from self.values(was[name], now[name], where)
                if (name in _required(old)) != (name in _required(new)) and name != PRIVATE_MEMBER:
                    yield Difference(where, "became required" if name in _required(new) else "is no longer required")
            elif name == PRIVATE_MEMBER:
                yield from (Difference(f"{where}.{inner}", "was removed") for inner in _inner(was[name]))
            else:
                yield Difference(where, f"was removed{_renamed(was[name], was, now)}")
        for name in now.keys() - was.keys():
            where = f"{path}.{name}" if path else name
            if name == PRIVATE_MEMBER:
                empty: JsonObject = {"type": "object"}
                yield from self.objects(empty, cast(JsonObject, now[name]), where, closed=False)
            elif name in _required(new) or _default(now[name]) is not None:
                yield Difference(where, "was added without the default None")
            elif closed:
                yield Difference(where, "was added to a model that refuses unknown members")

    def values(self, old: JsonValue, new: JsonValue, path: str) -> Iterator[Difference]:
        """One member, by its type and by what is inside."""
        old, new, seen = self._resolved(old, new)
        if seen:
            return
        if isinstance(old, dict) and isinstance(new, dict):
            names = (old.keys() | new.keys()) - _NOTES
            if "properties" in old and "properties" in new:
                yield from self.objects(old, new, path, closed=old.get("additionalProperties") is False)
                names -= {"properties", "required"}
            for name in sorted(names):
                if name not in old or name not in new:
                    yield Difference(path, f"changed its type ({name})")
                else:
                    inside = f"{path}[]" if name in ("items", "prefixItems", "additionalProperties") else path
                    yield from self._part(name, old[name], new[name], inside)
        elif old != new:
            yield Difference(path, "changed its type")

    def _part(self, name: str, old: JsonValue, new: JsonValue, path: str) -> Iterator[Difference]:
        if isinstance(old, dict) and isinstance(new, dict) and name != "const":
            yield from self.values(old, new, path)
        elif isinstance(old, list) and isinstance(new, list) and name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if len(old) != len(new):
                yield Difference(path, f"changed its type ({name})")
                return
            for one, other in zip(old, new, strict=True):
                yield from self.values(one, other, path)
        elif canonical(old) != canonical(new):
            yield Difference(path, f"changed its type ({name})")

    def _resolved(self, old: JsonValue, new: JsonValue) -> tuple[JsonValue, JsonValue, bool]:
        """What references stand for; True when the pair was compared before, which ends recursive models."""
        was, now = _reference(old), _reference(new)
        if was and now:
            if (was, now) in self._compared:
                return old, new, True
            self._compared.add((was, now))
        return (self._old[was] if was else old), (self._new[now] if now else new), False


def _reference(value: JsonValue) -> str:
    reference = value.get("$ref") if isinstance(value, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""


def _properties(schema: JsonObject) -> JsonObject:
    return cast(JsonObject, schema.get("properties", {}))


def _required(schema: JsonObject) -> list[JsonValue]:
    return cast(list[JsonValue], schema.get("required", []))


def _inner(schema: JsonValue) -> JsonObject:
    return _properties(cast(JsonObject, schema))


def _default(schema: JsonValue) -> JsonValue:
    return schema.get("default") if isinstance(schema, dict) else None


def _renamed(schema: JsonValue, was: JsonObject, now: JsonObject) -> str:
    """A guess that helps: exactly one new member looks just like the one that is gone."""
    alike = [name for name in now if name not in was and _plain(now[name]) == _plain(schema)]
    return f" (renamed to {alike[0]}?)" if len(alike) == 1 else ""


def _plain(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        notes = _NOTES - {"default", "$defs"}
        return {
            name: {key: _plain(each) for key, each in item.items()}
            if name in ("properties", "$defs") and isinstance(item, dict)
            else _plain(item)
            for name, item in value.items()
            if name not in notes
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value
