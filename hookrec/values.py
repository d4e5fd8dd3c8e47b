"""What there is to record of a value: the tensors in it, and of each the plain strided tensors that hold its values.

A trace holds plain arrays. Most tensors are one. A sparse tensor is recorded as the dense one that it stands for as
long as that is small, and otherwise as its indices and values, under paths of their own; a nested tensor as its parts;
a quantized one as its integers. Each of these says so in a note, and what has no values is named with the reason.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hookrec.calls import DTYPE_NAMES

_MAX_DEPTH = 16
_DENSE_BYTES = 1 << 24
"""A sparse tensor is recorded as its dense one up to this size."""
_MAX_PARTS = 64

_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def flatten_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call's arguments: by position, or by keyword."""
    yield from _distinct(
        found
        for name, value in itertools.chain(enumerate(args), kwargs.items())
        for found in _flatten(value, str(name), 0)
    )


def flatten(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, sequences and dataclasses with their paths, such as "1.0" or "logits".

    Other objects are left alone: to look inside could consume an iterator or never end.
    """
    if isinstance(value, Tensor):
        yield "", value
        return
    yield from _distinct(_flatten(value, "", 0))


def _distinct(found: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with paths that no other has: keys such as 0 and "0" are two, and a key may have a dot in it."""
    taken: set[str] = set()
    for wanted, tensor in found:
        path, variant = wanted, 1
        while path in taken:
            variant += 1
            path = f"{wanted}~{variant}"
        taken.add(path)
        yield path, tensor


def _flatten(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    if value is None or depth == _MAX_DEPTH:
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    else:
        return
    for key, item in items:
        yield from _flatten(item, f"{path}.{key}" if path else str(key), depth + 1)


def values_of(tensor: Tensor, path: str, note: Callable[[str], None]) -> Iterable[tuple[str, Tensor]]:
    """Return the plain strided tensors that hold a tensor's values, with their paths.

    Args:
        tensor: any tensor.
        path: its path; parts get paths below it.
        note: takes a sentence where there is none, or where it is not the tensor itself.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        if isinstance(tensor, FakeTensor):
            note("a fake tensor, which has no values")
            return ()
        if hasattr(tensor, "to_local"):
            with torch.no_grad():
                tensor = tensor.to_local()  # the local shard of a DTensor
        elif tensor.is_nested:
            return _parts_of(tensor, path, note)
        elif is_traceable_wrapper_subclass(tensor):
            note(f"a {type(tensor).__qualname__}, whose values are inside of it")
            return ()
        elif tensor.layout is torch.strided:
            tensor = tensor.as_subclass(Tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in DTYPE_NAMES:
        return _parts_of(tensor, path, note)
    if not tensor.data_ptr():
        if tensor.is_meta:
            note("a meta tensor, which has no values")
            return ()
        if tensor.numel() and not tensor._is_zerotensor():
            # To read from there would end the process. Wrappers are so, and parameters that FSDP has let go of.
            note("a tensor without memory of its own: it wraps others, or its memory was freed")
            return ()
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        note("captured into a CUDA graph: the hook runs only then, and there are no values yet")
        return ()
    return ((path, tensor),)


def _parts_of(tensor: Tensor, path: str, note: Callable[[str], None]) -> Iterable[tuple[str, Tensor]]:
    what = f"layout {str(tensor.layout).removeprefix('torch.')}"
    try:
        with torch.no_grad():
            tensor = tensor.detach()
            if tensor.is_meta:
                note("a meta tensor, which has no values")
                return ()
            if tensor.is_nested:
                return _nested(tensor, path, note)
            if tensor.is_quantized:
                note(f"quantized: its integers are recorded, {_scheme(tensor)}")
                return values_of(tensor.int_repr(), path, note)
            if tensor.dtype not in DTYPE_NAMES:
                note(f"dtype {str(tensor.dtype).removeprefix('torch.')} cannot be stored")
                return ()
            tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
            if tensor.layout not in _PARTS or math.prod(tensor.shape) * tensor.dtype.itemsize <= _DENSE_BYTES:
                dense = tensor.to_dense()
                note(f"{what}: the dense tensor that it stands for is recorded")
                return ((path, dense),)
            names = _PARTS[tensor.layout]
            shape = "×".join(map(str, tensor.shape))
            note(f"{what} of shape {shape}: its {', '.join(names)} are recorded")
            return [(_below(path, name), getattr(tensor, name)()) for name in names]
    except (RuntimeError, NotImplementedError) as error:
        note(f"{what} cannot be stored: {str(error).splitlines()[0]}")
        return ()


def _nested(tensor: Tensor, path: str, note: Callable[[str], None]) -> Iterable[tuple[str, Tensor]]:
    if tensor.layout is torch.jagged:
        jagged: Any = tensor
        parts = {"values": jagged.values(), "offsets": jagged.offsets(), "lengths": jagged.lengths()}
    else:
        parts = {str(number): part for number, part in enumerate(tensor.unbind())}
        if len(parts) > _MAX_PARTS:
            note(f"a nested tensor of {len(parts)} parts, more than {_MAX_PARTS}, is not recorded")
            return ()
    note(f"a nested tensor: its {', '.join(name for name, part in parts.items() if part is not None)} are recorded")
    return [
        found for name, part in parts.items() if part is not None for found in values_of(part, _below(path, name), note)
    ]


def _scheme(tensor: Tensor) -> str:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"with scale {tensor.q_scale():.9g} and zero point {tensor.q_zero_point()}"
    return f"of scheme {str(tensor.qscheme()).removeprefix('torch.')}"


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
