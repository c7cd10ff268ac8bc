"""A reader of any parallel size gets exactly the right bytes from writers of any other."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.data.identity import ObjectRange
from omni_flow.data.layout import (
    AttentionGroup,
    Box,
    LayoutError,
    NotCovered,
    Range,
    arena_views,
    object_views,
    plan_gather,
)

SIZES = (1, 2, 4, 8)
GROUPS = [
    AttentionGroup("mha8", layers=3, kv_heads=8, tokens=4, key_bytes=6, value_bytes=6),
    AttentionGroup("gqa4", layers=3, kv_heads=4, tokens=4, key_bytes=6, value_bytes=4),
    AttentionGroup("gqa2", layers=2, kv_heads=2, tokens=3, key_bytes=2, value_bytes=2),
    AttentionGroup("mqa1", layers=2, kv_heads=1, tokens=3, key_bytes=2, value_bytes=2),
    AttentionGroup.mla("mla", layers=3, tokens=4, latent_bytes=18),
]


def truth(group, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (group.layers, group.tokens, group.kv_heads, width), np.uint8) for width in group.widths
    ]


def write(group, page, box):
    data = bytearray(group.nbytes(box))
    for view, block in zip(object_views(group, box, data), page, strict=True):
        view[:] = block[box.layers.start : box.layers.stop, :, box.heads.start : box.heads.stop]
    return data


def expected(group, page, box):
    return bytes(write(group, page, box))


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@pytest.mark.parametrize(("m", "n"), list(itertools.product(SIZES, SIZES)))
def test_a_reader_with_tp_n_gathers_what_writers_with_tp_m_stored(group, m, n):
    page = truth(group)
    boxes = [group.share(m, rank) for rank in range(m) if group.writes(m, rank)]
    objects = [write(group, page, box) for box in boxes]
    for rank in range(n):
        target = group.share(n, rank)
        plan = plan_gather(group, target, boxes)
        out = bytearray(group.nbytes(target))
        plan.run(
            [object_views(group, b, o) for b, o in zip(boxes, objects, strict=True)],
            object_views(group, target, out),
        )
        assert out == expected(group, page, target)
        fetched = bytearray(group.nbytes(target))
        for number in plan.used:
            for to, at, length in plan.byte_runs(number).tolist():
                fetched[to : to + length] = objects[number][at : at + length]
        assert fetched == out


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@pytest.mark.parametrize("m", SIZES)
def test_every_head_and_every_latent_is_stored_once(group, m):
    boxes = [group.share(m, rank) for rank in range(m) if group.writes(m, rank)]
    assert sum(group.nbytes(box) for box in boxes) == group.nbytes(group.whole)
    if not group.value_bytes:
        assert len(boxes) == 1


def test_more_ranks_than_heads_replicate_neighbours():
    group = GROUPS[2]
    assert [group.heads_of(8, rank).start for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_equal_parallelism_moves_each_block_as_one_run():
    group = GROUPS[0]
    boxes = [group.share(4, rank) for rank in range(4)]
    plan = plan_gather(group, boxes[2], boxes)
    assert plan.used == (2,)
    assert plan.byte_runs(2).tolist() == [[0, 0, group.nbytes(boxes[2])]]


def tilings(extent):
    cuts = st.sets(st.integers(1, extent - 1)) if extent > 1 else st.just(set())
    return cuts.map(lambda c: [Range(a, b) for a, b in itertools.pairwise([0, *sorted(c), extent])])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_tiling_with_overlaps_fills_any_target_exactly_once(data):
    layers, heads, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    group = AttentionGroup("any", layers, heads, tokens, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)))
    boxes = [Box(a, b) for a in data.draw(tilings(layers)) for b in data.draw(tilings(heads))]
    boxes += [Box(a, b) for a in data.draw(tilings(layers)) for b in data.draw(tilings(heads))][:3]
    boxes = data.draw(st.permutations(boxes))
    target = Box(
        data.draw(st.sampled_from(data.draw(tilings(layers)))), data.draw(st.sampled_from(data.draw(tilings(heads))))
    )
    page = truth(group, 1)
    objects = [write(group, page, box) for box in boxes]
    plan = plan_gather(group, target, boxes)
    assert sum(move.box.area for move in plan.moves) == target.area
    out = bytearray(group.nbytes(target))
    plan.run([object_views(group, b, o) for b, o in zip(boxes, objects, strict=True)], object_views(group, target, out))
    assert out == expected(group, page, target)


@pytest.mark.parametrize("group", [GROUPS[1], GROUPS[4]], ids=lambda g: g.name)
def test_a_layer_major_arena_page_is_filled_from_objects_of_pipeline_stages(group):
    page, pages = truth(group), 5
    boxes = [group.share(1, 0, pp=2, stage=stage) for stage in range(2)]
    objects = [write(group, page, box) for box in boxes]
    target = group.share(2, 1)
    arena = bytearray(group.nbytes(target) * pages)
    views = arena_views(group, target, arena, page=3, pages=pages)
    plan = plan_gather(group, target, boxes)
    plan.run([object_views(group, b, o) for b, o in zip(boxes, objects, strict=True)], views)
    back = plan_gather(group, target, [target])
    out = bytearray(group.nbytes(target))
    back.run([views], object_views(group, target, out))
    assert out == expected(group, page, target)
    for other in (0, 1, 2, 4):
        assert not any(v.any() for v in arena_views(group, target, arena, page=other, pages=pages))


def test_a_missing_rectangle_is_named():
    group = GROUPS[0]
    with pytest.raises(NotCovered, match="layers 0:3 heads 4:6"):
        plan_gather(group, group.whole, [group.share(4, rank) for rank in (0, 1, 3)])


def test_heads_that_do_not_divide_are_refused():
    group = AttentionGroup("odd", 1, 6, 1, 1, 1)
    with pytest.raises(LayoutError, match="cannot be shared by 4 ranks"):
        group.heads_of(4, 0)


def test_pipeline_stages_tile_the_layers():
    group = AttentionGroup("odd", 7, 1, 1, 1, 1)
    stages = [group.layers_of(3, stage) for stage in range(3)]
    assert [str(stage) for stage in stages] == ["0:3", "3:5", "5:7"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_the_name_of_an_object_says_what_it_holds(group):
    box = group.share(2, 1) if group.kv_heads > 1 else group.whole
    assert Box.of(ObjectRange.unpack(box.named(3).pack())) == box
