"""ZeroMQ closes no connection that comes in: who drops the channel of a peer says so, else it speaks to nobody."""

import logging
import time
from itertools import pairwise

import pytest
from transport_kit import NAME, Inbox, ListCodec, Net, Stranger, met, settle

from omni_flow.control.transport import PROTOCOL_VERSION, Transport, zeromq
from omni_flow.control.transport.packets import hello
from omni_flow.control.transport.zmq_names import Names, precedes

loops = pytest.mark.usefixtures("loop_name")
plain = pytest.mark.parametrize("kind", ["ipc", "tcp"])
BLOCKED_S = 2.5


def block() -> None:
    """Run nothing for longer than a refusal once had to leave: a loop that is busy is what is tested, so it sleeps."""
    time.sleep(BLOCKED_S)


async def name_of_channel(transport: Transport, stranger: Stranger) -> bytes:
    """Of the one that a transport opens to a stranger when it sends."""
    transport.send(stranger.address, ["x"])
    return (await stranger.heard())[8:]


def batch(*messages: str) -> bytes:
    return ListCodec().encode(list(messages))


@loops
@pytest.mark.parametrize("kind", ["ipc", "tcp", "tcp+key"])
async def test_a_peer_whose_loop_is_busy_for_seconds_learns_that_it_was_forgotten(net: Net) -> None:
    a, at_a = await net.start("a")
    b, at_b = await net.start("b")
    a.send(b.address, ["x"])
    await at_b.until_messages(1)
    b.forget(a.address)
    block()  # the loop of both: it is what lets senders with the shared key in
    await at_a.until_lost(b.address)
    a.send(b.address, ["again"])
    assert await at_b.until_messages(2) == ["x", "again"]


@loops
@plain
async def test_a_peer_that_refuses_our_channel_hears_that_its_own_is_dropped_too(net: Net) -> None:
    a, inbox, stranger = await met(net)
    ours = await name_of_channel(a, stranger)
    stranger.push.send(b"\0refused" + ours + hello(stranger.address) + b"\0no longer known")
    assert "no longer known" in await inbox.until_lost(stranger.address)
    assert await stranger.refused() == NAME
    stranger.close()


@loops
@plain
async def test_a_refusal_by_a_peer_of_another_protocol_version_is_heard(net: Net) -> None:
    a, inbox, stranger = await met(net)
    ours = await name_of_channel(a, stranger)
    greeting = bytearray(hello(stranger.address))
    greeting[len(b"\1omniflow")] = PROTOCOL_VERSION + 1
    stranger.push.send(b"\0refused" + ours + bytes(greeting) + b"\0another version")
    assert "another version" in await inbox.until_lost(stranger.address)
    stranger.close()


@loops
@plain
async def test_a_second_channel_of_a_peer_ends_the_first_and_says_so(net: Net) -> None:
    _, inbox, stranger = await met(net)
    second = stranger.another_push()
    stranger.hello(b"\1another", second)
    second.send(b"\1another" + batch("better"))
    assert await inbox.until_messages(2, stranger.address) == ["fine", "better"]
    assert inbox.losses() == ["the peer opened a new connection"]
    assert await stranger.refused() == NAME
    stranger.close()


@loops
@plain
async def test_a_channel_that_comes_after_a_younger_one_delivers_nothing_and_both_are_said_lost(net: Net) -> None:
    a, inbox = await net.start("a")
    names = Names()
    older, younger = names.next(), names.next()
    stranger = Stranger(net, a.address)
    stranger.hello(younger)
    stranger.push.send(younger + batch("new"))
    await inbox.until_messages(1)
    late = stranger.another_push()
    stranger.hello(older, late)
    late.send(older + batch("old"))
    await inbox.until_lost(stranger.address)
    assert {await stranger.refused(), await stranger.refused()} == {older, younger}
    await settle(a, inbox)
    assert inbox.messages(stranger.address) == ["new"]
    assert len(inbox.losses()) == 1
    stranger.close()


@loops
@plain
async def test_who_is_taken_for_closed_by_another_on_its_descriptor_is_told(net: Net) -> None:
    a, inbox, stranger = await met(net)
    other = Stranger(net, a.address, "other")
    other.hello(b"\1another", stranger.push)
    await inbox.until_lost(stranger.address)
    assert await stranger.refused() == NAME
    stranger.close()
    other.close()


@loops
@plain
async def test_a_peer_that_could_not_be_answered_hears_it_as_soon_as_it_listens(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    a, inbox = await net.start("a")
    stranger = await unreachable(net, a.address, inbox)
    a.send(stranger.address, ["an answer"])
    while "could not be told" not in caplog.text:
        await settle(a, inbox)
    stranger.pull.bind(stranger.address)
    assert await stranger.refused() == NAME
    stranger.push.close(linger=0)
    assert await inbox.until_lost(stranger.address) == "nobody listens there"
    stranger.close()


@loops
@plain
async def test_a_peer_that_speaks_and_is_never_reached_is_said_lost(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "LAST_WORDS_S", 0.0)
    a, inbox = await net.start("a")
    stranger = await unreachable(net, a.address, inbox)
    a.send(stranger.address, ["an answer"])
    assert await inbox.until_lost(stranger.address) == "nobody listens there"
    stranger.push.send(NAME + batch("too late"))
    await settle(a, inbox)
    assert inbox.messages(stranger.address) == ["fine"]
    assert len(inbox.losses()) == 1
    stranger.close()


async def unreachable(net: Net, address: str, inbox: Inbox) -> Stranger:
    """A peer that does not listen where it says."""
    stranger = Stranger(net, address, listens=False)
    stranger.hello()
    stranger.push.send(NAME + batch("fine"))
    await inbox.until_messages(1)
    return stranger


def test_names_of_one_sender_are_in_order_beyond_the_end_of_their_count() -> None:
    names = Names()
    drawn = [names.next() for _ in range(70_000)]
    assert len(set(drawn)) == 65_536
    assert all(precedes(a, b) and not precedes(b, a) for a, b in pairwise(drawn))
    assert not precedes(drawn[0], drawn[0])


def test_names_of_two_senders_have_no_order() -> None:
    one, other = Names().next(), Names()
    assert not any(precedes(one, name) or precedes(name, one) for name in (other.next(), other.next(), b""))
