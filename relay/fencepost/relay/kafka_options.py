"""What a user may set on the Kafka client: an allow-list, so that no option can switch a guarantee off."""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.kafka_security import require_private

ALLOWED = frozenset(
    {
        "broker.address.family",
        "client.dns.lookup",
        "client.id",
        "client.rack",
        "compression.codec",
        "compression.level",
        "compression.type",
        "connections.max.idle.ms",
        "enable.ssl.certificate.verification",
        "linger.ms",
        "metadata.max.age.ms",
        "partitioner",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "sasl.kerberos.keytab",
        "sasl.kerberos.principal",
        "sasl.kerberos.service.name",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
        "sasl.password",
        "sasl.username",
        "security.protocol",
        "socket.keepalive.enable",
        "socket.timeout.ms",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.cipher.suites",
        "ssl.crl.location",
        "ssl.curves.list",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.sigalgs.list",
    }
)
"""Options of librdkafka that are passed on. Changing `partitioner` breaks the order of keys across the change once."""


def checked_options(bootstrap: str, options: Mapping[str, str], *, insecure: bool) -> dict[str, str]:
    """The options as given, or ConfigError naming the first that is refused; values never appear in an error.

    Refused without `insecure`: SASL without TLS to any address off loopback, and TLS that does not check the server.
    """
    for name in options:
        if name not in ALLOWED:
            raise ConfigError(
                f"the Kafka option {name} cannot be set", field=f"options.{name}", hint="see kafka_options.ALLOWED"
            )
    if not insecure:
        require_private(bootstrap, options, field="options.")
    return dict(options)
