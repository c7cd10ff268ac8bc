"""The tier against a dictionary: random batches, errors, closings, crashes and a cap that is reached."""

import errno
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ssd_rig import SEGMENT, FaultyIo, config, disk_bytes, get, keys, length_of, payload, put

from omni_flow.data.ssd import SsdTier

NUMBERS = 120
batches = st.lists(st.integers(0, NUMBERS - 1), min_size=1, max_size=14)


class TierAgainstDictionary(RuleBasedStateMachine):
    """`known` is what must be there, `maybe` what may be there besides; nothing else may be."""

    cap = 8 << 20

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.path = self.root / "0"
        self.io = FaultyIo()
        self.crashes = 0
        self.known: set[int] = set()
        self.maybe: set[int] = set()
        self.tier = self.open()

    def open(self) -> SsdTier:
        return SsdTier.open(config(self.path, cap_bytes=self.cap, first_probe_s=0.001), self.io)

    @rule(numbers=batches)
    def put(self, numbers: list[int]) -> None:
        stored = put(self.tier, *numbers)
        # What was there before may have to go while this makes room.
        assert all(stored) or self.tier.stats().counters.reclaimed_segments
        done = {number for number, ok in zip(numbers, stored, strict=True) if ok}
        self.known |= done
        self.maybe |= done

    @rule(numbers=batches)
    def get(self, numbers: list[int]) -> None:
        for number, found in zip(numbers, get(self.tier, *numbers), strict=True):
            self.judge(number, found)

    def judge(self, number: int, found: bytes | None) -> None:
        if found is not None:
            assert number in self.maybe
            assert found == payload(number, length_of(number))
            return
        assert number not in self.known or self.tier.stats().counters.reclaimed_segments

    @rule(numbers=batches)
    def remove(self, numbers: list[int]) -> None:
        self.tier.remove(keys(*numbers))
        assert get(self.tier, *numbers) == [None] * len(numbers)
        # May come back with a restart.
        self.known -= set(numbers)

    @rule(numbers=batches)
    def put_on_a_failing_disk(self, numbers: list[int]) -> None:
        failures = iter(range(len(numbers)))

        def now_and_then(*_: object) -> None:
            if next(failures, 1) % 2 == 0:
                raise OSError(errno.EIO, "now and then")

        self.io.rules["pwritev"] = now_and_then
        stored = put(self.tier, *numbers)
        self.io.rules.clear()
        assert self.tier.wait_idle(20)
        done = {number for number, ok in zip(numbers, stored, strict=True) if ok}
        self.known |= done
        self.maybe |= done

    @rule(numbers=batches)
    def get_on_a_failing_disk(self, numbers: list[int]) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "bad sector")

        self.io.rules["preadv"] = fail
        found = get(self.tier, *numbers)
        self.io.rules.clear()
        assert [f for f in found if f] == []
        assert self.tier.wait_idle(20)
        # Bad sectors are forgotten, and come back with a restart that finds them sound.
        self.known -= set(numbers)

    @rule()
    def close_and_open(self) -> None:
        self.tier.close()
        self.tier = self.open()
        self.recovered()

    @rule()
    def crash_and_open(self) -> None:
        """What a killed process leaves is what its files hold at that moment."""
        assert self.tier.wait_idle(20)
        self.crashes += 1
        crashed = self.root / str(self.crashes)
        shutil.copytree(self.path, crashed)
        self.tier.close()
        self.path = crashed
        self.tier = self.open()
        self.recovered()

    def recovered(self) -> None:
        """The accounting of a tier just opened is that of what it can give back; what was lost stays lost."""
        stats = self.tier.stats()
        there = set(np.flatnonzero(self.tier.contains(keys(*range(NUMBERS)))).tolist())
        assert there <= self.maybe
        assert stats.records == len(there)
        assert stats.payload_bytes == sum(map(length_of, there))
        self.forgotten(there)

    def forgotten(self, there: set[int]) -> None:
        assert self.known <= there

    @rule()
    def read_everything(self) -> None:
        for number, found in zip(range(NUMBERS), get(self.tier, *range(NUMBERS)), strict=True):
            self.judge(number, found)

    @invariant()
    def sound(self) -> None:
        assert self.tier.check() == []
        assert disk_bytes(self.path) <= self.cap
        assert self.tier.stats().counters.checksum_failures == 0

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.root)


class SmallTierAgainstDictionary(TierAgainstDictionary):
    """Reclaim runs all the time, so anything may be gone; what is there is right and is accounted for."""

    cap = 5 * SEGMENT

    def judge(self, number: int, found: bytes | None) -> None:
        if found is not None:
            assert number in self.maybe
            assert found == payload(number, length_of(number))

    def forgotten(self, there: set[int]) -> None:
        self.known = there


for machine in (TierAgainstDictionary, SmallTierAgainstDictionary):
    machine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestALargeTierEqualsADictionary = TierAgainstDictionary.TestCase
TestASmallTierNeverGivesWrongBytes = SmallTierAgainstDictionary.TestCase
