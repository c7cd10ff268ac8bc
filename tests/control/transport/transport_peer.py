"""A peer process. `transport_peer.py URL KEY echo` sends every batch back; `... flood ADDRESS` sends numbers for ever;
`... burst ADDRESS COUNT SIZE` sends COUNT messages and closes at once. Prints its address; stdin's end ends it."""

import asyncio
import sys
from typing import Any

import uvloop
from transport_kit import ListCodec

from omni_flow.control.transport import make_transport


async def main(url: str, key: str, role: str, *arguments: str) -> None:
    loop = asyncio.get_running_loop()
    transport = make_transport(url, ListCodec(), key=key or None)
    over = asyncio.Event()

    def on_batch(sender: str, batch: list[Any]) -> None:
        if role == "echo":
            transport.send(sender, batch)

    await transport.start(on_batch, lambda peer, cause: None)
    print(transport.address, flush=True)
    loop.add_reader(sys.stdin.fileno(), over.set)

    def flood(number: int) -> None:
        transport.send(arguments[0], list(range(number, number + 10)))
        if not over.is_set():
            loop.call_soon(flood, number + 10)

    if role == "flood":
        flood(0)
    elif role == "burst":
        count, size = int(arguments[1]), int(arguments[2])
        for number in range(count):
            transport.send(arguments[0], [[number, bytes(size)]])
        over.set()
    await over.wait()
    loop.remove_reader(sys.stdin.fileno())
    await transport.close(deadline_s=20.0)


uvloop.run(main(*sys.argv[1:]))
