"""Which RabbitMQ addresses may be used: none that shows credentials to the network or skips the server's certificate."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.loopback import is_loopback


def checked_address(url: str, *, insecure: bool) -> str:
    """The address as given, or ConfigError; neither user nor password appear in an error.

    Refused without `insecure`: `no_verify_ssl`, and `amqp://` (credentials in the clear) to any host off loopback.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        raise ConfigError("not an address", field="url", hint="amqp://user:password@host:5672/vhost") from None
    if parts.scheme not in {"amqp", "amqps"} or not host:
        raise ConfigError("not an AMQP address", field="url", hint="amqps://user:password@host:5671/vhost")
    if insecure:
        return url
    if "no_verify_ssl" in {name.lower() for name in parse_qs(parts.query, keep_blank_values=True)}:
        raise ConfigError("the server would not be verified", field="url", hint="drop no_verify_ssl, or insecure=True")
    if parts.scheme == "amqp" and not is_loopback(host):
        raise ConfigError(
            "amqp:// sends credentials in the clear",
            field="url",
            hint="use amqps://, or insecure=True where the network itself is protected",
        )
    return url
