"""Why Kafka cannot be reached, told by field: what librdkafka reports on the way says more than the timeout at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from confluent_kafka import KafkaError

from fencepost.relay.kafka_options import ALLOWED
from fencepost.schemas.errors import ConfigError

_AUTHENTICATION = KafkaError._AUTHENTICATION  # pyright: ignore[reportPrivateUsage]
_SSL = KafkaError._SSL  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One side did not trust the other; nothing of the broker's own text is repeated."""

    message: str
    field: str
    hint: str


LOGIN = Refusal(
    "Kafka refuses the login",
    "options.sasl.password",
    "correct sasl.mechanism, sasl.username and sasl.password",
)
SERVER = Refusal(
    "the certificate that Kafka shows is not accepted",
    "options.ssl.ca.location",
    "it must hold the authority that signed the certificate, and the address must use a name of the certificate",
)
CLIENT = Refusal(
    "Kafka does not accept the certificate of this client, or its absence",
    "options.ssl.certificate.location",
    "give ssl.certificate.location and ssl.key.location, signed by an authority that Kafka knows",
)


def refusal(error: KafkaError) -> Refusal | None:
    """What to tell for an error on the way to a broker, or None where it is an ordinary absence."""
    if error.code() == _AUTHENTICATION:
        return LOGIN
    if error.code() == _SSL:
        return SERVER
    # A server that breaks off the handshake says so by an alert; librdkafka counts that as a lost connection.
    return CLIENT if "SSL alert number" in error.str() else None


def unusable(error: KafkaError) -> ConfigError:
    """An option that librdkafka itself refuses, by name; its value is not repeated."""
    named = next((name for name in re.findall(r"[a-z][a-z.]+[a-z]", error.str()) if name in ALLOWED), None)
    return ConfigError(
        "the Kafka client cannot be made with these options",
        field="options" if named is None else f"options.{named}",
        hint="correct the value; a file must be PEM that this login may read",
    )
