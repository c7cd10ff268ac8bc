"""Parts of the transfer tests: memory, nodes, and a proxy that spoils the way between them."""

import mmap
import os
import socket
import threading
from dataclasses import dataclass

import msgspec
import numpy as np

from omni_flow.data.transfer.host import DriverHost

SIZE = 8 << 20
SOURCE, TARGET = 1, 2


class Memory:
    """A mapped memory file."""

    def __init__(self, size=SIZE, seed=None):
        self.fd = os.memfd_create("test-arena")
        os.ftruncate(self.fd, size)
        self.size = size
        self.map = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self.map, np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)

    def close(self):
        os.close(self.fd)


@dataclass
class Node:
    host: DriverHost
    memory: Memory


def spans(*rows):
    return np.array(rows, np.uint64).reshape(-1, 3)


class Proxy:
    """A real middleman on the loopback. `spoil(connection number, bytes so far, data)` sees what the server sends and
    returns what goes on, or None to cut the connection; `watch` sees what the client sends, with the same arguments."""

    def __init__(self, endpoint, spoil, watch=None):
        self._target = (endpoint.host, endpoint.port)
        self._spoil = spoil
        self._watch = watch
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = msgspec.structs.replace(endpoint, port=self._listener.getsockname()[1])
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._socks = []
        self._threads[0].start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _watching(self, number, seen, data):
        if self._watch:
            self._watch(number, seen, data)
        return data

    def _accept(self):
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._socks += [client, server]
            number, self.connections = self.connections, self.connections + 1
            for source, sink, spoil in ((client, server, self._watching), (server, client, self._spoil)):
                thread = threading.Thread(target=self._pump, args=(number, source, sink, spoil))
                self._threads.append(thread)
                thread.start()

    def _pump(self, number, source, sink, spoil):
        seen = 0
        try:
            while data := source.recv(1 << 16):
                passed = spoil(number, seen, data)
                seen += len(data)
                if passed is None:
                    break
                sink.sendall(passed)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
