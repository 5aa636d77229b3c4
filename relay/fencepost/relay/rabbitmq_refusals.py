"""Why RabbitMQ cannot be reached, told by field; nothing that the broker or the library said is repeated."""

from __future__ import annotations

import ssl

from aiormq.exceptions import AuthenticationError, ProbableAuthenticationError

from fencepost.schemas.errors import Unreachable

# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL.
OTHER_HOST = frozenset({62, 64})


def unreachable(error: BaseException, url: str) -> Unreachable:
    """What to raise when connecting ended with this error; the address is without user and password."""
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    match error, cause:
        case _, ssl.SSLCertVerificationError(verify_code=code) if code in OTHER_HOST:
            message, field = "the certificate that RabbitMQ shows is for another host", "url"
            hint = "use a name of the certificate"
        case _, ssl.SSLCertVerificationError():
            message, field = "the certificate that RabbitMQ shows is not accepted", "options.tls_ca"
            hint = "it must hold the authority that signed the certificate"
        case ((AuthenticationError() | ProbableAuthenticationError()), _):
            message, field, hint = "RabbitMQ refuses the login", "url", "correct user and password"
        case _:
            message, field = f"RabbitMQ does not answer: {type(error).__name__}", "url"
            hint = "check that it runs there and has this virtual host"
            if url.startswith("amqps:"):
                hint += "; where it asks clients for a certificate, give tls_certificate and tls_key"
    return Unreachable(message, address=url, field=field, hint=hint)
