"""Peers in processes of their own, that are killed or exit: the same tests for each transport between processes."""

import pytest
from transport_kit import ENCODED, Net, settle

pytestmark = [pytest.mark.usefixtures("loop_name"), pytest.mark.one_loop]
encoded = pytest.mark.parametrize("kind", ENCODED)


@encoded
async def test_a_killed_process_is_said_lost_once(net: Net) -> None:
    a, inbox = await net.start("a")
    peer = net.process("p", "echo")
    a.send(peer.address, ["hello"])
    assert await inbox.until_messages(1) == ["hello"]
    peer.kill()
    await inbox.until_lost(peer.address)
    await settle(a, inbox)
    assert len(inbox.losses()) == 1
    if net.files() == ["a", "p"]:
        (net.directory / "p").unlink()  # what a killed process cannot do


@encoded
async def test_a_process_killed_while_it_sends_leaves_a_prefix_and_one_loss(net: Net) -> None:
    a, inbox = await net.start("a")
    peer = net.process("p", "flood", a.address)
    await inbox.until_messages(1000)
    peer.kill()
    await inbox.until_lost(peer.address)
    got = inbox.messages(peer.address)
    assert got == list(range(len(got)))
    await settle(a, inbox)
    assert len(inbox.losses()) == 1
    assert inbox.events[-1 - 3][:2] == ("lost", peer.address)  # 3: the batches of settle
    if net.files() == ["a", "p"]:
        (net.directory / "p").unlink()


@encoded
async def test_a_process_that_closes_and_exits_delivers_all_it_sent(net: Net) -> None:
    a, inbox = await net.start("a")
    peer = net.process("p", "burst", a.address, "200", "40000")
    await inbox.until_lost(peer.address)
    assert [number for number, _ in inbox.messages(peer.address)] == list(range(200))
    peer.finish()
    assert peer.wait() == 0


@encoded
async def test_a_killed_process_is_followed_by_another_under_the_same_or_a_new_address(net: Net) -> None:
    a, inbox = await net.start("a")
    first = net.process("p", "echo")
    a.send(first.address, ["one"])
    await inbox.until_messages(1)
    first.kill()
    second = net.process("p", "echo")
    await inbox.until_lost(first.address)
    a.send(second.address, ["two"])
    await inbox.until(lambda: "two" in inbox.messages(second.address))
    second.finish()
    assert second.wait() == 0
