"""The directory of who holds what: deltas, gaps, lives, silence."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.data.transfer.directory import Directory, Holdings, divide, merge, prefixes


def u64(*numbers):
    return np.array(numbers, np.uint64)


def keys(*numbers):
    made = np.zeros((len(numbers), 32), np.uint8)
    made[:, :8] = np.array(numbers, "<u8").view(np.uint8).reshape(-1, 8)
    return made


def masks(directory, *numbers):
    return {name: mask.tolist() for name, mask in directory.locate("kv", keys(*numbers)).items()}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=30),
    st.lists(st.tuples(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60))), max_size=8),
)
def test_holdings_are_a_set(first, deltas):
    holdings, oracle = Holdings(u64(*first)), set(first)
    for added, removed in deltas:
        holdings.apply(u64(*added), u64(*removed))
        oracle = (oracle - removed) | added
    everything = np.arange(61, dtype=np.uint64)
    assert set(everything[holdings.contains(everything)].tolist()) == oracle
    assert holdings.snapshot().tolist() == sorted(oracle)


def test_holdings_of_many_changes_stay_right():
    holdings = Holdings()
    everything = np.random.default_rng(0).permutation(40_000).astype(np.uint64)
    for part in np.split(everything, 40):
        holdings.apply(part, u64())
    holdings.apply(u64(), everything[:20_000])
    assert not holdings.contains(everything[:20_000]).any()
    assert holdings.contains(everything[20_000:]).all()


def test_a_node_is_found_by_what_it_has_told():
    directory = Directory(silent_s=3)
    assert directory.heard("b", 7, 0.0)
    directory.replace("b", 7, 4, {"kv": u64(1, 2)})
    assert directory.delta("b", 7, 5, {"kv": (u64(3), u64(1))})
    assert masks(directory, 1, 2, 3) == {"b": [False, True, True]}
    assert masks(directory, 1) == {}


def test_a_missed_delta_asks_for_the_whole_and_a_late_one_changes_nothing():
    directory = Directory(silent_s=3)
    directory.heard("b", 7, 0.0)
    assert not directory.delta("b", 7, 1, {"kv": (u64(1), u64())})
    directory.replace("b", 7, 4, {"kv": u64(1)})
    assert not directory.delta("b", 7, 6, {"kv": (u64(2), u64())})
    assert not directory.delta("b", 7, 5, {})
    assert directory.delta("b", 7, 4, {})
    assert directory.delta("b", 7, 3, {"kv": (u64(9), u64(1))})
    assert masks(directory, 1, 2, 9) == {"b": [True, False, False]}


def test_a_new_life_has_none_of_the_old_rows():
    directory = Directory(silent_s=3)
    directory.heard("b", 7, 0.0)
    directory.replace("b", 7, 0, {"kv": u64(1)})
    assert directory.heard("b", 8, 1.0)
    assert masks(directory, 1) == {}
    directory.replace("b", 7, 0, {"kv": u64(1)})
    assert masks(directory, 1) == {}
    assert not directory.delta("b", 7, 1, {})


def test_a_life_that_is_over_does_not_come_back_while_a_later_one_lasts():
    directory = Directory(silent_s=3)
    for epoch in (7, 8, 9):
        assert directory.heard("b", epoch, 0.0)
    assert not directory.heard("b", 7, 1.0)
    assert (directory.epoch("b"), directory.is_over("b", 8), directory.is_over("b", 9)) == (9, True, False)
    assert directory.expire(3.5) == ["b"]
    assert not directory.is_over("b", 9)
    assert directory.heard("b", 10, 4.0)
    assert directory.is_over("b", 9)


def test_a_node_that_was_silent_may_go_on_in_the_same_life():
    directory = Directory(silent_s=3)
    directory.heard("b", 7, 0.0)
    assert directory.expire(3.5) == ["b"]
    assert directory.epoch("b") is None
    assert directory.heard("b", 7, 4.0)
    assert directory.epoch("b") == 7


def test_the_rows_of_a_silent_node_are_dropped():
    directory = Directory(silent_s=3)
    for name in ("a", "b"):
        directory.heard(name, 1, 0.0)
        directory.replace(name, 1, 0, {"kv": u64(1)})
    directory.heard("a", 1, 2.0)
    assert directory.expire(3.5) == ["b"]
    assert directory.nodes() == ("a",)
    assert masks(directory, 1) == {"a": [True]}
    directory.drop("a")
    assert masks(directory, 1) == {}


def test_keys_are_asked_of_as_few_nodes_as_hold_them():
    found = {"a": np.array([1, 1, 0, 0], bool), "b": np.array([1, 1, 1, 0], bool), "c": np.array([1, 0, 0, 0], bool)}
    assert {name: share.tolist() for name, share in divide(found, 4).items()} == {"b": [0, 1, 2]}
    found["d"] = np.array([0, 0, 0, 1], bool)
    assert {name: share.tolist() for name, share in divide(found, 4).items()} == {"b": [0, 1, 2], "d": [3]}


def test_of_several_changes_of_one_key_the_last_counts():
    added, removed = merge([(u64(1, 2), True), (u64(2, 3), False), (u64(3), True)])
    assert (added.tolist(), removed.tolist()) == ([1, 3], [2])


def test_the_prefix_is_the_first_eight_bytes():
    key = np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert prefixes(key).tolist() == [int.from_bytes(bytes(key[n, :8]), "little") for n in range(2)]
