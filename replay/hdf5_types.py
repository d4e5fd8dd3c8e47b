"""How a stream is described to HDF5: its name, its type and its attributes, the same in each file of the store."""

import math
from typing import Any

import numpy as np

from replay.format import ML_DTYPES, Stream, as_attribute, numpy_dtype

_MOST_DIMENSIONS = 31
_ATTRIBUTES = ("layer", "kind", "path", "dtype")


def dataset_name(stream: Stream) -> bytes:
    """Return the name of the dataset that holds the records of a stream."""
    return f"{stream.location}/data".encode()


def shape_of(stream: Stream) -> tuple[int, ...]:
    """Return the shape that HDF5 is told a record has: flat, where it has more dimensions than HDF5 and a row allow."""
    return stream.shape if len(stream.shape) <= _MOST_DIMENSIONS else (math.prod(stream.shape),)


def set_attributes(dataset: Any, stream: Stream) -> None:
    """Write down whose records a dataset holds."""
    for name in _ATTRIBUTES:
        dataset.attrs[name] = as_attribute(getattr(stream, name))


def wrong_attribute(dataset: Any, stream: Stream) -> str | None:
    """Return a sentence on an attribute that is not the stream's; None if all are."""
    for name in _ATTRIBUTES:
        if dataset.attrs[name] != as_attribute(getattr(stream, name)):
            return f"Stream {stream.id} has another {name} in it: {dataset.attrs[name]!r}."
    return None


def new_links() -> Any:
    """Return the properties of a link whose groups are made as well."""
    import h5py

    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def hdf5_type(dtype: str) -> Any:
    """Return the HDF5 type of a dtype.

    Of the formats that neither HDF5 nor numpy has, those with IEEE's infinities are described to HDF5, which then reads
    them as wider floats. Of the others it would take the largest values for infinities; they are bits.
    """
    import h5py

    if dtype in _FLOATS:
        size, fields, bias = _FLOATS[dtype]
        described = h5py.h5t.IEEE_F32LE.copy()
        described.set_fields(*fields)
        described.set_ebias(bias)
        described.set_precision(8 * size)
        described.set_size(size)
        return described
    return h5py.h5t.py_create(np.dtype(np.uint8) if dtype in ML_DTYPES else numpy_dtype(dtype), logical=True)


_FLOATS = {"bfloat16": (2, (15, 7, 8, 0, 7), 127), "float8_e5m2": (1, (7, 2, 5, 0, 2), 15)}
"""Bytes; positions and sizes of sign, exponent and mantissa; bias."""
