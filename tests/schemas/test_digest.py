"""A digest has one text and one stored form, and no two lists of parts share one."""

from __future__ import annotations

import hashlib
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.schemas.content import binding
from fencepost.schemas.digest import Digest, digest, meaning
from fencepost.schemas.errors import InvalidInput
from support.database import Database

PARTS = st.tuples(
    st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.integers(1, 12), st.text(max_size=4)
)
SURROGATES_FREE = PARTS.filter(lambda parts: all("\ud800" > c or c > "\udfff" for part in parts for c in str(part)))


def by_hand(*parts: str) -> bytes:
    """The rule as the database states it."""
    prefixed = b"".join(struct.pack(">i", len(part.encode())) + part.encode() for part in parts)
    return b"\x01" + hashlib.sha256(prefixed).digest()


def test_the_hash_is_over_length_prefixed_parts() -> None:
    parts = ("té", "op-1", "report.accepted")

    assert meaning(*parts, 2, "ref:x").raw == by_hand("fencepost.meaning.v1", *parts, "2", "ref:x")
    assert digest(*parts, 2, 7, "ref:x").raw == by_hand("fencepost.digest.v1", *parts, "2", "7", "ref:x")


def test_the_hash_never_changes() -> None:
    """Stored digests are compared with ones computed years later."""
    assert meaning("t", "o", "a", 1, "ref:x").text == (
        "sha256-v1:88dfe0da658adf7678c81c044296e6531869590b7e3bc62a89e91b84d404f53b"
    )
    assert digest("t", "o", "a", 1, 1, "ref:x").text == (
        "sha256-v1:4999a9accbbfc525c53df1de4617a2e9663baebcbb47c8e467e8f082292076a4"
    )


@given(SURROGATES_FREE, SURROGATES_FREE)
@settings(max_examples=200, deadline=None)
def test_meanings_are_equal_exactly_when_all_parts_are(one: Any, two: Any) -> None:
    assert (meaning(*one) == meaning(*two)) == (one == two)


def test_no_part_can_borrow_from_its_neighbour() -> None:
    assert meaning("ab", "c", "t", 1, "b") != meaning("a", "bc", "t", 1, "b")
    assert digest("a", "b", "t", 1, 12, "b") != digest("a", "b", "t", 11, 2, "b")
    assert digest("a", "b", "t", 1, 1, "b") != digest("a", "b", "t", 1, 2, "b")
    assert meaning("a", "b", "t", 1, "b") != digest("a", "b", "t", 1, 1, "b")


def test_both_forms_give_the_digest_back() -> None:
    one = meaning("t", "o", "a", 1, "ref:x")

    assert Digest.parse_text(one.text) == one
    assert Digest.parse_raw(one.raw) == Digest.parse_raw(memoryview(one.raw)) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert len(one.raw) == 33 and len(one.text) == 74
    assert len({one, Digest(one.raw)}) == 1


def test_repr_is_short() -> None:
    assert len(repr(meaning("t", "o", "a", 1, "ref:x"))) < 32


def test_another_text_is_refused_by_name() -> None:
    text = meaning("t", "o", "a", 1, "ref:x").text
    assert Digest.parse_text(text).text == text

    for other in (text.upper(), text + "\n", text[:-1], "x" + text, "", text.replace("v1", "v2")):
        with pytest.raises(InvalidInput) as caught:
            Digest.parse_text(other, "fpdigest")
        assert caught.value.field == "fpdigest"


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x02" + b"0" * 32, b"\x01" + b"0" * 31, b"\x01" + b"0" * 33])
def test_other_bytes_are_refused_by_name(raw: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        Digest.parse_raw(raw, "meaning")
    assert caught.value.field == "meaning"


def test_the_database_computes_the_same_digests(database: Database) -> None:
    bound = binding(b'{"a":1}')
    cases = [
        ("t", "o", "report.accepted", 1, 1, bound),
        ("ténant \U0001f600", "o" * 200, "a", 32767, 2**63 - 1, "ref:é"),
        ("ab", "c", "t", 11, 2, "ref:b"),
        ("a", "bc", "t", 1, 12, "ref:b"),
    ]
    with database.connect(autocommit=True) as conn:
        for tenant, operation, type_, version, epoch, text in cases:
            row = conn.execute(
                "select fencepost.meaning(%s, %s, %s, %s::int, %s), fencepost.digest(%s, %s, %s, %s::int, %s::bigint, %s)",
                [tenant, operation, type_, version, text, tenant, operation, type_, version, epoch, text],
            ).fetchone()
            assert row is not None
            assert Digest.parse_raw(row[0]) == meaning(tenant, operation, type_, version, text)
            assert Digest.parse_raw(row[1]) == digest(tenant, operation, type_, version, epoch, text)
