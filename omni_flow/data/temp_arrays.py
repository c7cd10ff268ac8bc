"""What role code holds of the TempBuffer pool: a buffer of its own to compute into, a share of one to read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from omni_flow.data.arena import Arena
from omni_flow.data.errors import BadArgument, StaleDescriptor
from omni_flow.data.ledger import BLOCK
from omni_flow.refs import TensorRef

if TYPE_CHECKING:
    import torch

    from omni_flow.data.temp_shares import TempShares


class TempBuffer:
    """A slot of one's own: compute into `view`, `numpy` or `torch`, then publish it."""

    __slots__ = ("_arena", "entry", "generation", "nbytes", "offset", "size", "slot")

    def __init__(self, arena: Arena, entry: int, slot: int, generation: int, size: int, nbytes: int) -> None:
        self._arena = arena
        self.entry = entry
        self.slot = slot
        self.generation = generation
        self.size = size
        self.nbytes = nbytes
        self.offset = slot * BLOCK

    def view(self) -> memoryview:
        return self._arena.view(self.offset, self.nbytes)

    def numpy(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.ndarray(shape, dtype, self._arena.view(self.offset, self.size))

    def torch(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.torch(self.offset, shape, dtype)


class Share:
    """A consumer's share of a published buffer; goes back when the last array over it does, or by `release`.

    `owner`: who holds it, None once it has been released. `entry`: the cell of the owner's ledger that says so.
    """

    __slots__ = ("__weakref__", "entry", "owner", "ref")

    def __init__(self, owner: TempShares, entry: int, ref: TensorRef) -> None:
        self.owner: TempShares | None = owner
        self.entry = entry
        self.ref = ref

    def _living(self) -> TempShares:
        owner = self.owner
        if owner is None:
            raise StaleDescriptor(f"slot at {self.ref.offset} has been released", "adopt once per use")
        return owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        ref = self.ref
        owner = self.owner or self._living()
        at = owner.reader_address + ref.offset
        typestr, size = _elements.get(ref.dtype) or _element(ref.dtype)
        if math.prod(ref.shape) * size > ref.nbytes:
            raise BadArgument(
                f"{ref.dtype} of shape {ref.shape} in {ref.nbytes} bytes", "publish what the buffer holds"
            )
        return {"version": 3, "shape": ref.shape, "typestr": typestr, "data": (at, True)}

    def array(self, torch: bool) -> NDArray[Any] | torch.Tensor:
        """`torch()` or `numpy()`, as the producer had it."""
        return self.torch() if torch else np.asarray(self)

    def view(self) -> memoryview:
        """The bytes, read-only; valid until `release`."""
        return self._living().maps.reader.view(self.ref.offset, self.ref.nbytes)

    def numpy(self) -> NDArray[Any]:
        """A read-only array that keeps the share for as long as it, or any view of it, lives."""
        return np.asarray(self)

    def torch(self) -> torch.Tensor:
        """A tensor that keeps the share; writing through it is a segmentation fault."""
        import warnings

        import torch

        kind = getattr(torch, self.ref.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(np.asarray(_Bytes(self)))
        return flat.view(kind).reshape(self.ref.shape)

    def valid(self) -> bool:
        """Whether the slot still is the one described: to be asked after reading without trust in the producer."""
        owner = self.owner
        return owner is not None and owner.generation_of(self.ref.offset // BLOCK) == self.ref.generation

    def release(self) -> None:
        """Give the share back now. Arrays over it must not be read any more."""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.give(self.entry, self.ref)

    def __del__(self) -> None:
        owner = self.owner
        if owner is not None:
            owner.give(self.entry, self.ref)


class _Bytes:
    """The bytes of a share for numpy, whatever their type."""

    __slots__ = ("__array_interface__", "share")

    def __init__(self, share: Share) -> None:
        self.share = share
        at = share._living().reader_address + share.ref.offset
        self.__array_interface__ = {"version": 3, "shape": (share.ref.nbytes,), "typestr": "|u1", "data": (at, True)}


_elements: dict[str, tuple[str, int]] = {}


def _element(name: str) -> tuple[str, int]:
    """The typestr of numpy and the bytes of an element of the type called `name`."""
    try:
        kind = np.dtype(name)
    except TypeError:
        if name != "bfloat16":
            raise BadArgument(f"numpy has no type {name!r}", "read the buffer as a tensor") from None
        kind = np.dtype(np.uint16)
    if not has_bytes(kind):
        raise BadArgument(f"elements of type {name!r} have no byte form", "give an array of numbers")
    found = _elements[name] = (kind.str, kind.itemsize)
    return found


def has_bytes(kind: np.dtype[Any]) -> bool:
    """Whether an array's elements mean the same to another process, and their type's name says all: numbers and times,
    no objects (which are addresses), texts and records."""
    return not kind.hasobject and not issubclass(kind.type, np.flexible)
