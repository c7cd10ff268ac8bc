"""The transfer drivers by name, and why one is not there.

Third-party transports are imported only when asked for, in the process that runs them.
"""

import importlib.util
from collections.abc import Callable

import msgspec

from omni_flow.data.transfer.base import Done, Driver
from omni_flow.data.transfer.errors import BadJob, DriverAbsent
from omni_flow.data.transfer.native import NativeOptions

NIXL_MODULES = ("nixl_cu12", "nixl_cu13")

_NEEDS: dict[str, tuple[str, ...]] = {"tcp": (), "nixl": NIXL_MODULES, "mooncake": ("mooncake",)}
"""Driver name → the modules of which its extra installs one; the extra has the driver's name."""


def available_drivers() -> tuple[str, ...]:
    """Drivers that can be made here."""
    return tuple(name for name in _NEEDS if name not in absent_drivers())


def absent_drivers() -> dict[str, str]:
    """Drivers that cannot be made here, each with the way to have it."""
    return {
        name: f"module {modules[0]!r} is not installed; pip install 'omni-flow[{name}]'"
        for name, modules in _NEEDS.items()
        if modules and not any(importlib.util.find_spec(module) for module in modules)
    }


def make_driver(name: str, options: bytes, done: Done) -> Driver:
    """A driver in this process, from msgpack options (empty: defaults).

    Raises: DriverAbsent; BadJob when the options are not the driver's.
    """
    if name not in _NEEDS:
        raise DriverAbsent(f"there is no transfer driver {name!r}; there are {', '.join(_NEEDS)}")
    if name in (absent := absent_drivers()):
        raise DriverAbsent(f"driver {name!r}: {absent[name]}")
    try:
        return _MAKERS[name](options, done)
    except msgspec.DecodeError as error:
        raise BadJob(f"options of driver {name!r}: {error}") from error


def _tcp(options: bytes, done: Done) -> Driver:
    from omni_flow.data.transfer.tcp import TcpDriver
    from omni_flow.data.transfer.tcp_parts import TcpOptions

    return TcpDriver(msgspec.msgpack.decode(options, type=TcpOptions) if options else TcpOptions(), done)


def _nixl(options: bytes, done: Done) -> Driver:
    from omni_flow.data.transfer.nixl import NixlDriver

    return NixlDriver(_native(options), done)


def _mooncake(options: bytes, done: Done) -> Driver:
    from omni_flow.data.transfer.mooncake import MooncakeDriver

    return MooncakeDriver(_native(options), done)


def _native(options: bytes) -> NativeOptions:
    return msgspec.msgpack.decode(options, type=NativeOptions) if options else NativeOptions()


_MAKERS: dict[str, Callable[[bytes, Done], Driver]] = {"tcp": _tcp, "nixl": _nixl, "mooncake": _mooncake}
