"""Fetching what a caller names by URL: from allowed hosts only, never from an address inside, whole sizes checked.

The name is resolved here and the connection goes to the address that was looked at, so a name can't change between the
look and the connection; each redirect is looked at like the first.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from urllib.parse import urljoin, urlsplit

from omni_flow.serve.errors import ApiError

MAX_REDIRECTS = 3
MAX_HEAD = 32 * 1024


def allowed(host: str, hosts: Sequence[str]) -> bool:
    """Whether a host is on the list: itself, or below a `*.` entry."""
    host = host.rstrip(".").lower()
    return any(host == h.lower() or (h.startswith("*.") and host.endswith(h[1:].lower())) for h in hosts)


def public(address: str) -> bool:
    """Whether an address is out in the internet: none of this machine, its networks, or of a special range."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if mapped is not None:
        ip = mapped
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class Fetcher:
    """Gets bytes from `hosts`; `private` addresses are for tests on the loopback."""

    def __init__(self, hosts: Sequence[str], max_bytes: int, fetch_s: float, private: bool = False) -> None:
        self._hosts, self._max_bytes, self._fetch_s, self._private = tuple(hosts), max_bytes, fetch_s, private

    async def get(self, url: str, field: str) -> bytes:
        """What lies there. Raises ApiError naming `field`."""
        if not self._hosts:
            raise ApiError(
                400,
                "this server fetches nothing by URL; send the data itself (a data: URL)",
                param=field,
                code="url_not_allowed",
            )
        try:
            async with asyncio.timeout(self._fetch_s):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._once(url, field)
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
        except TimeoutError:
            raise self._no(field, f"it took more than {self._fetch_s:g} s") from None
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise self._no(field, f"{type(error).__name__}: {error}") from error
        raise self._no(field, f"more than {MAX_REDIRECTS} redirects")

    def _no(self, field: str, why: str, code: str = "url_failed") -> ApiError:
        return ApiError(400, f"the URL can't be fetched: {why}", param=field, code=code)

    async def _once(self, url: str, field: str) -> bytes | str:
        """The body, or where it redirects to."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or parts.username is not None:
            raise self._no(field, "only plain http: and https: URLs are fetched", "url_not_allowed")
        if not allowed(host, self._hosts):
            raise self._no(field, f"host {host!r} is not on this server's list", "url_not_allowed")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = await self._resolve(host, port, field)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            address, port, ssl=secure, server_hostname=host if secure else None, limit=MAX_HEAD
        )
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            name = host if parts.port is None else f"{host}:{port}"
            head = f"GET {path} HTTP/1.0\r\nHost: {name}\r\nAccept: image/*, audio/*\r\nUser-Agent: omni-flow\r\n\r\n"
            writer.write(head.encode("ascii"))
            await writer.drain()
            return await self._answer(reader, field)
        finally:
            writer.close()

    async def _resolve(self, host: str, port: int, field: str) -> str:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        # All of them: a name with one address inside is not to be trusted with the others either.
        if not self._private and not all(public(address) for address in addresses):
            raise self._no(field, f"host {host!r} has a private address", "url_not_allowed")
        return addresses[0]

    async def _answer(self, reader: asyncio.StreamReader, field: str) -> bytes | str:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ", 2)[1])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if status in (301, 302, 303, 307, 308) and "location" in fields:
            return fields["location"]
        if status != 200:
            raise self._no(field, f"the host answered {status}")
        if int(fields.get("content-length", 0)) > self._max_bytes:
            raise self._no(field, f"it has more than {self._max_bytes} bytes", "too_large")
        body = bytearray()
        while part := await reader.read(65_536):
            body += part
            if len(body) > self._max_bytes:
                raise self._no(field, f"it has more than {self._max_bytes} bytes", "too_large")
        if len(body) < int(fields.get("content-length", 0)):
            raise self._no(field, "the host sent only a part of it")
        return bytes(body)
