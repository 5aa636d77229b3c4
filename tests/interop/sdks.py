"""The two SDKs under one face: a message becomes attributes and data, and attributes and data become a message."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from cloudevents.core.bindings import kafka, rabbitmq
from cloudevents.core.v1.event import CloudEvent

from fencepost.schemas.content import binding
from fencepost.schemas.digest import digest
from support import javascript

BrokerName = Literal["kafka", "rabbitmq"]
Mode = Literal["binary", "structured"]


@dataclass(frozen=True, slots=True)
class Message:
    """What a broker carries; the content type is a header of Kafka and a property of AMQP."""

    headers: dict[str, str]
    body: bytes
    content_type: str | None = None
    key: str | None = None


class Sdk(Protocol):
    """An implementation of CloudEvents that is not ours."""

    def read(self, broker: BrokerName, message: Message) -> dict[str, Any]:
        """The attributes, and the data under `data`."""
        ...

    def write(self, broker: BrokerName, mode: Mode, attributes: Mapping[str, str], payload: bytes) -> Message:
        """A message of these attributes; `fpdigest` is computed unless it is given."""
        ...


class Python:
    """The Python SDK; the digest is computed by our own code."""

    def read(self, broker: BrokerName, message: Message) -> dict[str, Any]:
        if broker == "kafka":
            headers = {name: value.encode() for name, value in message.headers.items()}
            event = kafka.from_kafka_event(kafka.KafkaMessage(headers=headers, key=message.key, value=message.body))
        else:
            event = rabbitmq.from_rabbitmq_event(
                rabbitmq.RabbitMQMessage(headers=message.headers, content_type=message.content_type, body=message.body)
            )
        found = {name: value for name, value in event.get_attributes().items() if value is not None}
        return {**found, "time": found["time"].isoformat(), "data": event.get_data()}

    def write(self, broker: BrokerName, mode: Mode, attributes: Mapping[str, str], payload: bytes) -> Message:
        given: dict[str, Any] = dict(attributes)
        if "fpdigest" not in attributes:
            given["fpdigest"] = _digest(attributes, payload)
        if "time" in attributes:
            given["time"] = datetime.fromisoformat(attributes["time"])
        event = CloudEvent(attributes=given, data=json.loads(payload))
        if broker == "kafka":
            record = kafka.to_binary_event(event) if mode == "binary" else kafka.to_structured_event(event)
            headers = {name: value.decode() for name, value in record.headers.items()}
            return Message(headers, _bytes(record.value), key=cast(str | None, record.key))
        sent = rabbitmq.to_binary_event(event) if mode == "binary" else rabbitmq.to_structured_event(event)
        return Message(sent.headers, sent.body, sent.content_type)


@dataclass(frozen=True, slots=True)
class JavaScript:
    """The JavaScript SDK in a process of its own; the digest is computed there, in JavaScript."""

    packages: Path

    def read(self, broker: BrokerName, message: Message) -> dict[str, Any]:
        headers = dict(message.headers)
        if message.content_type is not None:
            headers["content-type"] = message.content_type
        body = base64.b64encode(message.body).decode()
        request = {"op": "read", "broker": broker, "headers": headers, "key": message.key, "body": body}
        return cast(dict[str, Any], javascript.ask(self.packages, request)[0])

    def write(self, broker: BrokerName, mode: Mode, attributes: Mapping[str, str], payload: bytes) -> Message:
        event = {**attributes, "data": json.loads(payload)}
        request = {"op": "write", "broker": broker, "mode": mode, "event": event}
        made = javascript.ask(self.packages, request)[0]
        headers = cast(dict[str, str], made["headers"])
        body = base64.b64decode(made["body"])
        if broker == "kafka":
            return Message(headers, body, key=made.get("key"))
        return Message(headers, body, headers.pop("content-type"))


def _digest(attributes: Mapping[str, str], payload: bytes) -> str:
    type_, _, version = attributes["type"].rpartition(".v")
    identity = attributes["fptenant"], attributes["fpoperation"], type_, int(version), int(attributes["fpepoch"])
    return digest(*identity, binding(payload)).text


def _bytes(value: str | bytes | None) -> bytes:
    assert value is not None
    return value.encode() if isinstance(value, str) else value
