"""Content has one meaning or is refused: a restricted profile of JSON, its canonical bytes and its binding.

The profile: UTF-8 without a byte order mark, an object at the top, no duplicate member names, no floating point
(a number token with ``.``, ``e`` or ``E``), integers within ±(2**53 - 1), no NaN or Infinity, no lone surrogate,
no U+0000, nesting and size bounded. Within it RFC 8785 needs no number formatting, so two texts have the same
canonical bytes exactly when they hold the same members and values. Strings are compared as they are: no Unicode
normalisation, and ``null`` differs from an absent member.

``binding`` reads the bytes, never a model: the producer, the database and every consumer compute the same one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, NoReturn, TypeAlias, cast

from pydantic_core import from_json, to_json

from fencepost.schemas.errors import InvalidInput, Reason, Undecodable
from fencepost.schemas.identity import as_text

__all__ = [
    "DEPTH_MAX",
    "INTEGER_MAX",
    "KEYS_MAX",
    "PAYLOAD_BYTES_MAX",
    "PRIVATE_MEMBER",
    "REFERENCE_CHARS_MAX",
    "JsonObject",
    "JsonValue",
    "as_binding",
    "binding",
    "binding_of",
    "canonical",
    "decode",
    "encode",
    "reference_binding",
    "shown_path",
    "text_of",
]

PAYLOAD_BYTES_MAX = 1024 * 1024
DEPTH_MAX = 64
KEYS_MAX = 10_000
INTEGER_MAX = 2**53 - 1
REFERENCE_CHARS_MAX = 512
PRIVATE_MEMBER = "_private"
"""The reserved member at the top of a payload that no binding, digest or log ever sees."""

JsonValue: TypeAlias = "bool | int | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]


def decode(raw: bytes, *, limit: int = PAYLOAD_BYTES_MAX) -> JsonObject:
    """The object in ``raw``, or Undecodable; never a value that another reader could understand differently.

    ``limit`` is in bytes. ``field`` of the error is a path such as ``/lines/0/price`` where one is known.
    """
    value: JsonValue = _plain(raw) if len(raw) <= limit else None
    if value is None:
        text = text_of(raw, limit=limit)
        try:
            value = _DECODER.decode(text)
        except _Suspect:
            _explain(text)
    # Each can only be exceeded where there are as many signs of it, and counting signs is cheap.
    if raw.count(b":") > KEYS_MAX or b"\\u0000" in raw or raw.count(b"{") + raw.count(b"[") > DEPTH_MAX:
        try:
            _check(value)
        except _Found as found:
            raise found.undecodable() from None
    if not isinstance(value, dict):
        raise Undecodable("the payload is not a JSON object", reason="not_an_object")
    return value


def text_of(raw: bytes, *, limit: int) -> str:
    """The text of ``raw``, or Undecodable: UTF-8, valid JSON, at most 200 levels deep, ``limit`` in bytes."""
    if len(raw) > limit:
        raise Undecodable(f"the payload has {len(raw)} bytes, at most {limit} are allowed", reason="too_large")
    if not raw:
        raise Undecodable("the payload is empty", reason="empty_payload")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise Undecodable("the payload begins with a byte order mark", reason="byte_order_mark")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Undecodable("the payload is not UTF-8", reason="not_utf8") from None
    try:
        from_json(raw, cache_strings="keys")  # Invariant: bounds the depth (200) before any recursive pass.
    except ValueError as error:
        reason = _syntax(str(error))
        raise Undecodable("the payload is not acceptable JSON", reason=reason) from None
    return text


def encode(value: JsonObject, *, limit: int = PAYLOAD_BYTES_MAX) -> bytes:
    """Compact UTF-8 JSON that ``decode`` gives back equal, member order kept, or InvalidInput naming the path."""
    _require(value)
    raw = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    if len(raw) > limit:
        raise InvalidInput(
            f"the payload has {len(raw)} bytes, at most {limit} are allowed",
            field="payload",
            hint="store the content elsewhere and send a reference",
        )
    return raw


def canonical(value: JsonValue) -> bytes:
    """The RFC 8785 form of a value of the profile, the same for equal values; InvalidInput for any other value."""
    _require(value)
    return _canonical(value)


def binding(raw: bytes, *, limit: int = PAYLOAD_BYTES_MAX) -> str:
    """``jcs-sha256:`` and 64 hex digits of the material content of ``raw``, without its private member.

    Computed from the bytes alone. Raises Undecodable as ``decode`` does.
    """
    return binding_of(decode(raw, limit=limit))


def binding_of(value: JsonObject) -> str:
    """The binding of the bytes that ``decode`` read as ``value``, which stays as it is."""
    if PRIVATE_MEMBER in value:
        value = {name: item for name, item in value.items() if name != PRIVATE_MEMBER}
    return f"jcs-sha256:{sha256(_canonical(value)).hexdigest()}"


def reference_binding(ref: str) -> str:
    """``ref:`` and an immutable reference that the domain vouches for, or InvalidInput; at most 512 characters."""
    return f"ref:{as_text(ref, 'reference', chars_max=REFERENCE_CHARS_MAX)}"


def as_binding(value: str, field: str = "binding") -> str:
    """A content or reference binding in its text form, or InvalidInput."""
    if value.startswith("ref:"):
        as_text(value[4:], field, chars_max=REFERENCE_CHARS_MAX)
    elif _CONTENT_BINDING.match(value) is None:
        raise InvalidInput(f"{field} is neither a content nor a reference binding", field=field)
    return value


def shown_path(parts: Iterable[object]) -> str:
    """A dotted path of field names and indexes; a part that looks like text rather than a name becomes ``*``."""
    return ".".join(_shown(str(part)) for part in parts)


_FOREIGN = -(1 << 62)
_CONTENT_BINDING = re.compile(r"jcs-sha256:[0-9a-f]{64}\Z")
_SHOWN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _canonical(value: JsonValue) -> bytes:
    # Strings are escaped exactly as RFC 8785 has it; only the order of names is left to do.
    return to_json(_ordered(value))


def _ordered(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        # Beyond U+FFFF the order of UTF-16 is another one than that of characters.
        names = sorted(value) if all(map(str.isascii, value)) else sorted(value, key=_utf16)
        return {name: item if type(item := value[name]) in _LEAVES else _ordered(item) for name in names}
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    return value


_LEAVES = frozenset({str, int, bool, type(None)})


def _utf16(key: str) -> bytes:
    return key.encode("utf-16-be")


def _plain(raw: bytes) -> JsonObject | None:
    """The object in ``raw`` where one quick reading proves that it is of the profile; None where that takes more.

    Of two members of one name a reader keeps one. But every member has its colon, and without ``\\u`` no other colon is
    written than those in strings: so all of them are counted in what was read, or something was lost.
    """
    if b"\\u" in raw:
        return None
    try:
        value: JsonValue = from_json(raw, cache_strings="keys")
    except ValueError:
        return None
    return value if isinstance(value, dict) and _colons(value) == raw.count(b":") else None


def _colons(value: object) -> int:
    """Colons that it took to write this; a large negative number where something is not of the profile."""
    kind = type(value)
    if kind is str:
        return cast(str, value).count(":")
    if kind is int:
        return 0 if -INTEGER_MAX <= cast(int, value) <= INTEGER_MAX else _FOREIGN
    if kind is dict:
        members = cast(dict[str, object], value)
        return len(members) + sum([_colons(item) + name.count(":") for name, item in members.items()])
    if kind is list:
        return sum([_colons(item) for item in cast(list[object], value)])
    return 0 if value is None or kind is bool else _FOREIGN


class _Suspect(Exception):
    """The fast pass met something outside the profile; the slow pass says what and where."""


class _Found(Exception):
    def __init__(self, reason: Reason, message: str, path: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.path = path

    def undecodable(self) -> Undecodable:
        return Undecodable(self.message, reason=self.reason, field=self.path or None)


class _Refused:
    """Stands for a token or an object that the profile does not have."""

    def __init__(self, reason: Reason, message: str, key: str = "") -> None:
        self.reason: Reason = reason
        self.message = message
        self.key = key


def _suspect(_token: str) -> NoReturn:
    raise _Suspect


def _integer(token: str) -> int:
    if len(token) > 17 or not -INTEGER_MAX <= (value := int(token)) <= INTEGER_MAX:
        raise _Suspect
    return value


def _members(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Suspect
    return found


# Made once: each call of json.loads with options makes its own.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=_suspect, parse_constant=_suspect, parse_int=_integer
)


def _syntax(message: str) -> Reason:
    if "recursion limit" in message:
        return "too_deep"
    if "surrogate" in message or "lone leading" in message or "unexpected end of hex escape" in message:
        return "lone_surrogate"
    return "integer_range" if "number out of range" in message else "malformed_json"


def _explain(text: str) -> NoReturn:
    """Parse again, this time keeping what is wrong, and raise the first of it with its path."""

    def members(pairs: list[tuple[str, Any]]) -> Any:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                return _Refused("duplicate_key", "a member name occurs twice", key)
            found[key] = value
        return found

    def integer(token: str) -> Any:
        # A long number is out of range whatever its digits are; it need not be converted to know that.
        return int(token) if len(token) <= 17 else _Refused("integer_range", "an integer is beyond ±(2**53 - 1)")

    value = json.loads(
        text,
        object_pairs_hook=members,
        parse_float=lambda _: _Refused("float", "floating point is not accepted"),
        parse_constant=lambda _: _Refused("not_finite", "NaN and Infinity are not JSON"),
        parse_int=integer,
    )
    try:
        _check(value)
    except _Found as found:
        raise found.undecodable() from None
    raise Undecodable("the payload is not acceptable JSON", reason="malformed_json")  # pragma: no cover


def _require(value: object) -> None:
    try:
        _check(value)
    except _Found as found:
        raise InvalidInput(found.message, field=found.path or "payload", hint=_HINTS.get(found.reason)) from None


_HINTS: dict[Reason, str] = {
    "float": "use Decimal, a string, or a whole number of a smaller unit",
    "integer_range": "send it as a string",
    "nul": "remove it: PostgreSQL cannot store it",
    "lone_surrogate": "it is half of a character, often left by cutting a string",
}


def _check(value: object) -> None:
    """Raise _Found for the first part of ``value`` outside the profile; iterative, so that depth cannot hurt."""
    keys = 0
    pending: list[tuple[str, object, int]] = [("", value, 0)]
    while pending:
        path, item, depth = pending.pop()
        kind = type(item)
        if (kind is dict or kind is list) and depth == DEPTH_MAX:
            raise _Found("too_deep", f"more than {DEPTH_MAX} levels of nesting", path)
        if kind is dict:
            members = cast(dict[object, object], item)
            keys += len(members)
            if keys > KEYS_MAX:
                raise _Found("too_many_keys", f"more than {KEYS_MAX} members", path)
            inner = list(_named(members, path))
        elif kind is list:
            inner = [(f"{path}/{index}", each) for index, each in enumerate(cast(list[object], item))]
        else:
            _check_leaf(item, path)
            continue
        pending.extend((where, each, depth + 1) for where, each in reversed(inner))


def _named(members: dict[object, object], path: str) -> Iterator[tuple[str, object]]:
    for key, item in members.items():
        if type(key) is not str:
            raise _Found("malformed_json", f"a member name is a {type(key).__name__}, not a string", path)
        where = f"{path}/{_shown(key)}"
        _check_leaf(key, where)
        yield where, item


def _check_leaf(item: object, path: str) -> None:
    match item:
        case None | bool():
            return
        case str() if type(item) is str:
            if "\0" in item:
                raise _Found("nul", "U+0000 is not accepted", path)
            if not item.isascii() and _SURROGATE.search(item) is not None:
                raise _Found("lone_surrogate", "a lone surrogate is not accepted", path)
        case int() if type(item) is int:
            if not -INTEGER_MAX <= item <= INTEGER_MAX:
                raise _Found("integer_range", "an integer is beyond ±(2**53 - 1)", path)
        case float():
            raise _Found("float", "floating point is not accepted", path)
        case _Refused():
            where = f"{path}/{_shown(item.key)}" if item.key else path
            raise _Found(item.reason, item.message, where)
        case _:
            raise _Found("malformed_json", f"a {type(item).__name__} is not a JSON value", path)


def _shown(key: str) -> str:
    """A member name if it looks like a name; text of the content is not shown."""
    return key if _SHOWN_KEY.match(key) is not None else "*"
