"""Regions: tensors addressed by block id."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from .._common.arguments import shown
from .._config.model_layout import ModelLayout, RegionSpec
from .._kernel.layout import Layout
from ..errors import RegionError

_DEVICE_TYPES = ("cpu", "cuda")
MAX_BYTES = 2**60
MAX_PARTS = 1024


def _plain(tensor: Any) -> torch.Tensor:
    """The tensor, checked and detached from autograd: offloading only moves bytes."""
    if not isinstance(tensor, torch.Tensor):
        raise RegionError("tensor", f"must be a torch tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise RegionError("tensor", "is a nested tensor, whose blocks have no fixed addresses")
    if tensor.layout != torch.strided:
        raise RegionError("tensor", f"has the layout {tensor.layout}, whose blocks have no fixed addresses")
    if tensor.device.type not in _DEVICE_TYPES:
        raise RegionError("tensor", f"is on {tensor.device}, but only {' and '.join(_DEVICE_TYPES)} are supported")
    if tensor.numel() and tensor.untyped_storage().nbytes() <= tensor.storage_offset() * tensor.element_size():
        raise RegionError("tensor", "has no memory: its storage was resized")
    return tensor.detach()


@attrs.frozen(eq=False)
class KVRegion:
    """One tensor addressed by block id: block `b` is the `block_bytes` bytes at byte `b * block_stride_bytes` of the
    tensor.

    Only a block has to be contiguous. For example, keys and values that alternate inside one tensor are two regions of
    it. The tensor may have any dtype: bytes are never interpreted. A region keeps the tensor's memory alive.

    Raises `RegionError` if blocks cannot be addressed that way.
    """

    tensor: torch.Tensor = attrs.field(converter=_plain)
    block_stride_bytes: int
    block_bytes: int
    block_shape: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    """Shape of one block; empty if unknown. `of` and `all_of` set it."""
    num_blocks: int = attrs.field(init=False)
    """Blocks within the tensor's own extent, including the null block 0."""

    def __attrs_post_init__(self) -> None:
        for name in ("block_bytes", "block_stride_bytes"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_BYTES:
                raise RegionError(name, f"must be a positive number of bytes, got {shown(value)}")
        if self.block_stride_bytes < self.block_bytes:
            problem = f"blocks of {self.block_bytes} bytes overlap at a stride of {self.block_stride_bytes} bytes"
            raise RegionError("block_stride_bytes", problem)
        extent = _extent_bytes(self.tensor)
        if extent < self.block_bytes:
            raise RegionError("tensor", f"reaches over {extent} bytes, less than one block of {self.block_bytes}")
        object.__setattr__(self, "num_blocks", (extent - self.block_bytes) // self.block_stride_bytes + 1)

    @classmethod
    def of(cls, tensor: torch.Tensor, block_axis: int = 0) -> KVRegion:
        """The region of a tensor whose axis `block_axis` counts blocks: block `b` is `tensor.select(block_axis, b)`.

        The bytes of a block have to be contiguous, in any order of its axes. Raises `RegionError` if they are not: see
        `all_of`.
        """
        blocks = _blocks_first(tensor, block_axis)
        block = blocks[0]
        if not _is_dense(block):
            problem = f"a block is not contiguous: its shape is {list(block.shape)}, its strides {list(block.stride())}"
            raise RegionError("tensor", f"{problem}; KVRegion.all_of gives a region for each contiguous part")
        block_bytes, shape = block.numel() * blocks.element_size(), tuple(block.shape)
        if blocks.shape[0] == 1:  # the stride of a dimension of one means nothing
            return cls(blocks, block_bytes, block_bytes, block_shape=shape)
        return cls(blocks, blocks.stride(0) * blocks.element_size(), block_bytes, block_shape=shape)

    @classmethod
    def all_of(cls, tensor: torch.Tensor, block_axis: int = 0) -> tuple[KVRegion, ...]:
        """The fewest regions that cover all bytes of a tensor whose axis `block_axis` counts blocks.

        A tensor `[2, num_blocks, ...]` (keys, then values) with `block_axis=1` has two: one for the keys, one for the
        values.
        """
        found, waiting = list[KVRegion](), [_blocks_first(tensor, block_axis)]
        while waiting:
            blocks = waiting.pop()
            if _is_dense(blocks[0]):
                found.append(cls.of(blocks))
                continue
            outermost = max(range(1, blocks.dim()), key=lambda axis: (blocks.shape[axis] > 1, blocks.stride(axis)))
            if len(found) + len(waiting) + blocks.shape[outermost] > MAX_PARTS:
                raise RegionError("tensor", f"a block is in more than {MAX_PARTS} parts")
            waiting += reversed(blocks.unbind(outermost))
        return tuple(found)

    @classmethod
    def of_model(cls, model: ModelLayout, kv_caches: Mapping[str, object]) -> tuple[KVRegion, ...]:
        """The regions of `model` (from `groups_of`), in its order, from tensors by the names of `model.regions`.

        Each member is a tensor `[num_blocks, ...]`, a `KVRegion`, or a sequence of them whose blocks together are a
        block of the region, such as keys and values in two tensors. Raises `RegionError` naming the member that is
        missing, that the model does not have, or that differs from its `RegionSpec` in the bytes of a block, the dtype
        or the order of axes: a block id names a row in every region, so KV without one of them would be wrong.
        """
        if not isinstance(model, ModelLayout):
            raise RegionError("model", f"must be a ModelLayout, from groups_of, got {type(model).__name__}")
        if not isinstance(kv_caches, Mapping):
            problem = f"must be a mapping with the names of model.regions, got {type(kv_caches).__name__}"
            raise RegionError("kv_caches", problem)
        names = [spec.name for spec in model.regions]
        superfluous = [name for name in kv_caches if name not in names]
        if superfluous:
            problem = f"{model.model_type} has no region of this name; it has {_listed(names)}"
            raise RegionError(f"kv_caches[{shown(superfluous[0])}]", problem)
        parts: dict[str, KVRegion] = {}
        for spec in model.regions:
            if spec.name not in kv_caches:
                needed = f"blocks of {list(spec.shape)} {spec.dtype}"
                problem = f"is missing: {model.model_type} stores it with the same block ids ({needed})"
                raise RegionError(f"kv_caches[{spec.name!r}]", problem)
            parts |= _parts_of(spec, kv_caches[spec.name])
        _check_alike(parts)
        _check_disjoint(parts)
        return tuple(parts.values())

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def address(self) -> int:
        """The address of block 0."""
        return self.tensor.data_ptr()

    def __repr__(self) -> str:
        return (
            f"<KVRegion blocks={self.num_blocks} block_bytes={self.block_bytes}"
            f" stride={self.block_stride_bytes} {self.tensor.dtype} {self.device}>"
        )


def _blocks_first(tensor: torch.Tensor, block_axis: int) -> torch.Tensor:
    """`tensor` with the axis that counts blocks moved to position 0."""
    tensor = _plain(tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise RegionError("tensor", f"has no blocks: its shape is {list(tensor.shape)}")
    if type(block_axis) is not int or not -tensor.dim() <= block_axis < tensor.dim():
        raise RegionError("block_axis", f"must be an axis of {list(tensor.shape)}, got {shown(block_axis)}")
    return tensor.movedim(block_axis, 0)


def _is_dense(block: torch.Tensor) -> bool:
    """Whether the bytes of `block` are contiguous, whatever the order of its axes."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def byte_rows(region: KVRegion) -> torch.Tensor:
    """The region as `uint8 [num_blocks, block_bytes]`, a view of its memory with one row per block."""
    tensor = region.tensor
    rows = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    shape = (region.num_blocks, region.block_bytes)
    return rows.set_(tensor.untyped_storage(), offset, shape, (region.block_stride_bytes, 1))


def regions_of(kv_caches: object) -> tuple[KVRegion, ...]:
    """`kv_caches` as regions of one block pool, in the order given.

    Takes a tensor `[num_blocks, ...]`, a `KVRegion`, or a sequence or mapping of them. Raises `RegionError` naming the
    member (`kv_caches[3]`) that has another number of blocks or another device than the first, blocks that are not
    contiguous, or memory that belongs to another region, too.
    """
    named = dict(_members(kv_caches))
    if not named:
        raise RegionError("kv_caches", "is empty")
    regions = {name: _region(name, member) for name, member in named.items()}
    _check_alike(regions)
    _check_disjoint(regions)
    return tuple(regions.values())


def _members(kv_caches: object) -> Iterator[tuple[str, object]]:
    if isinstance(kv_caches, (torch.Tensor, KVRegion)):
        yield "kv_caches", kv_caches
    elif isinstance(kv_caches, Mapping):
        for key, member in kv_caches.items():
            yield f"kv_caches[{key!r}]", member
    elif isinstance(kv_caches, Sequence) and not isinstance(kv_caches, (str, bytes)):
        for index, member in enumerate(kv_caches):
            yield f"kv_caches[{index}]", member
    else:
        raise RegionError("kv_caches", f"must be tensors or KVRegions, got {type(kv_caches).__name__}")


def _region(name: str, member: object) -> KVRegion:
    if isinstance(member, KVRegion):
        return member
    try:
        _warn_of_two(name, _plain(member))
        return KVRegion.of(_plain(member))
    except RegionError as error:
        raise RegionError(name, error.problem if error.argument == "tensor" else str(error)) from None


def _parts_of(spec: RegionSpec, member: object) -> dict[str, KVRegion]:
    """The regions that make up the region `spec`, checked against it, by their names in messages."""
    name = f"kv_caches[{spec.name!r}]"
    members: dict[str, object] = {name: member}
    if isinstance(member, Sequence) and not isinstance(member, (str, bytes)):
        members = {f"{name}[{at}]": each for at, each in enumerate(member)}
    regions = {place: _region(place, each) for place, each in members.items()}
    found = sum(region.block_bytes for region in regions.values())
    if found != spec.block_bytes:
        problem = (
            f"has blocks of {found} bytes; those of the model have {spec.block_bytes} ({list(spec.shape)} {spec.dtype})"
        )
        raise RegionError(name, problem)
    for place, region in regions.items():
        dtype = str(region.tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype and not (dtype == "uint8" and region.tensor.element_size() == spec.item_bytes):
            raise RegionError(place, f"has dtype {dtype}, but the model stores {spec.dtype} there")
        _check_axes(place, region, spec.shape[len(spec.shape) - len(_axes(region)) :])
    return regions


def _axes(region: KVRegion) -> list[int]:
    """The shape of a block in the order of its bytes, outermost axis first; empty if the shape is unknown."""
    tensor = region.tensor
    if not region.block_shape or tuple(tensor.shape[1:]) != region.block_shape:
        return []
    order = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    return [tensor.shape[axis] for axis in order]


def _check_axes(name: str, region: KVRegion, wanted: Sequence[int]) -> None:
    """Raise if the block has the axes that the model wants in another order: the bytes would be others."""
    found = [size for size in _axes(region) if size > 1]
    expected = [size for size in wanted if size > 1]
    if found != expected and sorted(found) == sorted(expected):
        problem = f"has blocks whose bytes are in the order {found}; those of the model are in the order {expected}"
        raise RegionError(name, f"{problem} (the argument `layout` of groups_of)")


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    few = ", ".join(names[:4])
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"


def _warn_of_two(name: str, tensor: torch.Tensor) -> None:
    """Warn if the tensor may have keys and values on its first axis, as some attention kernels do: it would be taken
    for a pool of two blocks."""
    if tensor.dim() > 2 and tensor.shape[0] == 2 < tensor.shape[1]:
        problem = f"{name}: the first axis of {list(tensor.shape)} is read as 2 blocks, one of them the null block"
        advice = "if axis 1 counts blocks, give KVRegion.all_of(tensor, block_axis=1)"
        warnings.warn(f"{problem}; {advice}", UserWarning, stacklevel=2)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first to its last byte, limited to the end of its storage."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = (last + 1) * tensor.element_size()
    stored = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return min(extent, int(stored))


def _check_alike(regions: Mapping[str, KVRegion]) -> None:
    (first_name, first), *others = regions.items()
    for name, region in others:
        if region.num_blocks != first.num_blocks:
            problem = f"has {region.num_blocks} blocks, but {first_name} has {first.num_blocks}"
            raise RegionError(name, f"{problem}: they must be equal")
        if region.device != first.device:
            raise RegionError(name, f"is on {region.device}, but {first_name} is on {first.device}")


def _check_disjoint(regions: Mapping[str, KVRegion]) -> None:
    """Raise if two regions share memory: a load into a block of one would write into the other."""
    for (one_name, one), (other_name, other) in itertools.combinations(regions.items(), 2):
        if share_memory(one, other):
            raise RegionError(other_name, f"shares memory with {one_name}")


def share_memory(one: KVRegion, other: KVRegion) -> bool:
    """Whether a block of one region and a block of the other have a byte in common, on one device."""
    if _end(one) <= other.address or _end(other) <= one.address:
        return False
    if one.block_stride_bytes == other.block_stride_bytes:
        return _interlock(one, other)
    starts = [_starts(one), _starts(other)]
    ends = [starts[0] + one.block_bytes, starts[1] + other.block_bytes]
    # Blocks of one region are disjoint and ascending. For each block, count the other region's blocks that end before
    # it starts, and those that start before it ends: the counts differ exactly if one of them overlaps it.
    ended_before = np.searchsorted(ends[1], starts[0], side="right")
    started_before = np.searchsorted(starts[1], ends[0], side="left")
    return bool((ended_before != started_before).any())


def _interlock(one: KVRegion, other: KVRegion) -> bool:
    """Whether regions of equal stride overlap. Uses no arrays, because 64 regions in one tensor, a usual number, make
    2,016 pairs."""
    shift, rest = divmod(other.address - one.address, one.block_stride_bytes)
    meets_same = rest < one.block_bytes and abs(shift) < one.num_blocks
    meets_next = rest + other.block_bytes > one.block_stride_bytes and abs(shift + 1) < one.num_blocks
    return meets_same or meets_next


def _starts(region: KVRegion) -> np.ndarray[Any, np.dtype[np.int64]]:
    return region.address + np.arange(region.num_blocks, dtype=np.int64) * region.block_stride_bytes


def _end(region: KVRegion) -> int:
    return region.address + (region.num_blocks - 1) * region.block_stride_bytes + region.block_bytes


@attrs.frozen
class _Claim:
    process_id: int
    """The process that made the claim. A forked child has copies of the claims and of the memory."""
    has_own_ids: bool
    """Whether the program hands out the block ids itself."""


_LOCK = threading.Lock()
_CLAIMS: WeakKeyDictionary[KVRegion, _Claim] = WeakKeyDictionary()
"""Weak keys: a claim ends when no copy refers to its region any more."""


def claim(regions: Sequence[KVRegion], *, has_own_ids: bool) -> None:
    """Claim the memory of `regions`. `RegionError("kv_caches")` if an open runtime uses some of it, unless the program
    hands out the block ids of both."""
    with _LOCK:
        for other, theirs in list(_CLAIMS.items()):
            if theirs.process_id != os.getpid() or (has_own_ids and theirs.has_own_ids):
                continue
            if any(one.device == other.device and share_memory(one, other) for one in regions):
                problem = "is in use by another open runtime: each would overwrite what the other one has cached"
                raise RegionError("kv_caches", problem)
        for region in regions:
            _CLAIMS[region] = _Claim(os.getpid(), has_own_ids)


def unclaim(regions: Sequence[KVRegion]) -> None:
    """Release the claim: no copy uses the memory of `regions` any more."""
    with _LOCK:
        for region in regions:
            _CLAIMS.pop(region, None)


def identity_of(layout: Layout, namespace: str, regions: Sequence[KVRegion]) -> str:
    """The layout, namespace and regions as text that is the same in every process. It does not include the sizes of
    units and blocks."""
    kinds = [_described(component.kind) for component in layout.components]
    shapes = [(str(region.tensor.dtype), *_shape_in_memory(region), region.block_bytes) for region in regions]
    places = [tuple(place) for place in layout.places]
    return repr((namespace, kinds, places, shapes, sys.byteorder))


def _shape_in_memory(region: KVRegion) -> tuple[tuple[int, ...], ...]:
    """The shape of a block, and the order of its axes in memory unless it is the usual one: a view may have the shape
    of another layout. The usual order is left out, so that directories and cells of versions without it are found."""
    shape, blocks = tuple(region.block_shape), region.tensor
    if not shape or tuple(blocks.shape[1:]) != shape or blocks[0].is_contiguous():
        return (shape,)
    axes = [axis for axis in range(len(shape)) if shape[axis] > 1]
    return shape, tuple(sorted(axes, key=lambda axis: blocks.stride(axis + 1), reverse=True))


def _described(kind: object) -> str:
    """An attention kind as text that is the same in every process."""
    name = f"{type(kind).__module__}.{type(kind).__qualname__}"
    return name if type(kind).__repr__ is object.__repr__ else f"{name} {kind!r}"
