"""Prefix matching: exact and incremental, with media, tenants and weights; fuzzed against a naive model of a cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from omni_flow.compute.prefix import (
    History,
    HistoryDiffers,
    PageChain,
    anywhere,
    before,
    both,
    match_end,
    not_inside_media,
)
from omni_flow.compute.sglang.pages import PageBook, Part
from omni_flow.compute.sglang.pagesource import LocalPages
from omni_flow.data.identity import MediaDigest, MediaSpan, Namespace, PageHash, media_digest

PAGE = 4
NAMESPACE = Namespace(
    model="m", revision="r", weight_version=0, dtype="float32", page_size=PAGE, attention_layout="test"
)
PICTURES = [(MediaDigest(media_digest(bytes([i]), "p", "e", "w")), 3 + i) for i in range(5)]


@dataclass(frozen=True)
class Conversation:
    """Tokens, and pictures as (position, which)."""

    ids: tuple[int, ...]
    pictures: tuple[tuple[int, int], ...] = ()
    tenant: int = 0
    weights: int = 0

    @property
    def media(self) -> list[MediaSpan]:
        return [MediaSpan(at, PICTURES[which][1], PICTURES[which][0]) for at, which in self.pictures]

    @property
    def root(self) -> PageHash:
        return replace(NAMESPACE, tenant_salt=bytes([self.tenant]), weight_version=self.weights).root()

    def content(self) -> tuple[object, ...]:
        """What each position is, without any hashing: a token, or a row of a picture."""
        rows: list[object] = list(self.ids)
        for at, which in self.pictures:
            for row in range(PICTURES[which][1]):
                rows[at + row] = (which, row)
        return ((self.tenant, self.weights), *rows)


def build(rng: random.Random, base: Conversation, at: int, length: int) -> Conversation:
    """`base` up to `at`, then `length` new positions of text and pictures."""
    ids = list(base.ids[:at])
    pictures = [(start, which) for start, which in base.pictures if start + PICTURES[which][1] <= at]
    cut = [start for start, which in base.pictures if start < at < start + PICTURES[which][1]]
    if cut:
        del ids[cut[0] :]
    while len(ids) < at + length:
        if rng.random() < 0.08:
            which = rng.randrange(len(PICTURES))
            pictures.append((len(ids), which))
            ids += [99] * PICTURES[which][1]
        else:
            ids.append(rng.randrange(6))
    return replace(base, ids=tuple(ids), pictures=tuple(pictures))


def mutate(rng: random.Random, known: list[Conversation]) -> Conversation:
    kind = rng.choice(("new", "repeat", "change", "extend", "append", "branch", "tenant", "weights"))
    base = rng.choice(known) if known else Conversation(())
    size = len(base.ids)
    if not 0 < size < 60:
        kind = "new"
    if kind == "new":
        return build(rng, Conversation((), tenant=base.tenant, weights=base.weights), 0, rng.randrange(1, 20))
    if kind == "repeat":
        return base
    if kind == "change":
        return build(rng, base, rng.randrange(size), rng.randrange(1, 12))
    if kind in ("extend", "append"):
        return build(rng, base, size, 1 if kind == "append" else rng.randrange(1, 12))
    if kind == "branch":
        return build(rng, base, rng.randrange(size + 1), rng.randrange(1, 16))
    if kind == "tenant":
        return replace(base, tenant=rng.randrange(3))
    return replace(base, weights=rng.randrange(3))


def test_a_hundred_thousand_conversations_hit_exactly_what_was_computed_before_and_never_anything_else() -> None:
    rng = random.Random(20_17)
    wrong, hits, total = 0, 0, 0
    for _ in range(100):
        book = PageBook(LocalPages(100_000))
        meaning: dict[int, tuple[object, ...]] = {}  # page → the whole prefix it was computed for
        computed: set[tuple[object, ...]] = set()
        known: list[Conversation] = []
        for _ in range(1000):
            conversation = mutate(rng, known)
            known.append(conversation)
            if len(known) > 50:
                known.pop(rng.randrange(50))
            content = conversation.content()
            chain = PageChain(conversation.root, conversation.media)
            limit = len(conversation.ids) - 1
            node = book.match(chain.upto(conversation.ids, limit, PAGE))
            expected = 0
            while expected + PAGE <= limit and content[: expected + PAGE + 1] in computed:
                expected += PAGE
            pages = node.chain()
            wrong += node.depth * PAGE != expected
            wrong += any(meaning[page] != content[: (at + 1) * PAGE + 1] for at, page in enumerate(pages))
            hits += expected
            total += len(conversation.ids)
            full = len(conversation.ids) // PAGE
            own = book.take(full - node.depth)
            for at, page in enumerate(own, node.depth):
                meaning[page] = content[: (at + 1) * PAGE + 1]
            keys = chain.upto(conversation.ids, len(conversation.ids), PAGE)[node.depth :]
            (sealed,) = book.seal(Part(node, keys, own))()
            wrong += sealed.node.depth != full
            computed.update(content[: at * PAGE + 1] for at in range(1, full + 1))
    assert wrong == 0
    assert hits > total // 3


def test_a_match_never_ends_inside_a_picture_where_the_model_forbids_it() -> None:
    picture = MediaSpan(6, 7, PICTURES[0][0])
    assert match_end(20, [picture], 4, anywhere) == 20
    assert match_end(12, [picture], 4, not_inside_media) == 4  # 12 is inside, 6 is allowed, 4 is its whole page
    assert match_end(16, [picture], 4, not_inside_media) == 16
    assert match_end(3, [picture], 4, not_inside_media) == 0


def test_rows_under_denoising_are_never_matched() -> None:
    noisy, clean = MediaSpan(9, 4, PICTURES[0][0]), MediaSpan(2, 3, PICTURES[1][0])
    rule = both(not_inside_media, before([noisy.digest]))
    assert match_end(40, [clean, noisy], 4, rule) == 8
    assert match_end(4, [clean, noisy], 4, rule) == 0


def test_any_way_of_cutting_a_chain_into_steps_gives_the_same_keys() -> None:
    rng = random.Random(3)
    for _ in range(200):
        conversation = build(rng, Conversation(()), 0, rng.randrange(5, 60))
        whole = PageChain(conversation.root, conversation.media)
        keys = whole.upto(conversation.ids, len(conversation.ids), PAGE)
        steps = PageChain(conversation.root, conversation.media)
        for count in sorted(rng.randrange(len(conversation.ids) + 1) for _ in range(4)):
            steps.upto(conversation.ids, count, PAGE)
        assert steps.upto(conversation.ids, len(conversation.ids), PAGE) == keys


def test_an_offset_and_its_hash_stand_for_the_whole_history() -> None:
    rng = random.Random(4)
    for _ in range(300):
        conversation = build(rng, Conversation(()), 0, 40)
        server, client = (History(conversation.root, PAGE) for _ in range(2))
        for history in (server, client):
            history.extend(conversation.ids, conversation.media)
        offset = rng.choice([0, len(conversation.ids), *(at for at, _ in conversation.pictures), rng.randrange(41)])
        inside = any(span.start < offset < span.start + span.length for span in conversation.media)
        if inside:
            with pytest.raises(HistoryDiffers, match="lies in the media"):
                server.cut(offset, client.hash_at(offset))
            continue
        server.cut(offset, client.hash_at(offset))
        server.extend([1, 2, 3])
        again = History(conversation.root, PAGE)
        again.extend(conversation.ids[:offset], [m for m in conversation.media if m.start < offset])
        again.extend([1, 2, 3])
        assert server.ids == again.ids
        assert [server.hash_at(at) for at in range(len(server.ids))] == [
            again.hash_at(at) for at in range(len(again.ids))
        ]


def test_a_client_with_another_history_is_refused() -> None:
    server, client = History(NAMESPACE.root(), PAGE), History(NAMESPACE.root(), PAGE)
    server.extend(range(10))
    client.extend([*range(8), 50, 51])
    server.cut(8, client.hash_at(8))
    with pytest.raises(HistoryDiffers, match="offset 10 of a history of 8"):
        server.cut(10, client.hash_at(10))
    server.extend([8, 9])
    with pytest.raises(HistoryDiffers, match="not the client's"):
        server.cut(9, client.hash_at(9))
    assert server.ids == list(range(10))
