"""What hooks and capture both speak of: which call a tensor belongs to, and which dtypes a trace can hold."""

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """Which call of a layer a tensor belongs to."""

    step: int
    call: int
    micro: int
    mode: int


DTYPE_NAMES = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
