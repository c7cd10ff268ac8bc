"""What only ZeroMQ sockets can get wrong: shared keys, strangers that speak ZMTP, oversize and malformed messages."""

import asyncio
import logging
import os
import resource
from collections.abc import Iterator

import pytest
import zmq
from transport_kit import KEY, NAME, Inbox, ListCodec, Net, Stranger, met, raw_connection, settle

from omni_flow.control.transport import (
    MESSAGE_LIMIT,
    PROTOCOL_VERSION,
    AddressError,
    InsecureAddress,
    Transport,
    WeakKey,
    make_transport,
)
from omni_flow.control.transport.packets import hello
from omni_flow.control.transport.security import SharedKey

pytestmark = pytest.mark.usefixtures("loop_name")
plain = pytest.mark.parametrize("kind", ["ipc", "tcp"])
tcp = pytest.mark.parametrize("kind", ["tcp"])


@pytest.fixture
def open_files() -> Iterator[None]:
    """As many as this process may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def two(one_key: str | None, other_key: str | None) -> tuple[Transport, Inbox, Transport, Inbox]:
    """Two tcp transports with keys of their own."""
    made: list[tuple[Transport, Inbox]] = []
    for key in (one_key, other_key):
        transport, inbox = make_transport("tcp://127.0.0.1:0", ListCodec(), key=key), Inbox()
        await transport.start(inbox.on_batch, inbox.on_lost)
        made.append((transport, inbox))
    return *made[0], *made[1]


@plain
async def test_a_malformed_message_ends_that_peer_and_tells_it_why(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a, inbox, stranger = await met(net)
    with caplog.at_level(logging.WARNING):
        stranger.push.send(NAME + b"\xc1")
        stranger.push.send(NAME + ListCodec().encode(["too late"]))
        assert "malformed packet" in await inbox.until_lost(stranger.address)
        told = await stranger.heard()
    stranger.close()
    assert told.startswith(b"\0refused" + NAME)
    assert b"malformed packet" in told
    assert "malformed packet" in caplog.text
    await settle(a, inbox)
    assert inbox.messages(stranger.address) == ["fine"]
    assert len(inbox.losses()) == 1


@plain
async def test_a_message_over_the_limit_ends_that_peer(net: Net) -> None:
    a, inbox, stranger = await met(net)
    stranger.push.send(NAME + bytes(MESSAGE_LIMIT + 1))
    await inbox.until_lost(stranger.address)
    stranger.close()
    await settle(a, inbox)
    assert inbox.messages(stranger.address) == ["fine"]


@plain
async def test_another_protocol_version_is_refused_and_told(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a, inbox = await net.start("a")
    stranger = Stranger(net, a.address)
    greeting = bytearray(hello(stranger.address))
    greeting[len(b"\1omniflow")] = PROTOCOL_VERSION + 1
    with caplog.at_level(logging.WARNING):
        stranger.push.send_multipart([b"\0hello\0\0" + NAME, bytes(greeting)])
        stranger.push.send(NAME + ListCodec().encode(["x"]))
        told = await stranger.heard()
    stranger.close()
    assert f"protocol version {PROTOCOL_VERSION + 1} of the peer".encode() in told
    assert "protocol version" in caplog.text
    await settle(a, inbox)
    assert inbox.losses() == []
    assert inbox.messages() == ["settle 0", "settle 1", "settle 2"]


@plain
@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"\0hello\0\0" + NAME],
        [b"\0hello\0\0" + NAME, b"hm"],
        [b"\0refused"],
        [b"\1unknown message"],
        [b"a"] * 9,
    ],
    ids=["empty", "short", "half hello", "bad hello", "half refusal", "no channel", "many frames"],
)
async def test_frames_that_mean_nothing_hurt_nobody(net: Net, frames: list[bytes]) -> None:
    a, inbox, stranger = await met(net)
    stranger.push.send_multipart(frames)
    stranger.push.send(NAME + ListCodec().encode(["still fine"]))
    await inbox.until_messages(2)
    assert inbox.messages(stranger.address) == ["fine", "still fine"]
    await settle(a, inbox)
    assert inbox.losses() == []
    stranger.close()


@tcp
async def test_a_peer_without_the_key_gets_and_gives_nothing(net: Net) -> None:
    locked, locked_inbox, opener, opener_inbox = await two(KEY, None)
    opener.send(locked.address, ["let me in"])
    await opener_inbox.until_lost(locked.address)
    locked.send(opener.address, ["answer me"])
    await locked_inbox.until_lost(opener.address)
    assert locked_inbox.messages() == opener_inbox.messages() == []
    await locked.close(0)
    await opener.close(0)


@tcp
async def test_a_peer_with_another_key_gets_and_gives_nothing(net: Net) -> None:
    locked, locked_inbox, opener, opener_inbox = await two(KEY, "quite another shared key")
    opener.send(locked.address, ["let me in"])
    assert await opener_inbox.until_lost(locked.address)
    assert locked_inbox.events == []
    await locked.close(0)
    await opener.close(0)


@tcp
async def test_a_sender_that_knows_only_the_listeners_public_key_is_refused(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    locked, inbox, other, _ = await two(KEY, KEY)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    thief = context.socket(zmq.PUSH)
    SharedKey(KEY).arm_sender(thief)  # then with a pair of its own instead of the senders' pair
    thief.curve_publickey, thief.curve_secretkey = zmq.curve_keypair()
    monitor = thief.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    monitor.rcvtimeo = 20_000
    thief.connect(locked.address)
    with caplog.at_level(logging.WARNING):
        await asyncio.to_thread(monitor.recv_multipart)
    thief.disable_monitor()
    context.destroy(linger=0)
    assert "not our shared key" in caplog.text
    await settle(locked, inbox)
    await locked.close(0)
    await other.close(0)


@tcp
async def test_a_connection_that_never_shakes_hands_holds_up_nobody(net: Net) -> None:
    a, inbox = await net.start("a")
    with raw_connection(net, a.address):
        await settle(a, inbox)


@pytest.mark.parametrize("kind", ["ipc"])
async def test_hundreds_of_peers_at_once_are_no_error(net: Net, open_files: None) -> None:
    a, inbox = await net.start("a")
    gone = [net.url(f"gone{n}") for n in range(400)]
    for address in gone:
        a.send(address, ["x"])
    await inbox.until(lambda: len(inbox.losses()) == len(gone))
    await settle(a, inbox)


@tcp
async def test_a_peer_for_whom_no_file_can_be_opened_is_said_lost_and_met_when_one_can(net: Net) -> None:
    (a, inbox), (b, inbox_b), (c, inbox_c) = [await net.start(name) for name in "abc"]
    a.send(b.address, ["from a"])
    await inbox_b.until_messages(1, a.address)
    c.send(a.address, ["from c"])
    await inbox.until_messages(1, c.address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        a.send(b.address, ["on a channel that is open"])
        for address in ("tcp://127.0.0.1:1", c.address):
            a.send(address, ["x"])
        assert "opened" in await inbox.until_lost("tcp://127.0.0.1:1")
        a.forget(b.address)  # which is to be told
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await inbox_b.until_lost(a.address)
    assert "opened" in await inbox.until_lost(c.address)
    assert inbox_c.losses(a.address)
    a.send(c.address, ["now"])
    await inbox_c.until_messages(1, a.address)


@tcp
async def test_a_host_that_others_reach_needs_a_key(net: Net) -> None:
    with pytest.raises(InsecureAddress, match="pass key="):
        make_transport("tcp://192.0.2.7:5555", ListCodec())
    assert make_transport("tcp://192.0.2.7:5555", ListCodec(), key=KEY).address == "tcp://192.0.2.7:5555"
    a, _ = await net.start("a")
    with pytest.raises(InsecureAddress):
        a.send("tcp://192.0.2.7:5555", ["x"])


@tcp
async def test_a_short_key_is_refused_with_the_mend(net: Net) -> None:
    with pytest.raises(WeakKey, match="openssl rand"):
        make_transport("tcp://127.0.0.1:0", ListCodec(), key="hunter2")


@tcp
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("tcp://0.0.0.0:1", "one IP address"),
        ("tcp://[::]:1", "one IP address"),
        ("tcp://*:1", "must be an IP"),
        ("tcp://example.org:1", "must be an IP"),
        ("tcp://127.0.0.1", "host:port"),
        ("tcp://127.0.0.1:99999", "host:port"),
        ("ipc://@abstract", "absolute"),
        ("ipc://relative/path", "absolute"),
        ("unix://relative", "absolute"),
        ("inproc://", "inproc://name"),
    ],
)
async def test_a_bad_address_says_what_is_wrong(net: Net, url: str, why: str) -> None:
    with pytest.raises(AddressError, match=why):
        make_transport(url, ListCodec(), key=KEY, hub=net.hub)


@tcp
async def test_a_tcp_port_in_use_is_said(net: Net) -> None:
    a, _ = await net.start("a")
    second = make_transport(a.address, ListCodec())
    with pytest.raises(AddressError, match="live process"):
        await second.start(Inbox().on_batch, Inbox().on_lost)
