"""Certificate authorities of single test sessions, and what they sign."""

from __future__ import annotations

from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from stack.certificate import Certificate, Files


class Authority:
    """An authority that nobody trusts of himself; what it signs is for `localhost` and for no address."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._made = trustme.CA()
        self.server = self._signed("localhost")
        client = folder / "client"
        client.mkdir()
        self.client: Files = self._signed("relay").write(client)
        self.path = folder / "authority.pem"
        self._made.cert_pem.write_to_path(self.path)

    def _signed(self, name: str) -> Certificate:
        leaf = self._made.issue_cert(name)
        key = load_pem_private_key(leaf.private_key_pem.bytes(), password=None)
        return Certificate(
            authority=self._made.cert_pem.bytes(),
            chain=b"".join(pem.bytes() for pem in leaf.cert_chain_pems),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
