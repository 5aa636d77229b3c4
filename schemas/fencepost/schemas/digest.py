"""One digest for one meaning, computed alike in Python and in SQL.

``sha256`` over length-prefixed parts: for each part its octet length as a big-endian 4-byte integer, then its
UTF-8 bytes. The first part names the purpose and the algorithm, so no digest can be taken for another:

    meaning  fencepost.meaning.v1, tenant, operation, type, version, binding
    digest   fencepost.digest.v1, tenant, operation, type, version, epoch, binding

Numbers are parts in decimal. Stored as 33 bytes (algorithm tag 1, then the hash), written ``sha256-v1:<64 hex>``.
Never over delivery ids, timestamps or private text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from fencepost.schemas.errors import InvalidInput

__all__ = ["DIGEST_BYTES", "TAG", "Digest", "digest", "meaning"]

DIGEST_BYTES = 33
TAG = b"\x01"
_TEXT = re.compile(r"sha256-v1:([0-9a-f]{64})\Z")


@dataclass(frozen=True, slots=True, repr=False)
class Digest:
    """33 bytes: the algorithm tag and the hash; raises InvalidInput for anything else."""

    raw: bytes

    def __post_init__(self) -> None:
        if type(self.raw) is not bytes or len(self.raw) != DIGEST_BYTES or not self.raw.startswith(TAG):
            raise InvalidInput("a stored digest is the byte 1 followed by 32 bytes", field="digest")

    @property
    def text(self) -> str:
        """The form on the wire: ``sha256-v1:`` and 64 lower-case hex digits."""
        return f"sha256-v1:{self.raw[1:].hex()}"

    @classmethod
    def parse_text(cls, text: str, field: str = "digest") -> Digest:
        """The digest written as ``text``, or InvalidInput; upper case, spaces and unknown algorithms are refused."""
        if (found := _TEXT.match(text)) is None:
            raise InvalidInput("a digest is sha256-v1: and 64 hex digits", field=field)
        return cls(TAG + bytes.fromhex(found.group(1)))

    @classmethod
    def parse_raw(cls, raw: bytes | bytearray | memoryview, field: str = "digest") -> Digest:
        """The digest stored as ``raw``, or InvalidInput."""
        try:
            return cls(bytes(raw))
        except InvalidInput as error:
            raise InvalidInput(error.message, field=field) from None

    def __repr__(self) -> str:
        return f"Digest(sha256-v1:{self.raw[1:5].hex()}…)"

    def __str__(self) -> str:
        return self.text


def meaning(tenant: str, operation: str, type: str, version: int, binding: str) -> Digest:
    """What an identity stands for, whatever the epoch: equal meanings are duplicates, others conflicts."""
    return _hash(_recurring("fencepost.meaning.v1", tenant), operation, _recurring(type, version), binding)


def digest(tenant: str, operation: str, type: str, version: int, epoch: int, binding: str) -> Digest:
    """The meaning together with the authority epoch under which its source accepted it."""
    return _hash(_recurring("fencepost.digest.v1", tenant), operation, _recurring(type, version, epoch), binding)


def _hash(first: bytes, operation: str, middle: bytes, binding: str) -> Digest:
    return Digest(TAG + sha256(b"".join((first, _part(operation), middle, _part(binding)))).digest())


def _part(part: str) -> bytes:
    octets = part.encode()
    return len(octets).to_bytes(4, "big") + octets


# The same few come with every event of a stream.
@lru_cache(maxsize=1024)
def _recurring(*parts: str | int) -> bytes:
    return b"".join(_part(str(part)) for part in parts)
