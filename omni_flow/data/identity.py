"""Identity of cached state: the namespace, the page hash chain, and the digests of media.

A page hash is the access check of the KV pool: whoever knows the hash may read the page, and two pages of
equal hash are one page. So the hash is SHA-256 throughout, every variable-length field is tagged and
length-prefixed, and nothing in it depends on the process (no `hash()`, no pickle, no seed). Pure: no clock,
no I/O.

    root = SHA-256(namespace)
    h_i  = SHA-256(b"pg" | h_{i-1} | u32 n | n x u32 token | (u32 offset | 32-byte media digest)*)

Integers are little-endian. `h_{i-1}` is the root for the first page, so the salt and the weight version
cannot be lost on the way to any tier. Layer and head range are not part of the hash; `ObjectRange` names the
object under it.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NewType

import numpy as np
import numpy.typing as npt

PageHash = NewType("PageHash", bytes)
"""32 bytes: SHA-256 of a page and of everything before it."""
MediaDigest = NewType("MediaDigest", bytes)
"""32 bytes: SHA-256 of what an encoder was given and of the encoder itself."""

DIGEST_BYTES = 32
SCHEMA_VERSION = 1
_U32 = struct.Struct("<I")
_RANGE = struct.Struct("<5H")


class IdentityError(ValueError):
    """A value that cannot be identified unambiguously; the message names the field and the mend."""


def _fields_digest(domain: bytes, items: Sequence[tuple[bytes, bytes]]) -> bytes:
    """SHA-256 over a domain and (tag, value) pairs, each preceded by its length: no two lists share an encoding."""
    parts = [_U32.pack(len(domain)), domain, _U32.pack(len(items))]
    for tag, value in items:
        parts += (_U32.pack(len(tag)), tag, _U32.pack(len(value)), value)
    return hashlib.sha256(b"".join(parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What must be equal before one page of KV may stand in for another.

    `weight_version` is that of the weights the values were computed with, as the weight pool counts it. `dtype` is the
    logical dtype of the stored values, `codec` the (lossy) encoding they went through ("raw" when none),
    `attention_layout` the attention kind and the order of bytes in a page, `lora` the adapter ("" for none).
    `tenant_salt` is set by the server, never by a client: a salt that a request supplies can be supplied by
    an attacker too.
    """

    model: str
    revision: str
    weight_version: int
    dtype: str
    page_size: int
    attention_layout: str
    codec: str = "raw"
    lora: str = ""
    tenant_salt: bytes = b""
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not 1 <= self.page_size < 1 << 32:
            raise IdentityError(f"page_size is {self.page_size} tokens; give at least 1 and less than 2**32")
        if self.weight_version < 0 or self.schema < 0:
            raise IdentityError("weight_version and schema count from 0; give no negative number")

    def root(self) -> PageHash:
        """Returns the parent of every first page in this namespace."""
        items: list[tuple[bytes, bytes]] = []
        for field in sorted(fields(self), key=lambda f: f.name):
            value = getattr(self, field.name)
            if isinstance(value, bytes):
                kind, raw = b"b", value
            elif isinstance(value, str):
                kind, raw = b"s", value.encode()
            else:
                kind, raw = b"i", str(int(value)).encode()
            items.append((field.name.encode(), kind + raw))
        return PageHash(_fields_digest(b"omni-flow namespace", items))


def media_digest(content: bytes, preprocessing: str, encoder: str, encoder_weights: str) -> MediaDigest:
    """Returns the digest of one piece of media as one encoder sees it.

    Args:
        content: the bytes as received (the file or the raw samples).
        preprocessing: every setting that changes what the encoder is given (size, crop, sample rate, number
            of rows).
        encoder: the universal name of the encoder.
        encoder_weights: revision or weight version of the encoder.
    """
    items = [
        (b"content", hashlib.sha256(content).digest()),
        (b"preprocessing", preprocessing.encode()),
        (b"encoder", encoder.encode()),
        (b"encoder_weights", encoder_weights.encode()),
    ]
    return MediaDigest(_fields_digest(b"omni-flow media", items))


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """`length` token positions, beginning at `start`, whose hidden states come from media and not from their
    token ids.

    `start` counts from the first token handed to `page_hashes` and is negative when the span began before it.
    The length is a function of the digest: whatever changes the number of rows belongs in the preprocessing
    that `media_digest` covers.
    """

    start: int
    length: int
    digest: MediaDigest


def _page_entries(spans: Sequence[MediaSpan], tokens: int, page_size: int) -> dict[int, bytes]:
    """Returns page number -> its (offset | digest)* bytes, for the pages that hold media."""
    entries: dict[int, bytes] = {}
    lengths: dict[bytes, int] = {}
    end_before: int | None = None
    for span in spans:
        if span.length < 1 or len(span.digest) != DIGEST_BYTES:
            raise IdentityError(
                f"media span at {span.start}: length {span.length}, digest of {len(span.digest)} bytes; "
                "give a length of at least 1 and a SHA-256 digest"
            )
        if end_before is not None and span.start < end_before:
            raise IdentityError(f"media span at {span.start} begins before {end_before}; sort them, without overlap")
        if lengths.setdefault(span.digest, span.length) != span.length:
            raise IdentityError(
                f"media {span.digest.hex()[:12]} has {lengths[span.digest]} and {span.length} rows in one sequence; "
                "put what changes the number of rows into its preprocessing"
            )
        end_before = span.start + span.length
        first, last = max(span.start, 0), min(end_before, tokens) - 1
        if last < first:
            continue
        for page in range(first // page_size, last // page_size + 1):
            offset = max(first - page * page_size, 0)
            entries[page] = entries.get(page, b"") + _U32.pack(offset) + span.digest
    return entries


def page_hashes(
    parent: PageHash,
    tokens: npt.NDArray[np.uint32],
    page_size: int,
    media: Sequence[MediaSpan] = (),
    *,
    partial: bool = False,
) -> list[PageHash]:
    """Returns the hashes of the pages of `tokens`, each chained to the one before and the first to `parent`.

    Args:
        parent: a namespace's root, or the hash of the page that ends where `tokens` begin.
        tokens: the token ids in order, one dimension of uint32. Positions inside media hold the model's
            placeholder ids.
        page_size: tokens a page, as in the namespace.
        media: the spans that touch `tokens`, sorted, without overlap.
        partial: hash a last page that is not full as well (its token count is part of its hash).

    A page lists every span that has a token in it. The offset of a span in a page is the position, counted
    from the page's first token, of the span's first token in that page: where it begins, or 0 where it
    continues from an earlier page. So every page a span covers depends on its digest. Equal hashes mean equal
    tokens, page division and media up to the end of the page, given that a digest fixes its length (refused
    otherwise within one sequence).

    Raises:
        IdentityError: tokens of another dtype or shape, or spans that are empty, unsorted or contradict each
            other.
    """
    if tokens.dtype != np.uint32 or tokens.ndim != 1:
        raise IdentityError(f"tokens are {tokens.dtype} of {tokens.ndim} dimensions; give one dimension of uint32")
    if page_size < 1 or len(parent) != DIGEST_BYTES:
        raise IdentityError(
            f"page size {page_size} and a parent of {len(parent)} bytes; give >= 1 and a SHA-256 digest"
        )
    entries = _page_entries(media, len(tokens), page_size) if media else {}
    raw = tokens.astype("<u4", copy=False).tobytes()
    step = 4 * page_size
    full = len(tokens) // page_size
    count = _U32.pack(page_size)
    sha, digest = hashlib.sha256, PageHash(bytes(parent))
    out: list[PageHash] = []
    # One concatenation a page: measured faster than update() calls and than filling a kept buffer.
    for start in range(0, full * step, step):
        message = b"pg" + digest + count + raw[start : start + step]
        if entries and (page := start // step) in entries:
            message += entries[page]
        digest = PageHash(sha(message).digest())
        out.append(digest)
    if partial and full * page_size < len(tokens):
        rest = len(tokens) - full * page_size
        message = b"pg" + digest + _U32.pack(rest) + raw[full * step :] + entries.get(full, b"")
        out.append(PageHash(sha(message).digest()))
    return out


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Names an object under a page hash: half-open layer and head ranges of one attention group.

    It says what the object holds, not who wrote it, so writers and readers of different parallel size share
    one chain. A latent that has no heads (MLA) is heads 0 to 1, stored once.
    """

    layer_start: int
    layer_stop: int
    head_start: int = 0
    head_stop: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.layer_start < self.layer_stop < 1 << 16 and 0 <= self.head_start < self.head_stop < 1 << 16):
            raise IdentityError(f"{self}: ranges are half-open, not empty and below 65536")
        if not 0 <= self.group < 1 << 16:
            raise IdentityError(f"{self}: group is a number below 65536")

    def pack(self) -> bytes:
        """Returns 10 bytes, five little-endian u16."""
        return _RANGE.pack(self.layer_start, self.layer_stop, self.head_start, self.head_stop, self.group)

    @classmethod
    def unpack(cls, raw: bytes) -> "ObjectRange":
        """Inverse of `pack`. Raises IdentityError for a range that `pack` never makes."""
        if len(raw) != _RANGE.size:
            raise IdentityError(f"an object range has {_RANGE.size} bytes, not {len(raw)}")
        return cls(*_RANGE.unpack(raw))


def object_key(page: PageHash, where: ObjectRange) -> bytes:
    """Returns the 32-byte name under which every tier keeps an object: SHA-256(b"ob" | page hash | range)."""
    return hashlib.sha256(b"ob" + page + where.pack()).digest()


def handshake_vector() -> bytes:
    """Returns 32 bytes that two processes compare when they connect.

    They differ when the two builds disagree on any part of identity (schema, encoding, chain, media): such
    peers would share a cache and never hit, or worse. The connection is refused instead.
    """
    namespace = Namespace(
        model="handshake",
        revision="r1",
        weight_version=7,
        dtype="bfloat16",
        page_size=16,
        attention_layout="gqa:kv-page-head-dim",
        lora="adapter",
        tenant_salt=b"\x00salt",
    )
    digest = media_digest(b"content", "448x448", "vit", "w1")
    tokens = np.arange(40, dtype=np.uint32) * np.uint32(0x01000193)
    chain = page_hashes(namespace.root(), tokens, 16, [MediaSpan(10, 20, digest)], partial=True)
    return hashlib.sha256(b"".join(chain) + object_key(chain[-1], ObjectRange(0, 61, 0, 1, 2))).digest()
