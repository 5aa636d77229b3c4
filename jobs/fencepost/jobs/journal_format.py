"""The bytes of a journal, version 1: a segment is a header and then frames; all numbers are little-endian.

    header   magic 8, version u16, size of the header u16, name of the checksum 12, file uuid 16, number u64,
             first seq u64, previous segment's digest 32, machine id 16, checksum of all this u32, state u8, zeros 3
    frame    len u32, ~len u32, seq u64, prev_crc u32, crc u32, payload, zeros up to a multiple of 8

``crc`` covers the 20 bytes before it and the payload. ``prev_crc`` is the crc of the frame before, of the header for the
first: frames of another file, an older copy or another order do not chain. The checksum is CRC-32 (IEEE 802.3), which the
standard library has: whoever must read a journal on a bad day needs nothing installed. It finds every flipped bit and
every burst of up to 32 bits; whole segments are also bound by the sha256 in their successor's header.

Every later version keeps magic, version and size of the header where they are, and ends its header with the checksum of
what is before it, the state byte and three bytes: so a reader tells a newer segment, which it refuses, from a damaged one.
A member or a kind of record that older readers may pass over needs no new version; one that they must not pass over does.
A version is read one release before it is written, and read for as long as segments of it can be needed for a recovery.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from hashlib import sha256
from uuid import UUID

__all__ = [
    "ALIGNMENT",
    "CHECKSUM",
    "FRAME_SIZE",
    "HEADER_SIZE",
    "MAGIC",
    "NO_DIGEST",
    "OFFLINE",
    "ONLINE",
    "PAYLOAD_BYTES_MAX",
    "READABLE",
    "STATE_AT",
    "VERSION",
    "FrameHead",
    "Header",
    "checksum",
    "frame",
    "frame_head",
    "frame_size",
    "segment_digest",
]

MAGIC = b"\x89FPJ\r\n\x1a\n"
VERSION = 1
"""What is written."""
READABLE = (1,)
"""What is read; each has a journal recorded in the tests."""
CHECKSUM = b"crc32-ieee\0\0"
HEADER = struct.Struct("<8sHH12s16sQQ32s16sI")
STATE_AT = HEADER.size
HEADER_SIZE = STATE_AT + 4
FRAME = struct.Struct("<IIQII")
FRAME_SIZE = FRAME.size
CHECKED = struct.Struct("<IIQI")
ALIGNMENT = 8
PAYLOAD_BYTES_MAX = 65_536
NO_DIGEST = bytes(32)

# Invariant: every bit differs, so no single flipped bit turns one state into the other.
ONLINE = 0x5A
OFFLINE = 0xA5


def checksum(data: bytes, before: int = 0) -> int:
    """CRC-32 of the bytes, continued from ``before``."""
    return zlib.crc32(data, before)


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says of itself; ``previous`` is the digest of the segment before it, zeros in the first."""

    file: UUID
    number: int
    first_seq: int
    previous: bytes
    machine: UUID

    def encode(self, state: int = ONLINE) -> bytes:
        """The 112 bytes at the start of the file."""
        fixed = (MAGIC, VERSION, HEADER_SIZE, CHECKSUM, self.file.bytes, self.number, self.first_seq, self.previous)
        covered = HEADER.pack(*fixed, self.machine.bytes, 0)[:-4]
        return covered + struct.pack("<IBBBB", checksum(covered), state, 0, 0, 0)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Header, int] | str:
        """The header and its checksum, from which the first frame chains; or which part of it does not verify.

        ``newer`` is a header that verifies, of a version that is not read here yet.
        """
        if len(data) < HEADER_SIZE:
            return "header_cut"
        magic, version, size, name, file, number, first, previous, machine, crc = HEADER.unpack_from(data)
        if magic != MAGIC:
            return "magic"
        if version > max(READABLE) and _verifies(data, size):
            return "newer"
        if checksum(data[: STATE_AT - 4]) != crc or any(data[STATE_AT + 1 : HEADER_SIZE]):
            return "header"
        if version not in READABLE or size != HEADER_SIZE or name != CHECKSUM:
            return "version"
        return cls(UUID(bytes=file), number, first, previous, UUID(bytes=machine)), crc


def _verifies(data: bytes, size: int) -> bool:
    """Whether this is a whole header of that size, whatever is in it."""
    if not HEADER_SIZE <= size <= len(data):
        return False
    covered, (crc,) = data[: size - 8], struct.unpack_from("<I", data, size - 8)
    return bool(checksum(covered) == crc) and not any(data[size - 3 : size])


@dataclass(frozen=True, slots=True)
class FrameHead:
    """The 24 bytes before a payload; ``length`` is None when its two copies disagree."""

    length: int | None
    seq: int
    prev_crc: int
    crc: int


def frame(seq: int, prev_crc: int, payload: bytes) -> tuple[bytes, int]:
    """The whole frame, and its crc for the next one."""
    length = len(payload)
    covered = CHECKED.pack(length, length ^ 0xFFFFFFFF, seq, prev_crc)
    crc = checksum(payload, checksum(covered))
    data = covered + struct.pack("<I", crc) + payload
    return data.ljust(frame_size(length), b"\0"), crc


def frame_head(data: bytes, offset: int) -> FrameHead:
    """What stands before the payload of the frame at ``offset``; needs ``FRAME_SIZE`` bytes there."""
    length, inverse, seq, prev_crc, crc = FRAME.unpack_from(data, offset)
    return FrameHead(length if length ^ inverse == 0xFFFFFFFF else None, seq, prev_crc, crc)


def frame_size(length: int) -> int:
    """Bytes of a frame whose payload has ``length``."""
    return (FRAME_SIZE + length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def segment_digest(data: bytes) -> bytes:
    """sha256 of a segment without its state byte, which alone may change after the fact."""
    return sha256(data[:STATE_AT] + data[HEADER_SIZE:]).digest()
