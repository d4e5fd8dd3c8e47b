"""How records are compressed: lossless, by codecs that readers of Zarr have, and of HDF5 as registered filters.

zstd and lz4 come from numcodecs, which zarr-python uses too; blosc shuffles bytes by significance first, which floats
need: their exponents compress, their mantissas hardly do. A compressed record is the same in both stores.
"""

import functools
from typing import Any

from replay.errors import TraceDamaged
from replay.files import memory

MOST_BYTES = 0x7E000000
"""Of a record that is compressed; larger ones are stored as they are. It is the least of the codecs' own limits."""

_LEVEL = 1  # of zstd: higher levels take several times as long for a few per cent


def compress(codec: str, data: memoryview, itemsize: int) -> memoryview:
    """Return compressed bytes.

    Args:
        codec: one of `format.CODECS`.
        data: the bytes of a tensor.
        itemsize: bytes of one element.
    """
    return memoryview(_coder(codec, itemsize).encode(data))


def decompress(codec: str, data: memoryview, nbytes: int) -> memoryview:
    """Return the bytes that were compressed.

    Raises:
        TraceDamaged: they are not what was compressed.
    """
    try:
        out = memory(nbytes)
        if not nbytes:
            return out
        _coder(codec, 1).decode(data, out)
    except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
        raise TraceDamaged(f"A record compressed by {codec} cannot be read: {error}.") from None
    return out


def zarr_codec(codec: str, itemsize: int) -> dict[str, Any]:
    """Return a codec as the metadata of a Zarr array names it."""
    if codec == "zstd":
        return {"name": "zstd", "configuration": {"level": _LEVEL, "checksum": False}}
    configuration = {"cname": "zstd" if codec == "blosc" else "lz4", "clevel": 1, "shuffle": "shuffle"}
    return {"name": "blosc", "configuration": {**configuration, "typesize": itemsize, "blocksize": 0}}


def hdf5_filter(codec: str, itemsize: int, nbytes: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of a registered HDF5 filter and its parameters."""
    if codec == "zstd":
        return 32015, (_LEVEL,)
    # Revision of the filter, version of Blosc's format, then as in `zarr_codec`.
    return 32001, (2, 2, itemsize, nbytes, 1, 1, 5 if codec == "blosc" else 1)


@functools.cache
def _coder(codec: str, itemsize: int) -> Any:
    if codec == "zstd":
        from numcodecs.zstd import Zstd

        return Zstd(level=_LEVEL)
    from numcodecs import blosc
    from numcodecs.blosc import Blosc

    blosc.set_nthreads(1)  # the other cores are the training's
    return Blosc("zstd" if codec == "blosc" else "lz4", clevel=1, shuffle=Blosc.SHUFFLE)
