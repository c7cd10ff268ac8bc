"""Random sends, forgets, closes and restarts among a few peers: what is received stays in order, every gap was said."""

import asyncio
import random

import pytest
from transport_kit import Inbox, Net

from omni_flow.control.transport import Transport

KINDS = ["inproc", "unix", "ipc", "tcp", "tcp+key"]
pytestmark = [pytest.mark.usefixtures("loop_name"), pytest.mark.parametrize("kind", KINDS)]


class Member:
    """A peer that counts what it sends to each address, and checks what it gets."""

    def __init__(self, net: Net, name: str) -> None:
        self.name = name
        self.transport: Transport = net.make(name)
        self.inbox = Inbox()
        self.sent: dict[str, int] = {}
        self.got: dict[str, list[int]] = {}
        self.excused: set[str] = set()  # addresses between which and us messages may be missing

    async def start(self) -> "Member":
        await self.transport.start(self.on_batch, self.on_lost)
        return self

    def on_batch(self, sender: str, batch: list[int]) -> None:
        self.got.setdefault(sender, []).extend(batch)
        self.inbox.on_batch(sender, batch)

    def on_lost(self, peer: str, cause: str) -> None:
        self.excused.add(peer)
        self.inbox.on_lost(peer, cause)

    def send(self, address: str, size: int) -> None:
        first = self.sent.get(address, 0)
        self.sent[address] = first + size
        self.transport.send(address, list(range(first, first + size)))

    @property
    def address(self) -> str:
        return self.transport.address


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
async def test_after_any_churn_order_holds_gaps_were_said_and_all_reach_each_other(net: Net, seed: int) -> None:
    draw = random.Random(seed)
    live = [await Member(net, f"m{n}").start() for n in range(4)]
    gone: list[Member] = []
    for step in range(150):
        member, other = draw.choice(live), draw.choice(live)
        match draw.choices(["send", "forget", "restart", "run"], [12, 1, 1, 4])[0]:
            case "send":
                member.send(other.address, draw.choice([1, 10, 30_000]))
            case "forget":
                member.excused.add(other.address)
                member.transport.forget(other.address)
            case "restart":
                live.remove(member)
                gone.append(member)
                await member.transport.close(deadline_s=draw.choice([0.0, 5.0]))
                live.append(await Member(net, f"later{step}").start())
            case "run":
                await asyncio.sleep(0)
    for member in live:
        for other in live:
            await reach(member, other)
    everybody = {member.address: member for member in live + gone}
    for member in everybody.values():
        for sender, numbers in member.got.items():
            assert numbers == sorted(set(numbers)), "out of order or twice"
            whole = numbers == list(range(len(numbers)))
            assert whole or sender in member.excused or member.address in everybody[sender].excused


async def reach(member: Member, other: Member) -> None:
    """Send until one arrives; each try that does not is followed by a loss on one of the two sides."""
    for _ in range(20):
        number, losses = member.sent.get(other.address, 0), len(member.inbox.losses(other.address))
        losses_there = len(other.inbox.losses(member.address))
        member.send(other.address, 1)

        def arrived(number: int = number) -> bool:
            return number in other.got.get(member.address, [])[-1:]

        either = [
            asyncio.create_task(
                other.inbox.until(
                    lambda done=arrived, n=losses_there: done() or len(other.inbox.losses(member.address)) > n
                )
            ),
            asyncio.create_task(member.inbox.until(lambda n=losses: len(member.inbox.losses(other.address)) > n)),
        ]
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # nothing arrives and nothing is said: never
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)
        if arrived():
            return
    raise AssertionError(f"{member.address} does not reach {other.address}")
