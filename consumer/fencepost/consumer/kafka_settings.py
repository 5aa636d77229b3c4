"""What a user may set on the Kafka client, and why Kafka cannot be reached, told by field; no value is ever repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaError

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.kafka_security import require_private

__all__ = ["DEFAULTS", "FIXED", "Refusal", "checked", "refusal", "unusable"]

# Invariant: the user cannot loosen these; each of them would acknowledge work that is not done.
FIXED: Mapping[str, object] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "partition.assignment.strategy": "cooperative-sticky",
    "enable.partition.eof": False,
}
DEFAULTS: Mapping[str, object] = {
    "auto.offset.reset": "earliest",
    "queued.max.messages.kbytes": 16_384,
    "log_level": 2,
}
_OURS = frozenset({"bootstrap.servers", "group.id", "on_commit", "error_cb", "logger", "auto.commit.enable"})

_AUTHENTICATION = KafkaError._AUTHENTICATION  # pyright: ignore[reportPrivateUsage]
_SSL = KafkaError._SSL  # pyright: ignore[reportPrivateUsage]


def checked(bootstrap: str, config: Mapping[str, object], *, insecure: bool) -> dict[str, object]:
    """The settings as given, or ConfigError naming the first that is refused."""
    for name, value in config.items():
        if name in _OURS or value != FIXED.get(name, value):
            raise ConfigError(f"{name} is set by the runner", field=name, hint="remove it")
    if not insecure:
        require_private(bootstrap, config)
    return dict(config)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One side did not trust the other."""

    message: str
    field: str
    hint: str


_LOGIN = Refusal("Kafka refuses the login", "sasl.password", "correct sasl.mechanism, sasl.username and sasl.password")
_SERVER = Refusal(
    "the server's certificate is not accepted",
    "ssl.ca.location",
    "name the authority that signed it, and reach the server by a name in it",
)
_CLIENT = Refusal(
    "Kafka wants another client certificate, or one at all",
    "ssl.certificate.location",
    "set ssl.certificate.location and ssl.key.location",
)


def refusal(error: KafkaError) -> Refusal | None:
    """Why the broker and this client do not come together; None for an ordinary absence."""
    if error.code() == _AUTHENTICATION:
        return _LOGIN
    if error.code() == _SSL:
        return _SERVER
    # A server that ends the handshake sends an alert, which librdkafka tells as a lost connection.
    return _CLIENT if "SSL alert number" in error.str() else None


def unusable(error: KafkaError, config: Mapping[str, object]) -> ConfigError:
    """A setting that librdkafka refuses, by its name."""
    said = error.str()
    if said.startswith("No such configuration property"):
        return ConfigError(f"Kafka client: {said}", field="config")
    named = next((name for name in re.findall(r"[a-z][a-z.]+[a-z]", said) if name in config), "config")
    return ConfigError("Kafka client: a setting is not acceptable", field=named, hint="correct its value")
