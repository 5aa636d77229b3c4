"""Which settings of a Kafka client may be used: none that shows credentials to the network or skips the server's certificate."""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.loopback import is_loopback

_UNVERIFIED = (
    ("enable.ssl.certificate.verification", "false"),
    ("ssl.endpoint.identification.algorithm", "none"),
)


def require_private(bootstrap: str, options: Mapping[str, object], *, field: str = "") -> None:
    """ConfigError for SASL without TLS to any address off loopback, and for TLS that does not check the server.

    `field` stands before the option's name in the error; values never appear in it.
    """
    hosts = [address.strip().rpartition("://")[2].rpartition(":")[0] for address in bootstrap.split(",")]
    protocol = str(options.get("security.protocol", "plaintext")).lower()
    if protocol == "sasl_plaintext" and not all(is_loopback(host) for host in hosts):
        raise ConfigError(
            "SASL without TLS sends credentials in the clear",
            field=f"{field}security.protocol",
            hint="use SASL_SSL, or insecure=True where the network itself is protected",
        )
    for name, off in _UNVERIFIED:
        if str(options.get(name, "")).lower() in {off, "0", "f"}:
            raise ConfigError("the server would not be verified", field=f"{field}{name}", hint="set insecure=True")
