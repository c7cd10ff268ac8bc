"""The arenas of a memory manager: which there are, who may have which, and how one is handed out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from omni_flow.data.arena import Arena
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.device_memory import DeviceMemory, OwnedArena
from omni_flow.data.errors import Refused, UnknownName
from omni_flow.data.messages import ArenaInfo, ArenaRef
from omni_flow.data.protocol import Message
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.session import Session


class ArenaFile(Protocol):
    """What can be handed out as an arena: an `Arena`, or memory that the manager itself has not mapped."""

    @property
    def fd(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    def reader_fd(self) -> int: ...


class ServedArenas:
    """Arenas by name: those of the pools and of TempBuffers, made here, and those that services make when asked.

    `made_by` has the functions of services for theirs. Of `own` each session has one, which it may always write;
    `read_only` ones are written by the server alone.
    """

    def __init__(self, config: ServerConfig, devices: DeviceMemory) -> None:
        self.made_by: dict[str, Callable[[Session, str], ArenaFile | OwnedArena]] = {}
        self.own: set[str] = set()
        self.read_only: set[str] = set()
        self._made: dict[str, Arena | DeviceArena | OwnedArena] = {}
        self._config = config
        for pool in config.pools:
            for tier, pages in (("l1", pool.l1_pages), ("l2", pool.l2_pages)):
                name, size = f"{pool.name}/{tier}", pages * pool.page_bytes
                if pages and tier == "l1" and pool.l1_device >= 0:
                    self._made[name] = devices.create(name, size, pool.l1_device)
                elif pages:
                    self._make(name, size)
        if config.temp_bytes:
            self._make("temp", config.temp_bytes + config.temp_large_bytes)

    def _make(self, name: str, size: int) -> None:
        self._made[name] = Arena.create(name, size, huge=self._config.huge, populate=self._config.populate)

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that were made here."""
        return tuple(self._made)

    def hand_out(self, ref: ArenaRef, owner: Session, session: Session, message: Message) -> None:
        """Answer a message of `session` with the arena that `owner` asks for.

        Raises:
            UnknownName: there is none of that name.
            Refused: it may only be read.
        """
        arena: ArenaFile | OwnedArena
        if ref.name in self._made:
            arena = self._made[ref.name]
        else:
            make = self.made_by.get(ref.name)
            if make is None:
                raise UnknownName(f"arena {ref.name!r}", f"there are {', '.join((*self._made, *self.made_by))}")
            arena = make(owner, ref.name)
        if ref.write and (owner.read_only or ref.name in self.read_only) and ref.name not in self.own:
            raise Refused(f"session {owner.id} may only read {ref.name}", "map it without write")
        if isinstance(arena, OwnedArena):
            session.reply(message, arena.info)
            return
        device = arena.device if isinstance(arena, DeviceArena) else -1
        info = ArenaInfo(ref.name, arena.size, arena.kind, arena.page_size, device)
        if ref.write:
            session.reply(message, info, fds=(arena.fd,))
            return
        fd = arena.reader_fd()
        try:
            session.reply(message, info, fds=(fd,))
        finally:
            os.close(fd)

    def stats(self) -> dict[str, int]:
        """Bytes of each that was made here."""
        return {f"arena_bytes/{name}": arena.size for name, arena in self._made.items()}

    def close(self) -> None:
        for arena in self._made.values():
            arena.close()
