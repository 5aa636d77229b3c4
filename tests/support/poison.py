"""Messages that mean nothing: contents with the reason why they cannot be read, and attributes out of form."""

from __future__ import annotations

SECRET = "do-not-log-me"

UNREADABLE: dict[str, tuple[bytes, str]] = {
    "nul": (b'{"document":"' + SECRET.encode() + b'\\u0000"}', "nul"),
    "lone surrogate": (b'{"document":"\\ud800' + SECRET.encode() + b'"}', "lone_surrogate"),
    "nan": (b'{"document":NaN,"x":"' + SECRET.encode() + b'"}', "not_finite"),
    "infinity": (b'{"document":Infinity}', "not_finite"),
    "too large a number": (b'{"document":1e999}', "float"),
    "a number that a database would print in full": (b'{"document":1e131071}', "float"),
    "large integer": (b'{"document":1180591620717411303424}', "integer_range"),
    "an integer that a float would round": (b'{"document":9007199254740993}', "integer_range"),
    "deep": (b'{"document":' + b"[" * 2000 + b"]" * 2000 + b"}", "too_deep"),
    "10 MiB": (b'{"document":"' + b"x" * (10 << 20) + b'"}', "too_large"),
    "not utf-8": (b'{"document":"\xff"}', "not_utf8"),
    "float": (b'{"document":1.0}', "float"),
    "duplicate member": (b'{"document":"a","document":"b"}', "duplicate_key"),
    "an array": (b"[]", "not_an_object"),
    "nothing": (b"", "empty_payload"),
    "raw nul": (b"\0", "malformed_json"),
}

ATTRIBUTES: list[tuple[str, str]] = [
    *[("fptenant", text) for text in ("", "a\0b", " a", "a\r\nfpoperation: b", "\ud800", "a" * 201)],
    *[("fpoperation", text) for text in ("", "a\0", "a\n", "a" * 201)],
    *[("type", text) for text in ("", "test.submitted", "Test.Submitted.v1", "test.submitted.v0", "test.\0.v1")],
    *[("partitionkey", text) for text in ("", "a\0b")],
    *[("sequence", text) for text in ("-1", "1", "9" * 40, "\u0661" * 20)],
    *[("fpepoch", text) for text in ("-1", "", "9" * 30, "1.0")],
    *[("fpdigest", text) for text in ("", "md5:0", "sha256-v9:" + "0" * 64, "sha256-v1:" + "0" * 64)],
    *[("time", text) for text in ("yesterday", "2026-01-01", "9999-99-99T00:00:00Z")],
    *[("id", text) for text in ("", "7")],
    ("specversion", "2.0"),
    ("source", ""),
    ("subject", "a\0b"),
]
"""Name and value, without a prefix; everything else of the message may be right."""
