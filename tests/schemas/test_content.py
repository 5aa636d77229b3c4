"""Equal content has one binding, different content another, and what has no single meaning is refused."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.schemas import content
from fencepost.schemas.content import (
    as_binding,
    binding,
    canonical,
    decode,
    encode,
    reference_binding,
)
from fencepost.schemas.errors import InvalidInput, Undecodable

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
LEAF = st.none() | st.booleans() | st.integers(-content.INTEGER_MAX, content.INTEGER_MAX) | TEXT
VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=20
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=5)
FUZZ = settings(max_examples=150, deadline=None)


@given(VALUE)
@FUZZ
def test_canonical_bytes_are_those_of_rfc8785(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)


def test_names_are_ordered_by_utf16_units() -> None:
    value: Any = {"\ufb33": 1, "\U0001f600": 2, "\u20ac": 3, "1": 4, "\x80": 5, "\r": 6, "\u00f6": 7}

    assert canonical(value) == rfc8785.dumps(value)
    assert list(json.loads(canonical(value)).values()) == [6, 4, 5, 7, 3, 2, 1]


@given(OBJECT)
@FUZZ
def test_decode_gives_back_what_encode_was_given(value: Any) -> None:
    raw = encode(value)

    assert decode(raw) == value
    assert list(decode(raw)) == list(value)
    assert decode(canonical(value)) == value


@given(OBJECT, st.randoms(use_true_random=False))
@FUZZ
def test_order_spacing_and_escapes_do_not_change_the_binding(value: Any, random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    spaced = json.dumps(dict(items), ensure_ascii=True, indent=2).encode()

    assert binding(spaced) == binding(encode(value))


@given(OBJECT, OBJECT)
@FUZZ
def test_bindings_are_equal_exactly_when_the_material_content_is(one: Any, two: Any) -> None:
    def material(value: Any) -> bytes:
        return rfc8785.dumps({key: item for key, item in value.items() if key != "_private"})

    assert (binding(encode(one)) == binding(encode(two))) == (material(one) == material(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (b'{"a":1,"b":2}', b'{"b":2,"a":1}'),
        (b'{"a":1}', b' {\n"a" :\t1 } \r\n'),
        ('{"a":"é"}'.encode(), b'{"a":"\\u00e9"}'),
        ('{"a":"\U0001f600"}'.encode(), b'{"a":"\\ud83d\\ude00"}'),
        (b'{"a":"/"}', b'{"a":"\\/"}'),
        (b'{"a":0}', b'{"a":-0}'),
        (b'{"a":1}', b'{"a":1,"_private":{"name":"x"}}'),
        (b'{"a":1,"_private":{"name":"x"}}', b'{"_private":null,"a":1}'),
    ],
)
def test_texts_of_one_meaning_have_one_binding(one: bytes, two: bytes) -> None:
    assert one != two
    assert binding(one) == binding(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (b'{"a":9007199254740990}', b'{"a":9007199254740991}'),
        (b'{"a":"1"}', b'{"a":1}'),
        (b'{"a":true}', b'{"a":1}'),
        (b'{"a":null}', b"{}"),
        (b'{"a":[]}', b'{"a":{}}'),
        (b'{"a":""}', b'{"a":null}'),
        (b'{"a":[1,2]}', b'{"a":[2,1]}'),
        (b'{"a":"Z"}', b'{"a":"+00:00"}'),
        ('{"a":"\u00e9"}'.encode(), '{"a":"e\u0301"}'.encode()),
        (b'{"a":{"_private":1}}', b'{"a":{"_private":2}}'),
        (b'{"a":"x"}', b'{"a":"X"}'),
    ],
)
def test_texts_of_different_meanings_have_different_bindings(one: bytes, two: bytes) -> None:
    assert binding(one) != binding(two)


def test_the_binding_is_of_the_raw_json_and_is_written_down() -> None:
    expected = hashlib.sha256(b'{"a":1,"z":"\xc3\xa9"}').hexdigest()

    assert binding(b'{"z":"\\u00e9", "a":1, "_private":{"who":"x"}}') == f"jcs-sha256:{expected}"


NESTED_64 = b'{"a":' * 63 + b"{}" + b"}" * 63
NESTED_65 = b'{"a":' * 64 + b"{}" + b"}" * 64


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b' {"a": [1, -2, "x", null, true, false]}\n',
        b'{"a":9007199254740991,"b":-9007199254740991}',
        b'{"a":{"a":1},"b":{"a":1}}',
        b'{"a":"\\\\u0000"}',
        b'{"a":"\\\\ud800"}',
        b'{"a":"NaN 1.5 1e9"}',
        b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
        b'{"a":[' + b",".join([b"{}"] * 100) + b"]}",
        NESTED_64,
        b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(10_000)) + b"}",
        b'{"a":"' + b"x" * (1024 * 1024 - 8) + b'"}',
    ],
)
def test_the_profile_admits(raw: bytes) -> None:
    assert decode(raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "reason", "field"),
    [
        (b"", "empty_payload", None),
        (b"\xef\xbb\xbf{}", "byte_order_mark", None),
        ("{}".encode("utf-16"), "not_utf8", None),
        ("{}".encode("utf-16-le"), "malformed_json", None),
        (b'{"a":"\xff"}', "not_utf8", None),
        (b'{"a":"\xed\xa0\x80"}', "not_utf8", None),
        (b'{"a":"\xc0\x80"}', "not_utf8", None),
        (b"[]", "not_an_object", None),
        (b"1", "not_an_object", None),
        (b'"x"', "not_an_object", None),
        (b"null", "not_an_object", None),
        (b"{", "malformed_json", None),
        (b"{} {}", "malformed_json", None),
        (b'{"a":1,}', "malformed_json", None),
        (b"{'a':1}", "malformed_json", None),
        (b'{"a":01}', "malformed_json", None),
        (b'{"a":+1}', "malformed_json", None),
        (b'{"a":1}//', "malformed_json", None),
        (b'{"a":"\n"}', "malformed_json", None),
        (b'{"a":"\x00"}', "malformed_json", None),
        (b'{"a":1,"a":1}', "duplicate_key", "/a"),
        (b'{"x":[{"a":1,"\\u0061":2}]}', "duplicate_key", "/x/0/a"),
        (b'{"a":1.0}', "float", "/a"),
        (b'{"a":{"b":[1,1e2]}}', "float", "/a/b/1"),
        (b'{"a":-0.0}', "float", "/a"),
        (b'{"a":1E400}', "float", "/a"),
        (b'{"a":9007199254740992}', "integer_range", "/a"),
        (b'{"a":-9007199254740992}', "integer_range", "/a"),
        (b'{"a":1180591620717411303424}', "integer_range", "/a"),
        (b'{"a":' + b"9" * 5000 + b"}", "integer_range", None),
        (b'{"a":NaN}', "not_finite", "/a"),
        (b'{"a":[Infinity]}', "not_finite", "/a/0"),
        (b'{"a":-Infinity}', "not_finite", "/a"),
        (b'{"a":"\\ud800"}', "lone_surrogate", None),
        (b'{"a":"\\udc00x"}', "lone_surrogate", None),
        (b'{"\\ud800\\u0041":1}', "lone_surrogate", None),
        (b'{"a":"x\\u0000"}', "nul", "/a"),
        (b'{"a":{"\\u0000":1}}', "nul", "/a/*"),
        (NESTED_65, "too_deep", "/a" * 64),
        (b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}", "too_deep", None),
        (b"[" * 100_000, "too_deep", None),
        (b"{" + b",".join(b'"k%d":1' % n for n in range(10_001)) + b"}", "too_many_keys", None),
        (b'{"a":"' + b"x" * (1024 * 1024 - 7) + b'"}', "too_large", None),
    ],
)
def test_what_has_no_single_meaning_is_refused_with_its_reason(raw: bytes, reason: str, field: str | None) -> None:
    with pytest.raises(Undecodable) as caught:
        decode(raw)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    with pytest.raises(Undecodable):
        binding(raw)


@given(st.binary(max_size=40) | OBJECT.map(lambda value: json.dumps(value).encode()))
@FUZZ
def test_any_bytes_are_read_like_the_standard_library_reads_them_or_refused(raw: bytes) -> None:
    try:
        value = decode(raw)
    except Undecodable:
        return
    assert value == json.loads(raw)


def test_limits_are_the_callers() -> None:
    assert decode(b'{"a":1}', limit=7) == {"a": 1}
    with pytest.raises(Undecodable) as caught:
        decode(b'{"a":1}', limit=6)
    assert caught.value.reason == "too_large"


def test_messages_show_neither_values_nor_keys_that_look_like_text() -> None:
    with pytest.raises(Undecodable) as caught:
        decode(b'{"lines":[{"Jane Doe, 12 High St":{"price":1.25}}]}')

    assert caught.value.field == "/lines/0/*/price"
    assert "1.25" not in str(caught.value) and "Jane" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": 1.5}, "/a"),
        ({"a": float("nan")}, "/a"),
        ({"a": 2**53}, "/a"),
        ({"a": ["\ud800"]}, "/a/0"),
        ({"\0": 1}, "/*"),
        ({1: 1}, "payload"),
        ({"a": (1,)}, "/a"),
        ({"a": b"x"}, "/a"),
    ],
)
def test_a_value_outside_the_profile_is_refused_by_path(value: Any, field: str) -> None:
    assert canonical({"a": 1}) == encode({"a": 1}) == b'{"a":1}'

    for write in (canonical, encode):
        with pytest.raises(InvalidInput) as caught:
            write(value)
        assert caught.value.field == field


def test_a_value_without_end_is_refused() -> None:
    value: Any = {}
    value["a"] = value

    with pytest.raises(InvalidInput):
        canonical(value)


def test_a_reference_is_kept_and_bounded() -> None:
    assert reference_binding("s3://bucket/a?version=1") == "ref:s3://bucket/a?version=1"
    assert reference_binding("x" * 512) == "ref:" + "x" * 512
    for bad in ("", "x" * 513, "a\nb", " a", "\ud800"):
        with pytest.raises(InvalidInput) as caught:
            reference_binding(bad)
        assert caught.value.field == "reference"


def test_only_the_two_forms_are_bindings() -> None:
    for good in (binding(b"{}"), reference_binding("x")):
        assert as_binding(good) == good
    for bad in ("", "x", "ref:", "jcs-sha256:" + "A" * 64, "jcs-sha256:" + "a" * 64 + "\n", "sha256:" + "a" * 64):
        with pytest.raises(InvalidInput):
            as_binding(bad)
    assert re.fullmatch(r"jcs-sha256:[0-9a-f]{64}", binding(b"{}"))
