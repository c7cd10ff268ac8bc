"""Prefix matching: exact and incremental, with media, tenants and weights; fuzzed against a naive model of a cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from omni_flow.compute.prefix import (
    History,
    HistoryDiffers,
    MatchRule,
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


def history_of(conversation: Conversation) -> History:
    history = History(conversation.root, PAGE)
    history.extend(conversation.ids, conversation.media)
    return history


def cut(rng: random.Random, base: Conversation, meant: Conversation, count: Counter[bool]) -> Conversation:
    """What a server makes of a client that goes on from an offset in `meant`, which the server has as `base`: `count`
    says how often it had to take it."""
    offset = rng.randrange(len(meant.ids) + 1)
    inside = any(span.start < offset < span.start + span.length for span in base.media)
    right = meant.content()[: offset + 1] == base.content()[: offset + 1] and not inside
    count[right] += 1
    server, more = history_of(base), build(rng, replace(base, ids=(), pictures=()), 0, rng.randrange(1, 12))
    expected = base
    server.hash_at(len(server.ids))  # so that it has keys beyond the cut
    try:
        server.cut(offset, history_of(meant).hash_at(offset))
    except HistoryDiffers:
        assert not right
    else:
        assert right
        server.extend(more.ids, more.media)
        pictures = [
            *(one for one in base.pictures if one[0] < offset),
            *((offset + at, one) for at, one in more.pictures),
        ]
        expected = replace(base, ids=base.ids[:offset] + more.ids, pictures=tuple(pictures))
    assert (server.ids, server.media) == (list(expected.ids), expected.media)
    assert server.hash_at(len(server.ids)) == history_of(expected).hash_at(len(server.ids))
    return expected


def mutate(rng: random.Random, known: list[Conversation], cuts: Counter[bool]) -> Conversation:
    kind = rng.choice(("new", "repeat", "change", "extend", "append", "branch", "tenant", "weights", "cut"))
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
    if kind == "cut":
        return cut(rng, base, rng.choice((base, rng.choice(known))), cuts)
    if kind == "tenant":
        return replace(base, tenant=rng.randrange(3))
    return replace(base, weights=rng.randrange(3))


def may_end(content: Sequence[object], at: int, whole_pictures: bool, never: int | None) -> bool:
    """Whether a match may end at this position: not between rows of a picture, not behind a row of picture `never`."""
    inside = isinstance(row := content[at + 1], tuple) and row[1] > 0
    return not (whole_pictures and inside) and not any(
        isinstance(row, tuple) and row[0] == never for row in content[1 : at + 1]
    )


RULES: list[tuple[MatchRule, bool, int | None]] = [
    (anywhere, False, None),
    (not_inside_media, True, None),
    (before([PICTURES[0][0]]), False, 0),
    (both(not_inside_media, before([PICTURES[0][0]])), True, 0),
]
"""Rules, and what each says: whether pictures are matched whole, and which one never."""


def test_a_hundred_thousand_conversations_hit_exactly_what_was_computed_before_and_never_anything_else() -> None:
    rng = random.Random(20_17)
    wrong, hits, total, cuts = 0, 0, 0, Counter[bool]()
    shortened = [0] * len(RULES)
    for number in range(100):
        rule, *allows = RULES[number % len(RULES)]
        book = PageBook(LocalPages(100_000))
        meaning: dict[int, tuple[object, ...]] = {}  # page → the whole prefix it was computed for
        computed: set[tuple[object, ...]] = set()
        known: list[Conversation] = []
        for _ in range(1000):
            conversation = mutate(rng, known, cuts)
            known.append(conversation)
            if len(known) > 50:
                known.pop(rng.randrange(50))
            content = conversation.content()
            chain = PageChain(conversation.root, conversation.media)
            limit = len(conversation.ids) - 1
            node = book.match(chain.upto(conversation.ids, limit, PAGE))
            there = 0
            while there + PAGE <= limit and content[: there + PAGE + 1] in computed:
                there += PAGE
            wrong += node.depth * PAGE != there
            end = match_end(there, chain.media, PAGE, rule)
            expected = next(at for at in range(there, -1, -PAGE) if at == 0 or may_end(content, at, *allows))
            wrong += end != expected
            shortened[number % len(RULES)] += end < there
            while node.parent is not None and node.depth * PAGE > end:
                node = node.parent
            pages = node.chain()
            wrong += any(meaning[page] != content[: (at + 1) * PAGE + 1] for at, page in enumerate(pages))
            hits += end
            total += len(conversation.ids)
            full = len(conversation.ids) // PAGE
            own = book.take(full - node.depth)
            for at, page in enumerate(own, node.depth):
                meaning[page] = content[: (at + 1) * PAGE + 1]
            keys = chain.upto(conversation.ids, len(conversation.ids), PAGE)[node.depth :]
            (sealed,) = book.seal(Part(node, keys, own))()
            wrong += sealed.node.depth != full
            made = [content[: at * PAGE + 1] for at in range(node.depth + 1, full + 1)]
            wrong += len(sealed.replaced) != sum(one in computed for one in made)  # they stay as others have them
            computed.update(made)
    assert wrong == 0
    assert hits > total // 4
    assert shortened[0] == 0
    assert min(shortened[1:]) > 500
    assert min(cuts.values()) > 2000


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
