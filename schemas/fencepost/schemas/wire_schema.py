"""The JSON Schema (2020-12) of what an event's payload looks like on the wire, derived from its class.

The envelope's fields are not in it, private fields stand under the reserved member, and members that it does not name
are allowed, because consumers ignore them.
"""

from __future__ import annotations

from typing import cast

from pydantic.json_schema import GenerateJsonSchema

from fencepost.schemas.content import PRIVATE_MEMBER, JsonObject, JsonValue
from fencepost.schemas.envelope import wire_type
from fencepost.schemas.event import ENVELOPE_FIELDS, Event

__all__ = ["DIALECT", "schema_of"]

DIALECT = GenerateJsonSchema.schema_dialect


def schema_of(cls: type[Event]) -> JsonObject:
    """The schema of the payload of a declared event; the same class gives the same schema."""
    found = cast(JsonObject, cls.model_json_schema(mode="serialization"))
    properties = cast(JsonObject, found.pop("properties", {}))
    required = cast(list[str], found.pop("required", []))
    definitions = found.pop("$defs", None)
    schema: JsonObject = {
        "$schema": DIALECT,
        "title": wire_type(cls.event_type, cls.event_version),
        "type": "object",
    }
    if description := found.get("description"):
        schema["description"] = description
    private = cls.private_members()
    shown = {name: value for name, value in properties.items() if name not in ENVELOPE_FIELDS | private}
    hidden = {name: value for name, value in properties.items() if name in private}
    schema |= _members(shown, required)
    if hidden:
        inner: JsonObject = {"type": "object", **_members(hidden, required)}
        cast(JsonObject, schema["properties"])[PRIVATE_MEMBER] = inner
        if "required" in inner:
            schema["required"] = [*cast(list[JsonValue], schema.get("required", [])), PRIVATE_MEMBER]
    if definitions:
        schema["$defs"] = definitions
    return schema


def _members(members: JsonObject, required: list[str]) -> JsonObject:
    found: JsonObject = {"properties": dict(members)}
    if needed := [name for name in members if name in required]:
        found["required"] = cast(list[JsonValue], needed)
    return found
