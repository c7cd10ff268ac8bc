"""Identity: what makes two pages one page, and what must keep them apart."""

import dataclasses
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_flow.data.identity import (
    IdentityError,
    MediaDigest,
    MediaSpan,
    Namespace,
    ObjectRange,
    PageHash,
    handshake_vector,
    media_digest,
    object_key,
    page_hashes,
)

BASE = Namespace(
    model="m",
    revision="r",
    weight_version=0,
    dtype="bfloat16",
    page_size=4,
    attention_layout="mla",
    lora="",
    codec="raw",
)
ROOT = BASE.root()
DIGESTS = [MediaDigest(hashlib.sha256(bytes([i])).digest()) for i in range(3)]
LENGTHS = {DIGESTS[0]: 1, DIGESTS[1]: 3, DIGESTS[2]: 9}

text = st.text(max_size=6)
namespaces = st.builds(
    Namespace,
    model=text,
    revision=text,
    weight_version=st.integers(0, 3),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    page_size=st.integers(1, 3),
    attention_layout=text,
    codec=text,
    lora=text,
    tenant_salt=st.binary(max_size=6),
    schema=st.integers(0, 2),
)


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Short sequences over few values, so that equal and nearly equal ones are drawn often."""
    tokens = tuple(draw(st.lists(st.integers(0, 1), max_size=20)))
    spans, at = [], draw(st.integers(0, 4))
    while at < len(tokens) and draw(st.booleans()):
        digest = draw(st.sampled_from(DIGESTS))
        spans.append(MediaSpan(at, LENGTHS[digest], digest))
        at += LENGTHS[digest] + draw(st.integers(0, 2))
    return tokens, tuple(spans)


def visible(prefix: tuple[tuple[int, ...], tuple[MediaSpan, ...]], end: int) -> object:
    """What a page that ends at `end` has seen: the tokens and the spans that began before its end."""
    tokens, spans = prefix
    return tokens[:end], tuple((s.start, s.digest) for s in spans if s.start < end)


@given(prefixes(), prefixes())
def test_pages_have_equal_hashes_exactly_when_their_whole_prefixes_are_equal(a, b) -> None:
    size = 4
    chain_a = page_hashes(ROOT, u32(*a[0]), size, a[1])
    chain_b = page_hashes(ROOT, u32(*b[0]), size, b[1])
    for i, left in enumerate(chain_a):
        for j, right in enumerate(chain_b):
            same = i == j and visible(a, (i + 1) * size) == visible(b, (j + 1) * size)
            assert (left == right) == same


@given(prefixes(), st.data())
def test_changing_any_token_changes_its_page_and_every_later_page_and_no_earlier_one(prefix, data) -> None:
    tokens, spans = prefix
    chain = page_hashes(ROOT, u32(*tokens), 4, spans)
    if not chain:
        return
    at = data.draw(st.integers(0, len(chain) * 4 - 1))
    changed = u32(*tokens)
    changed[at] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    other = page_hashes(ROOT, changed, 4, spans)
    for page, (left, right) in enumerate(zip(chain, other, strict=True)):
        assert (left == right) == (page < at // 4)


@given(prefixes(), st.integers(0, 5))
def test_a_chain_may_be_continued_from_any_page_boundary(prefix, cut) -> None:
    tokens, spans = prefix
    whole = page_hashes(ROOT, u32(*tokens), 4, spans, partial=True)
    cut = min(cut, len(tokens) // 4)
    parent = whole[cut - 1] if cut else ROOT
    tail = [MediaSpan(s.start - cut * 4, s.length, s.digest) for s in spans if s.start + s.length > cut * 4]
    assert page_hashes(parent, u32(*tokens[cut * 4 :]), 4, tail, partial=True) == whole[cut:]


def test_the_chain_is_the_documented_formula() -> None:
    tokens = u32(5, 6, 7, 0xFFFFFFFF, 9, 10)
    got = page_hashes(ROOT, tokens, 4, [MediaSpan(1, 1, DIGESTS[0]), MediaSpan(3, 3, DIGESTS[1])], partial=True)
    first = hashlib.sha256(
        b"pg" + ROOT + struct.pack("<I4I", 4, 5, 6, 7, 0xFFFFFFFF)
        + struct.pack("<I", 1) + DIGESTS[0] + struct.pack("<I", 3) + DIGESTS[1]
    ).digest()  # fmt: skip
    second = hashlib.sha256(b"pg" + first + struct.pack("<I2I", 2, 9, 10) + struct.pack("<I", 0) + DIGESTS[1]).digest()
    assert got == [first, second]


def test_every_page_that_a_span_covers_depends_on_its_digest() -> None:
    tokens = np.zeros(16, np.uint32)
    plain = page_hashes(ROOT, tokens, 4)
    spanned = page_hashes(ROOT, tokens, 4, [MediaSpan(5, 9, DIGESTS[2])])
    assert spanned[0] == plain[0]
    for page in (1, 2, 3):
        parent = spanned[page - 1]
        alone = page_hashes(parent, tokens[4 * page : 4 * page + 4], 4)
        assert alone[0] != spanned[page]


def test_a_partial_page_is_hashed_only_on_request_and_differs_from_the_full_page() -> None:
    tokens = u32(1, 2, 3, 0)
    assert page_hashes(ROOT, tokens[:3], 4) == []
    (partial,) = page_hashes(ROOT, tokens[:3], 4, partial=True)
    assert partial not in page_hashes(ROOT, tokens, 4)


def test_the_division_into_pages_is_part_of_the_identity() -> None:
    tokens = np.zeros(8, np.uint32)
    assert page_hashes(ROOT, tokens, 4)[-1] != page_hashes(ROOT, tokens, 8)[-1]


@given(namespaces, namespaces)
def test_namespaces_have_equal_roots_exactly_when_every_field_is_equal(a: Namespace, b: Namespace) -> None:
    assert (a.root() == b.root()) == (a == b)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Namespace)])
def test_each_field_of_a_namespace_separates(field: str) -> None:
    value = getattr(BASE, field)
    changed = value + 1 if isinstance(value, int) else value + (b"x" if isinstance(value, bytes) else "x")
    assert dataclasses.replace(BASE, **{field: changed}).root() != ROOT


def test_an_adapter_and_a_salt_of_the_same_name_are_not_confused() -> None:
    lora = dataclasses.replace(BASE, lora="X")
    salt = dataclasses.replace(BASE, tenant_salt=b"X")
    both = dataclasses.replace(BASE, lora="X", tenant_salt=b"X")
    assert len({ROOT, lora.root(), salt.root(), both.root()}) == 4


def test_text_cannot_move_from_one_field_to_its_neighbour() -> None:
    a = dataclasses.replace(BASE, model="ab", revision="c")
    b = dataclasses.replace(BASE, model="a", revision="bc")
    assert a.root() != b.root()


@given(st.tuples(st.binary(max_size=4), text, text, text), st.tuples(st.binary(max_size=4), text, text, text))
def test_media_digests_are_equal_exactly_when_all_four_parts_are(a, b) -> None:
    assert (media_digest(*a) == media_digest(*b)) == (a == b)


def test_the_handshake_vector_is_the_same_in_every_process_and_release() -> None:
    expected = "061a5fc8d3780a8458a66e96ee2607caee66fb70d1c5febf9d251ae1aedc2343"
    assert handshake_vector().hex() == expected
    code = "from omni_flow.data.identity import handshake_vector; print(handshake_vector().hex())"
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == expected


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        (np.zeros(4, np.int64), []),
        (np.zeros((2, 2), np.uint32), []),
        (np.zeros(4, np.uint32), [MediaSpan(0, 0, DIGESTS[0])]),
        (np.zeros(4, np.uint32), [MediaSpan(0, 1, MediaDigest(b"short"))]),
        (np.zeros(4, np.uint32), [MediaSpan(0, 3, DIGESTS[1]), MediaSpan(2, 1, DIGESTS[0])]),
        (np.zeros(9, np.uint32), [MediaSpan(0, 3, DIGESTS[1]), MediaSpan(4, 2, DIGESTS[1])]),
    ],
)
def test_ambiguous_input_is_refused(tokens: np.ndarray, spans: list[MediaSpan]) -> None:
    with pytest.raises(IdentityError):
        page_hashes(ROOT, tokens, 4, spans)


def test_a_parent_that_is_no_digest_is_refused() -> None:
    with pytest.raises(IdentityError, match="parent"):
        page_hashes(PageHash(b"x"), u32(1), 1)


@pytest.mark.parametrize(("field", "value"), [("page_size", 0), ("weight_version", -1), ("schema", -1)])
def test_a_namespace_refuses_impossible_numbers(field: str, value: int) -> None:
    with pytest.raises(IdentityError):
        dataclasses.replace(BASE, **{field: value})


@given(st.lists(st.integers(0, 65535), min_size=5, max_size=5))
def test_object_ranges_survive_packing_or_are_refused(numbers: list[int]) -> None:
    raw = struct.pack("<5H", *numbers)
    if numbers[0] < numbers[1] and numbers[2] < numbers[3]:
        assert ObjectRange.unpack(raw) == ObjectRange(*numbers)
        assert ObjectRange.unpack(raw).pack() == raw
    else:
        with pytest.raises(IdentityError):
            ObjectRange.unpack(raw)


def test_an_object_is_named_by_its_page_and_its_range() -> None:
    page, other = page_hashes(ROOT, u32(1, 2), 1)
    names = {object_key(p, r) for p in (page, other) for r in (ObjectRange(0, 2), ObjectRange(0, 1), ObjectRange(1, 2))}
    assert len(names) == 6
    assert (
        object_key(page, ObjectRange(0, 2)) == hashlib.sha256(b"ob" + page + struct.pack("<5H", 0, 2, 0, 1, 0)).digest()
    )
