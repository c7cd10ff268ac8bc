"""Weights held once: engines of one node bind their model to tensors that the memory manager keeps, mapped read-only.

The first engine loads as SGLang would, whatever the checkpoint, and hands over the result: every parameter, buffer and
plain tensor attribute of the model, post-processed (an absorbed MLA projection is such an attribute). Others build the
model without memory and bind it by the *table* of what there is. Which engine is first is decided by asking for the
table like for any tensor: one process is told to load it, the others wait, and the next in line loads if that one dies.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omni_flow.compute.errors import EngineFailed
from omni_flow.compute.sglang.takeover import current
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import Namespace
from omni_flow.data.weights.client import WeightClient, WeightSet
from omni_flow.data.weights.names import Family, TensorSpec, WeightName

if TYPE_CHECKING:
    import torch
    from torch import nn

TABLE_BYTES: Final = 4 << 20
GROUP_BYTES: Final = 4 << 30
"""Bytes handed over at a time: what an engine that loads needs beyond its weights."""
_LENGTH: Final = struct.Struct("<I")
_KINDS: Final = {
    "bool": "bool", "uint8": "u8", "int8": "i8", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2",
    "int16": "i16", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "float32": "f32", "int64": "i64",
    "float64": "f64",
}  # fmt: skip


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where the model has a tensor.

    Args:
        module, name: the module's path and the tensor's name in it.
        kind: `parameter`, `buffer` or `attribute`.
        tensor: its number in the table.
    """

    module: str
    name: str
    kind: str
    tensor: int


class Held(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of the table.

    Args:
        dtype: torch's name.
        shape: as it is stored, without gaps.
        order: its dimensions as the model sees them, as numbers of stored dimensions.
        on_device: on the GPU; else in host memory.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    on_device: bool


class Table(msgspec.Struct, array_like=True, frozen=True):
    tensors: tuple[Held, ...]
    places: tuple[Place, ...]


def places_of(model: nn.Module) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Every tensor of a model: (module, name, kind, tensor). One that stands in several places comes several times."""
    import torch

    for path, module in model.named_modules(remove_duplicate=False):
        for kind, found in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in found.items():
                if tensor is not None:
                    yield path, name, kind, tensor
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield path, name, "attribute", value


def stored_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, slowest first."""
    steps = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], dim))


def table_of(model: nn.Module) -> tuple[Table, list[torch.Tensor]]:
    """The table of a loaded model, and its tensors in stored order of dimensions.

    Raises:
        EngineFailed: an element type that has no name.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    held: list[Held] = []
    tensors, places = [], []
    for path, name, kind, tensor in places_of(model):
        data = tensor.data
        same = (data.data_ptr() if data.numel() else id(tensor), data.dtype, data.shape, data.stride())
        number = numbers.setdefault(same, len(held))
        if number == len(held):
            order = stored_order(data)
            stored = data.permute(order)
            dtype = str(data.dtype).removeprefix("torch.")
            if dtype not in _KINDS:
                raise EngineFailed(f"{path}.{name} is of {dtype}", "start the engine with share_weights=False")
            back = tuple(order.index(dim) for dim in range(len(order)))
            held.append(Held(dtype, tuple(stored.shape), back, data.is_cuda))
            tensors.append(stored)
        places.append(Place(path, name, kind, number))
    return Table(tuple(held), tuple(places)), tensors


def bind(model: nn.Module, places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> None:
    """Put shared tensors (as the model sees them) into their places."""
    from torch.nn import Parameter

    modules = dict(model.named_modules(remove_duplicate=False))
    for place in places:
        module, tensor = modules[place.module], tensors[place.tensor]
        if place.kind == "parameter":
            old = module._parameters.get(place.name)
            made = Parameter(tensor, requires_grad=False)
            if old is not None:
                vars(made).update(vars(old))
            module._parameters[place.name] = made
        elif place.kind == "buffer":
            module._buffers[place.name] = tensor
        else:
            setattr(module, place.name, tensor)


class SharedWeights:
    """The shared weights of one engine; it holds them until its connection ends.

    Args:
        client: connection to the memory manager.
        namespace: identity of what the engine computes. The version of the weights is the one in it, and so in the
            keys of the engine's pages: whatever is current, pages and weights never part.
        layout: whatever else decides what the tensors look like after loading (backends, versions).
        device: the GPU, -1 for host memory.
    """

    def __init__(self, client: MemoryManagerClient, namespace: Namespace, layout: Sequence[str], device: int) -> None:
        self._client = WeightClient(client)
        self._family = Family(namespace.model, namespace.revision)
        self._version = namespace.weight_version
        self._dtype = namespace.dtype
        self._layout = hashlib.sha256("\0".join((namespace.dtype, *layout)).encode()).hexdigest()[:16]
        self._device = device
        self._sets: list[WeightSet] = []
        self.loaded_here = False

    def _spec(self, number: int, held: Held) -> TensorSpec:
        name = WeightName(family=self._family, path=f"{number}", dtype=_KINDS[held.dtype], layout=self._layout)
        return TensorSpec(name, held.shape)

    def load(self, load: Callable[[], nn.Module], empty: Callable[[], nn.Module]) -> nn.Module:
        """The model, bound to shared weights.

        Args:
            load: loads it with memory of its own.
            empty: makes it on the meta device.
        """
        made: list[nn.Module] = []

        def load_table(_spec: TensorSpec, room: memoryview) -> None:
            made.append(load())
            table = self._hand_over(made[0])
            raw = msgspec.msgpack.encode(table)
            if len(raw) > TABLE_BYTES - _LENGTH.size:
                raise EngineFailed(f"the model has {len(table.places)} tensors", "start with share_weights=False")
            room[: _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw

        name = WeightName(family=self._family, path="table", dtype="u8", layout=self._layout)
        with self._client.get(TensorSpec(name, (TABLE_BYTES,)), load_table, version=self._version) as found:
            raw = found.bytes(name)
            (length,) = _LENGTH.unpack_from(raw)
            table = msgspec.msgpack.decode(raw[_LENGTH.size : _LENGTH.size + length], type=Table)
            del raw
            self.loaded_here = bool(made)
            return made[0] if made else self._bind_all(empty(), table)

    def _groups(self, table: Table) -> Iterator[list[int]]:
        """Numbers of tensors to be held together: on one kind of memory, up to `GROUP_BYTES`."""
        for on_device in (True, False):
            group: list[int] = []
            size = 0
            for number, held in enumerate(table.tensors):
                spec = self._spec(number, held)
                if held.on_device != on_device or not spec.nbytes:
                    continue
                if group and size + spec.nbytes > GROUP_BYTES:
                    yield group
                    group, size = [], 0
                group.append(number)
                size += spec.nbytes
            if group:
                yield group

    def _get(self, table: Table, group: list[int], fill: Callable[[TensorSpec, memoryview], None]) -> dict[int, Any]:
        """The tensors of a group as the model sees them."""
        specs = [self._spec(number, table.tensors[number]) for number in group]
        device = self._device if table.tensors[group[0]].on_device else -1
        found = self._client.get(specs, fill, version=self._version, device=device)
        self._sets.append(found)
        return {
            number: found.torch(spec.name).permute(table.tensors[number].order)
            for number, spec in zip(group, specs, strict=True)
        }

    def _hand_over(self, model: nn.Module) -> Table:
        """Give a loaded model's tensors to the manager, and bind the model to them; its own memory is freed."""
        import torch

        table, stored = table_of(model)
        own: list[torch.Tensor | None] = list(stored)
        del stored

        def fill(spec: TensorSpec, room: memoryview) -> None:
            tensor = own[int(spec.name.path)]
            assert tensor is not None
            torch.frombuffer(room, dtype=torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))

        for group in self._groups(table):
            shared = self._get(table, group, fill)
            bind(model, [place for place in table.places if place.tensor in shared], _Sparse(shared))
            for number in group:
                own[number] = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return table

    def _bind_all(self, model: nn.Module, table: Table) -> nn.Module:
        """Bind a model without memory by the table.

        Raises:
            EngineFailed: a tensor of the model is not in the table.
        """
        import torch

        def missing(spec: TensorSpec, _room: memoryview) -> None:
            raise EngineFailed(f"shared tensor {spec.name.path} is gone", "start the engine again")

        tensors: dict[int, Any] = {}
        for group in self._groups(table):
            tensors |= self._get(table, group, missing)
        for number, held in enumerate(table.tensors):
            if number not in tensors:  # without elements
                tensors[number] = torch.empty(held.shape, dtype=getattr(torch, held.dtype)).permute(held.order)
        bind(model, table.places, _Sparse(tensors))
        left = [f"{path}.{name}" for path, name, _, tensor in places_of(model) if tensor.is_meta]
        if left:
            raise EngineFailed(f"{len(left)} tensors are not shared: {', '.join(left[:5])}", "share_weights=False")
        return model.eval()


class _Sparse(Sequence[Any]):
    """Tensors by number, where not every number is there."""

    def __init__(self, tensors: dict[int, Any]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: Any) -> Any:
        return self._tensors[number]


def wrap_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Hook around `get_model_loader`: the loader SGLang picked loads what nobody has loaded."""
    import torch
    from sglang.srt.model_loader import loader, utils

    inner = original(load_config, model_config)
    weights = current().weights
    if weights is None:
        return inner
    shared: SharedWeights = weights

    class SharedLoader(loader.BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            inner.download_model(model_config)

        def load_model(self, *, model_config: Any, device_config: Any) -> Any:
            def empty() -> Any:
                quantisation = loader._get_quantization_config(model_config, load_config)
                with utils.set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                    return loader._initialize_model(model_config, load_config, quantisation)

            def load() -> Any:
                return inner.load_model(model_config=model_config, device_config=device_config)

            return shared.load(load, empty)

    return SharedLoader(load_config)
