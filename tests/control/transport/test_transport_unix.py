"""What only SEQPACKET sockets can get wrong: credentials, malformed packets of a known peer, a full kernel buffer."""

import asyncio
import logging
import os
import socket

import pytest
from transport_kit import Inbox, ListCodec, Net, ended, settle

from omni_flow.control.transport.base import MESSAGE_LIMIT, PROTOCOL_VERSION
from omni_flow.control.transport.packets import CUT, REFUSED, WHOLE, hello
from omni_flow.control.transport.unix import UnixTransport

pytestmark = [pytest.mark.usefixtures("loop_name"), pytest.mark.parametrize("kind", ["unix"])]


async def pretender(net: Net, address: str) -> socket.socket:
    """A raw connection that has said a proper hello in the name of a peer nobody listens for."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(address.removeprefix("unix://"))
    raw.send(hello(net.url("pretender")))
    raw.setblocking(False)
    return raw


@pytest.mark.parametrize(
    ("packets", "why"),
    [
        ([b"\x63what"], "kind 99"),
        ([WHOLE + b"\xc1 no msgpack"], "malformed"),
        ([CUT + (MESSAGE_LIMIT + 1).to_bytes(4, "little") + b"x"], "limit"),
        ([CUT + (6).to_bytes(4, "little") + b"1234", b"56789"], "at most 2 fit"),
    ],
    ids=["kind", "msgpack", "oversize", "overlong"],
)
async def test_a_malformed_packet_ends_that_peer_with_a_reason_in_the_log(
    net: Net, packets: list[bytes], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, inbox = await net.start("a")
    with caplog.at_level(logging.WARNING), await pretender(net, a.address) as raw:
        for packet in packets:
            raw.send(packet)
        cause = await inbox.until_lost(net.url("pretender"))
        refusal = await asyncio.get_running_loop().sock_recv(raw, 4096)
        await ended(raw)
    assert why in cause
    assert refusal.startswith(REFUSED)
    assert why in refusal.decode()
    assert why in caplog.text
    await settle(a, inbox)
    assert len(inbox.losses()) == 1


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"\1omniflow" + bytes([PROTOCOL_VERSION + 1]) + b"unix:///x/y", f"version {PROTOCOL_VERSION + 1} of the peer"),
        (b"\1omniflow" + bytes([PROTOCOL_VERSION]) + b"tcp://127.0.0.1:1", "unix:///absolute"),
        (WHOLE + b"\x90", "no hello"),
    ],
    ids=["version", "scheme", "no hello"],
)
async def test_a_connection_that_begins_wrongly_is_refused_with_the_reason(
    net: Net, greeting: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, inbox = await net.start("a")
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with caplog.at_level(logging.WARNING), raw:
        raw.connect(net.url("a").removeprefix("unix://"))
        raw.setblocking(False)
        raw.send(greeting)
        refusal = await asyncio.get_running_loop().sock_recv(raw, 4096)
        await ended(raw)
    assert why in refusal.decode()
    assert why in caplog.text
    await settle(a, inbox)
    assert inbox.losses() == []


async def test_a_peer_that_ends_in_the_middle_of_a_batch_is_said_lost(net: Net) -> None:
    a, inbox = await net.start("a")
    with await pretender(net, a.address) as raw:
        raw.send(WHOLE + ListCodec().encode(["whole"]))
        raw.send(CUT + (100_000).to_bytes(4, "little") + bytes(500))
    assert "middle of a batch" in await inbox.until_lost(net.url("pretender"))
    assert inbox.messages() == ["whole"]


async def test_processes_of_another_user_are_refused_by_the_listener(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = UnixTransport(net.url("a"), ListCodec(), uid=os.geteuid() + 1)
    await theirs.start(Inbox().on_batch, Inbox().on_lost)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with caplog.at_level(logging.WARNING), raw:
        raw.connect(net.url("a").removeprefix("unix://"))
        raw.setblocking(False)
        refusal = await asyncio.get_running_loop().sock_recv(raw, 4096)
        await ended(raw)
    await theirs.close()
    assert f"uid {os.geteuid()} may not connect" in refusal.decode()
    assert "may not connect" in caplog.text


async def test_a_listener_of_another_user_is_not_spoken_to(net: Net) -> None:
    _, at_a = await net.start("a")
    inbox = Inbox()
    theirs = UnixTransport(net.url("b"), ListCodec(), uid=os.geteuid() + 1)
    await theirs.start(inbox.on_batch, inbox.on_lost)
    theirs.send(net.url("a"), ["secret"])
    assert "the listener runs as uid" in await inbox.until_lost(net.url("a"))
    await theirs.close()
    assert at_a.events == []


async def test_the_sender_learns_why_it_was_refused(net: Net) -> None:
    a, at_a = await net.start("a")
    inbox = Inbox()

    class Babble(ListCodec):
        def encode(self, batch: list[object]) -> bytes:
            return b"\xc1"

    babbler = UnixTransport(net.url("b"), Babble())
    await babbler.start(inbox.on_batch, inbox.on_lost)
    babbler.send(a.address, ["x"])
    assert "refused by the peer: malformed packet" in await inbox.until_lost(a.address)
    await at_a.until_lost(babbler.address)
    await babbler.close()


async def test_batches_wait_in_order_while_the_reader_does_not_read(net: Net) -> None:
    """The listener is a raw socket that reads only after everything was sent."""
    a, inbox = await net.start("a")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = net.directory / "slow"
    with listener:
        listener.bind(str(path))
        listener.listen()
        for number in range(3000):
            a.send(net.url("slow"), [number, bytes(1000)])
        reader, _ = listener.accept()
        with reader:
            reader.setblocking(False)
            loop, got = asyncio.get_running_loop(), []
            assert await loop.sock_recv(reader, 4096) == hello(a.address)
            while len(got) < 3000:
                packet = await loop.sock_recv(reader, 4096)
                got.append(ListCodec().decode(packet[1:])[0])
    path.unlink()
    assert got == list(range(3000))
    await inbox.until_lost(net.url("slow"))


async def test_what_cannot_be_flushed_before_the_deadline_is_logged(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    a, _ = await net.start("a")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = net.directory / "deaf"
    with listener, caplog.at_level(logging.WARNING):
        listener.bind(str(path))
        listener.listen()
        a.send(net.url("deaf"), [bytes(8_000_000)])
        await a.close(deadline_s=0.01)
    path.unlink()
    assert "packets unsent to " + net.url("deaf") in caplog.text


async def test_a_reader_that_raises_loses_only_its_own_batch(net: Net) -> None:
    """The loop hears of the error, the channel lives on."""
    heard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    a, _ = await net.start("a")
    b, inbox = net.make("b"), Inbox()

    def on_batch(sender: str, batch: list[object]) -> None:
        if batch == ["bad"]:
            raise RuntimeError("role error")
        inbox.on_batch(sender, batch)

    await b.start(on_batch, inbox.on_lost)
    for text in ("one", "bad", "two"):
        a.send(b.address, [text])
    assert await inbox.until_messages(2) == ["one", "two"]
    assert [str(context["exception"]) for context in heard] == ["role error"]


async def test_a_large_transfer_does_not_keep_others_waiting_for_its_end(net: Net) -> None:
    a, _ = await net.start("a")
    b, _ = await net.start("b")
    c, inbox = await net.start("c")
    a.send(c.address, ["ready"])
    b.send(c.address, ["ready"])
    await inbox.until_messages(2)
    a.send(c.address, [bytes(48 * 1024 * 1024)])
    b.send(c.address, ["small"])
    await inbox.until_messages(4)
    assert [who for _, who, _ in inbox.events[2:]] == [b.address, a.address]
