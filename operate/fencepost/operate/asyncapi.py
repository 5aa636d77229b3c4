"""An AsyncAPI 3 document of the declared events, with one channel for every place that the routes lead to.

Addresses of brokers are not in it: they belong to a deployment, and may hold credentials.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from fencepost.operate.settings import DestinationSettings, RouteSettings
from fencepost.relay.publisher import Route
from fencepost.schemas import json_format
from fencepost.schemas.content import JsonObject, JsonValue
from fencepost.schemas.envelope import CONTENT_TYPE, REQUIRED, SPECVERSION, wire_type
from fencepost.schemas.event import Event
from fencepost.schemas.wire_schema import schema_of

__all__ = ["document", "name_of"]

ASYNCAPI = "3.0.0"
FORMAT = "application/schema+json;version=draft-2020-12"
TEXT: JsonObject = {"type": "string"}
PREFIX = {"kafka": "ce_", "rabbitmq": "ce-"}
BINDING = {"kafka": "kafka", "rabbitmq": "amqp"}
KEY = "the JSON array [fptenant, partitionkey]"


def name_of(event: type[Event]) -> str:
    """The type on the wire, which is the name of the event in every document."""
    return wire_type(event.event_type, event.event_version)


def document(
    events: Sequence[type[Event]], destinations: Sequence[DestinationSettings], *, title: str, version: str
) -> JsonObject:
    """A schema for every event, a channel and a send operation for every place of a route, and their messages."""
    channels: JsonObject = {}
    operations: JsonObject = {}
    messages: JsonObject = {}
    sent: set[str] = set()
    for destination in destinations:
        for route, taken in _taken(destination, events):
            key = _UNSAFE.sub("_", f"{destination.name}.{route.to}.{route.routing_key}".removesuffix(".{type}"))
            channels[key] = _channel(destination, route, taken)
            operations[f"send.{key}"] = {"action": "send", "channel": {"$ref": f"#/channels/{key}"}}
            for event in taken:
                sent.add(name_of(event))
                messages[_message_key(destination, event)] = _message(destination, event)
    for event in events:
        if name_of(event) not in sent:
            messages[name_of(event)] = _payload(event)
    return {
        "asyncapi": ASYNCAPI,
        "info": {"title": title, "version": version},
        "defaultContentType": CONTENT_TYPE,
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": {name_of(event): _schema(event) for event in events}},
    }


def _taken(
    destination: DestinationSettings, events: Sequence[type[Event]]
) -> list[tuple[RouteSettings, list[type[Event]]]]:
    """Each place once, with the events whose first matching route leads there."""
    found: dict[tuple[str, str], tuple[RouteSettings, list[type[Event]]]] = {}
    for event in events:
        matching = (r for r in destination.routes if Route(r.match, r.to).matches(event.event_type))
        if (route := next(matching, None)) is not None:
            place = (route.to, "" if destination.kind == "kafka" else route.routing_key)
            found.setdefault(place, (route, []))[1].append(event)
    return list(found.values())


def _channel(destination: DestinationSettings, route: RouteSettings, events: Sequence[type[Event]]) -> JsonObject:
    channel: JsonObject = {
        "messages": {
            name_of(event): {"$ref": f"#/components/messages/{_message_key(destination, event)}"} for event in events
        }
    }
    if destination.kind == "kafka":
        return {"address": route.to, **channel, "bindings": {"kafka": {"topic": route.to}}}
    if "{type}" in route.routing_key:
        types: list[JsonValue] = [*sorted({event.event_type for event in events})]
        channel["parameters"] = {"type": {"enum": types, "description": "The type without its version."}}
    exchange: JsonObject = {"name": route.to}
    if destination.declare:
        exchange |= {"type": "topic", "durable": True}
    binding: JsonObject = {"is": "routingKey", "exchange": exchange}
    return {"address": route.routing_key, **channel, "bindings": {"amqp": binding}}


def _message_key(destination: DestinationSettings, event: type[Event]) -> str:
    return f"{name_of(event)}.{BINDING[destination.kind]}.{destination.mode}"


def _message(destination: DestinationSettings, event: type[Event]) -> JsonObject:
    """What arrives from one kind of broker in one mode."""
    message = _payload(event)
    if destination.mode == "structured":
        attributes: JsonObject = {**_attributes(event), "data": _reference(event)}
        whole: JsonObject = {"type": "object", "properties": attributes, "required": [*_attributes(event)]}
        message["contentType"] = json_format.STRUCTURED
        message["payload"] = {"schemaFormat": FORMAT, "schema": whole}
    else:
        prefix = PREFIX[destination.kind]
        headers: JsonObject = {prefix + name: value for name, value in _attributes(event).items()}
        message["headers"] = {"type": "object", "properties": headers, "required": [*headers]}
    if destination.kind == "kafka":
        message["bindings"] = {"kafka": {"key": {"type": "string", "description": KEY}}}
    return message


def _payload(event: type[Event]) -> JsonObject:
    return {
        "name": name_of(event),
        "contentType": CONTENT_TYPE,
        "payload": {"$ref": f"#/components/schemas/{name_of(event)}"},
    }


def _attributes(event: type[Event]) -> JsonObject:
    fixed: JsonObject = {"specversion": {"const": SPECVERSION}, "type": {"const": name_of(event)}}
    return {name: fixed.get(name, TEXT) for name in REQUIRED}


def _reference(event: type[Event]) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name_of(event)}/schema"}


def _schema(event: type[Event]) -> JsonObject:
    """The schema with its inner references leading to where it stands in the document."""
    schema = schema_of(event)
    del schema["$schema"]
    text = json.dumps(schema).replace('"#/$defs/', f'"#/components/schemas/{name_of(event)}/schema/$defs/')
    return {"schemaFormat": FORMAT, "schema": json.loads(text)}


_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
