"""What every transport promises, the same tests for each."""

import os

import pytest
from transport_kit import ALL, ENCODED, Inbox, Net, raw_connection, settle

from omni_flow.control.transport import MESSAGE_LIMIT, AddressError, MessageTooLarge, TransportClosed

pytestmark = pytest.mark.usefixtures("loop_name")
every = pytest.mark.parametrize("kind", ALL)
encoded = pytest.mark.parametrize("kind", ENCODED)


@every
async def test_a_batch_arrives_with_the_address_of_its_sender(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    a.send(b.address, ["one", 2, {"three": [4.5, None]}])
    await inbox.until(lambda: inbox.events)
    assert inbox.events == [("batch", a.address, ["one", 2, {"three": [4.5, None]}])]


@every
async def test_a_transport_reaches_itself(net: Net) -> None:
    a, inbox = await net.start("a")
    a.send(a.address, ["me"])
    assert await inbox.until_messages(1) == ["me"]


@every
async def test_batches_of_one_sender_arrive_in_order(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    for number in range(5000):
        a.send(b.address, [number])
    assert await inbox.until_messages(5000) == list(range(5000))


@every
async def test_small_and_large_batches_keep_their_order(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    sizes = [1, 300_000, 2, 70_000, 65_530, 65_536, 3, 2_000_000, 4] * 3
    for number, size in enumerate(sizes):
        a.send(b.address, [(number, bytes([number]) * size)])
    got = await inbox.until_messages(len(sizes))
    assert [(n, len(data), data[:1]) for n, data in got] == [(n, s, bytes([n])) for n, s in enumerate(sizes)]


@every
@pytest.mark.parametrize("size", [0, 1, 65_500, 65_536, 131_072, 262_144, 1_000_003, 30 * 1024 * 1024])
async def test_a_message_of_any_size_arrives_whole(net: Net, size: int) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    pattern = os.urandom(4096)
    data = (pattern * (size // 4096 + 1))[:size]
    a.send(b.address, [data])
    assert (await inbox.until_messages(1))[0] == data


@encoded
async def test_a_message_over_the_limit_is_refused_and_the_channel_lives_on(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    with pytest.raises(MessageTooLarge) as caught:
        a.send(b.address, [bytes(MESSAGE_LIMIT + 1)])
    assert caught.value.limit == MESSAGE_LIMIT
    assert str(caught.value.size) in str(caught.value)
    assert b.address in str(caught.value)
    a.send(b.address, ["after"])
    assert await inbox.until_messages(1) == ["after"]


@encoded
async def test_one_message_over_the_limit_keeps_back_the_whole_batch(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    with pytest.raises(MessageTooLarge):
        a.send(b.address, ["before", bytes(MESSAGE_LIMIT + 1), "behind"])
    a.send(b.address, ["after"])
    assert await inbox.until_messages(1) == ["after"]


@encoded
async def test_a_batch_over_the_limit_of_messages_within_it_is_divided(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    block = bytes(23 * 1024 * 1024)
    a.send(b.address, [[0, block], [1, block], [2, block]])
    got = await inbox.until_messages(3)
    assert [(number, len(data)) for number, data in got] == [(n, len(block)) for n in range(3)]


@every
async def test_many_peers_send_at_once_and_each_keeps_its_order(net: Net) -> None:
    hub, inbox = await net.start("hub")
    senders = [await net.start(f"s{n}") for n in range(20)]
    for number in range(100):
        for sender, _ in senders:
            sender.send(hub.address, [number, bytes(2000)])
    await inbox.until_messages(20 * 100 * 2)
    for sender, _ in senders:
        assert inbox.messages(sender.address)[::2] == list(range(100))


@every
async def test_both_directions_work_at_once(net: Net) -> None:
    a, at_a = await net.start("a")
    b, at_b = await net.start("b")
    for number in range(200):
        a.send(b.address, [number, bytes(20_000)])
        b.send(a.address, [number, bytes(20_000)])
    assert (await at_a.until_messages(400))[::2] == list(range(200))
    assert (await at_b.until_messages(400))[::2] == list(range(200))


@every
async def test_sending_to_nobody_is_said_once_and_not_raised(net: Net) -> None:
    a, inbox = await net.start("a")
    nobody = net.nowhere()
    for number in range(5):
        a.send(nobody, [number])
    assert inbox.events == []  # never from inside send
    assert await inbox.until_lost(nobody)
    await settle(a, inbox)
    assert len(inbox.losses()) == 1


@every
async def test_a_peer_that_comes_up_later_is_reached_by_a_new_channel(net: Net) -> None:
    a, inbox = await net.start("a")
    b, _ = await net.start("b")
    await b.close()
    a.send(b.address, ["lost"])
    await inbox.until_lost(b.address)
    b, at_b = await net.start("b")  # at its old address, tcp at a new one
    a.send(b.address, ["arrives"])
    assert await at_b.until_messages(1) == ["arrives"]


@every
async def test_close_sends_what_is_queued_first(net: Net) -> None:
    a, _ = await net.start("a")
    b, inbox = await net.start("b")
    for number in range(300):
        a.send(b.address, [(number, bytes(50_000))])
    await a.close()
    await inbox.until_lost(a.address)
    assert [number for number, _ in inbox.messages(a.address)] == list(range(300))
    assert inbox.events[-1][:2] == ("lost", a.address)


@every
async def test_a_peer_that_closes_is_said_lost_once_to_all_it_spoke_with(net: Net) -> None:
    a, at_a = await net.start("a")
    b, at_b = await net.start("b")
    c, at_c = await net.start("c")
    a.send(b.address, ["to b"])
    b.send(a.address, ["to a"])
    b.send(c.address, ["to c"])
    await at_b.until_messages(1)
    await at_a.until_messages(1)
    await at_c.until_messages(1)
    await b.close()
    await at_a.until_lost(b.address)
    await at_c.until_lost(b.address)
    await settle(a, at_a)
    await settle(c, at_c)
    assert (len(at_a.losses()), len(at_c.losses()), at_b.losses()) == (1, 1, [])


@every
async def test_closing_twice_is_closing_once_and_sending_afterwards_is_an_error(net: Net) -> None:
    a, inbox = await net.start("a")
    a.send(a.address, ["before"])
    await inbox.until_messages(1)
    await a.close()
    await a.close()
    with pytest.raises(TransportClosed):
        a.send(a.address, ["late"])


@every
async def test_sending_before_start_is_an_error(net: Net) -> None:
    with pytest.raises(TransportClosed):
        net.make("a").send(net.url("b"), ["early"])


@every
async def test_a_forgotten_peer_is_not_said_lost_but_learns_it_itself(net: Net) -> None:
    a, at_a = await net.start("a")
    b, at_b = await net.start("b")
    a.send(b.address, ["x"])
    b.send(a.address, ["y"])
    await at_b.until_messages(1)
    await at_a.until_messages(1)
    a.forget(b.address)
    await at_b.until_lost(a.address)
    await settle(a, at_a)
    assert at_a.losses() == []
    a.send(b.address, ["again"])
    assert await at_b.until_messages(2) == ["x", "again"]


@every
async def test_each_channel_that_a_peer_opens_and_leaves_in_one_turn_is_said_lost(net: Net) -> None:
    a, _ = await net.start("a")
    b, at_b = await net.start("b")
    a.send(b.address, ["first"])
    await at_b.until_messages(1)
    a.forget(b.address)
    a.send(b.address, ["second"])
    await a.close()
    await at_b.until_lost(a.address, times=2)
    assert at_b.messages() == ["first", "second"]
    assert [kind for kind, _, _ in at_b.events] == ["batch", "lost", "batch", "lost"]


@every
async def test_forgetting_a_peer_nobody_knows_does_nothing(net: Net) -> None:
    a, inbox = await net.start("a")
    a.forget(net.nowhere())
    await settle(a, inbox)
    assert inbox.losses() == []


@every
async def test_a_forgotten_loss_is_not_said(net: Net) -> None:
    a, inbox = await net.start("a")
    a.send(net.nowhere(), ["x"])
    a.forget(net.nowhere())
    await settle(a, inbox)
    assert inbox.losses() == []


@every
async def test_callbacks_may_send_forget_and_close(net: Net) -> None:
    a, at_a = await net.start("a")
    closer, answers = net.make("b"), Inbox()

    def on_batch(sender: str, batch: list[object]) -> None:
        closer.send(sender, ["answer"])
        closer.forget(sender)
        answers.on_batch(sender, batch)

    await closer.start(on_batch, answers.on_lost)
    a.send(closer.address, ["1"])
    a.send(closer.address, ["2"])
    await at_a.until_lost(closer.address)
    assert answers.messages() == ["1"]


@every
async def test_an_address_of_another_scheme_is_an_error(net: Net) -> None:
    a, _ = await net.start("a")
    with pytest.raises(AddressError):
        a.send("carrier-pigeon://roof", ["x"])


@encoded
@pytest.mark.parametrize(
    "garbage", [b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)], ids=["zero", "http", "random"]
)
async def test_garbage_from_a_raw_socket_hurts_nobody_else(net: Net, garbage: bytes) -> None:
    a, inbox = await net.start("a")
    b, _ = await net.start("b")
    b.send(a.address, ["before"])
    await inbox.until_messages(1)
    with raw_connection(net, a.address) as raw:
        raw.setblocking(False)
        raw.send(garbage)
        b.send(a.address, ["after"])
        await inbox.until_messages(2)
    assert inbox.messages() == ["before", "after"]
    assert inbox.losses() == []
