"""The names, types and file names of format version 1: `schemas/trace.md` in code.

What a file looks like inside is known by the module that reads and writes it (`log`, `zarr_store`,
`seal`); what they share stands here, so that a change of the format begins here.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.errors import TraceDamaged
from replay.files import sync

FORMAT = "hookrec-trace"
VERSION = 1

TRACE_FILE = "trace.json"
MODEL_FILE = "model.json"
STREAMS_FILE = "streams.jsonl"
SCALARS_FILE = "scalars.jsonl"
NOTES_FILE = "notes.jsonl"
TRIGGERS_FILE = "triggers.jsonl"
ATTEMPTS_FILE = "attempts.jsonl"
LOCK_FILE = "writer.lock"
END_FILE = "end.json"
LAID_ASIDE = "end-{:05}.json"
"""`end.json` of an attempt, by its number, while the next one has not committed yet."""
DROPPED_FILE = "tensors-dropped.json"
ALERTS_FILE = "alerts.jsonl"
SENT_FILE = "alerts-sent.jsonl"
PINNED_FILE = "pinned"
DAEMON_DIRECTORY = ".hookrec-daemon"
DAEMON_LOCK_FILE = "lock"

KINDS = ("output", "grad_output", "input", "grad_input", "param", "param_grad", "param_grad_acc", "update")
EXPONENTS_KIND = "exponents"
"""Of records that hold how many elements another record has of each exponent; their path says which."""
EXPONENTS = range(-150, 129)
"""The exponents that are counted. The first stands for all that are smaller too, the last for all that are larger."""
MODES = ("train", "eval")

STATISTICS = ("numel", "n_nan", "n_posinf", "n_neginf", "n_zero", "min", "max", "absmax", "mean", "std", "l2")

KEPT = 0
WHY_NOT_KEPT = {
    1: "statistics only, as the plan says",
    2: "dropped: the ring was full",
    3: "dropped: larger than the ring",
    4: "dropped: the limit on bytes or free space was reached",
    5: "dropped: the store could not be written",
    6: "its dtype or layout cannot be stored",
    7: "flight mode: no trigger",
    8: "lost: the writer process died before the commit",
    9: "dropped to make room, before the trace was converted",
    10: "damaged, before the trace was converted",
}

RECORD_SCHEMA = pa.schema(
    [
        pa.field(name, type_, nullable=False)
        for name, type_ in (
            ("step", pa.int64()),
            ("stream", pa.int32()),
            ("call", pa.int32()),
            ("micro", pa.int32()),
            ("mode", pa.uint8()),
            ("kept", pa.uint8()),
            ("row", pa.int64()),
            ("offset", pa.int64()),
            ("nbytes", pa.int64()),
            ("crc32c", pa.uint32()),
            *((name, pa.int64()) for name in STATISTICS[:5]),
            *((name, pa.float64()) for name in STATISTICS[5:]),
        )
    ],
    metadata={"hookrec:version": str(VERSION)},
)

_NUMPY_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
FIXED, RAGGED = "fixed", "ragged"
CODECS = ("zstd", "lz4", "blosc")
ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = frozenset(_NUMPY_NAMES + ML_DTYPES)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype's name; of `ml_dtypes` where numpy has none.

    Raises:
        TraceDamaged: the format knows no such dtype.
    """
    if name in _NUMPY_NAMES:
        return np.dtype(name)
    if name in ML_DTYPES:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    raise TraceDamaged(f"The trace names a dtype {name!r} that format version {VERSION} does not have.")


_STREAMS_ALIKE = 1 << 12
"""Where streams are many they differ in shape alone, so what is worked out of their names is kept."""


@dataclass(frozen=True)
class Stream:
    """All records alike in (layer, kind, path, dtype, shape).

    `shape` is that of one record. `location` is the stream's place in the store; None where the
    store holds no tensors of it. `dtype` and `shape` are those of what is stored; where that is a part of the tensor,
    its first rows or its values in another dtype, `of_dtype` and `of_shape` are those of the whole. `codec` is how each
    record was compressed, None if it was not. `layout` says whether the place is the stream's own, `FIXED`, or shared
    with streams that differ in shape alone, `RAGGED`.
    """

    id: int
    layer: str
    kind: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    location: str | None
    codec: str | None = None
    layout: str = FIXED
    of_dtype: str | None = None
    of_shape: tuple[int, ...] | None = None

    @property
    def whole(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the tensor that flowed through the layer, of which the statistics are."""
        return self.of_dtype or self.dtype, self.shape if self.of_shape is None else self.of_shape

    @property
    def numel(self) -> int:
        """Elements of the whole tensor, as the statistics count them."""
        return math.prod(self.whole[1])

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return numpy_dtype(self.dtype).itemsize * math.prod(self.shape)

    def to_json(self) -> str:
        """Return the stream's line in `streams.jsonl`, without the newline."""
        line: dict[str, Any] = {
            "id": self.id,
            "layer": self.layer,
            "kind": self.kind,
            "path": self.path,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "location": self.location,
            "layout": self.layout,
            "codec": self.codec,
        }
        if self.of_shape is not None:
            line |= {"of_dtype": self.of_dtype, "of_shape": list(self.of_shape)}
        return json.dumps(line, ensure_ascii=True)

    @classmethod
    def from_json(cls, line: str, where: Path) -> "Stream":
        """Read a line of `streams.jsonl`.

        Raises:
            TraceDamaged: the line is not a stream, or its location would leave the store.
        """
        try:
            found = parsed(line)
            stream = cls(
                id=_integer(found["id"]),
                layer=_string(found["layer"]),
                kind=_string(found["kind"]),
                path=_string(found["path"]),
                dtype=_string(found["dtype"]),
                shape=tuple(map(_integer, found["shape"])),
                location=None if found["location"] is None else _string(found["location"]),
                codec=found.get("codec"),
                layout=found["layout"],
                of_dtype=_string(found["of_dtype"]) if "of_dtype" in found else None,
                of_shape=tuple(map(_integer, found["of_shape"])) if "of_shape" in found else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"{where} has a line that is no stream: {line[:200]!r} ({error}).") from None
        if stream.layout not in (FIXED, RAGGED):
            raise TraceDamaged(
                f"{where} has a stream of layout {stream.layout!r}; format version {VERSION} knows {FIXED}, {RAGGED}."
            )
        if stream.codec not in (None, *CODECS):
            raise TraceDamaged(
                f"{where} has a stream of codec {stream.codec!r}; format version {VERSION} knows {', '.join(CODECS)}."
            )
        if stream.layout == RAGGED and stream.codec is not None:
            raise TraceDamaged(
                f"{where} has a stream of layout {RAGGED!r} and codec {stream.codec!r}; there is no such."
            )
        if stream.location is not None and not _stays_inside(stream.location):
            raise TraceDamaged(f"{where} has a stream whose location leaves the store: {stream.location!r}.")
        for dtype in (stream.dtype, stream.whole[0]):
            numpy_dtype(dtype)
        if not _is_part(stream):
            raise TraceDamaged(
                f"{where} has a stream of shape {list(stream.shape)} that is no first rows of {found.get('of_shape')}."
            )
        return stream


class Placed(NamedTuple):
    """Where a record was written: its row in the stream, the byte it begins at in its file, and its bytes there."""

    row: int
    offset: int
    nbytes: int


class Rows(NamedTuple):
    """The records of a stream whose tensors are kept, in the order of their rows: arrays of shape `(rows,)`."""

    step: NDArray[np.int64]
    call: NDArray[np.int32]
    micro: NDArray[np.int32]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    attempt: NDArray[np.int32]

    @property
    def coordinates(self) -> dict[str, NDArray[Any]]:
        """What lies beside the array in the store, with the dtypes it has there."""
        found: dict[str, NDArray[Any]] = {
            "step": self.step.astype(np.int64),
            "call": self.call.astype(np.int32),
            "micro": self.micro.astype(np.int32),
        }
        if np.any(self.attempt):
            found["attempt"] = self.attempt.astype(np.int32)
        return found

    @property
    def one_a_step(self) -> bool:
        """Whether no step has two rows."""
        return bool(np.all(np.diff(self.step) > 0))


def _is_part(stream: Stream) -> bool:
    """Whether what is stored can be the first rows of the whole, or all of it."""
    if (stream.of_dtype is None) != (stream.of_shape is None):
        return False
    stored, whole = stream.shape, stream.whole[1]
    return stored == whole or (stored[1:] == whole[1:] and 1 <= len(stored) == len(whole) and stored[0] <= whole[0])


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise TypeError(f"{value!r} is no size")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


@lru_cache(_STREAMS_ALIKE)
def _stays_inside(location: str) -> bool:
    parts = location.split("/")
    return not any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts)


def check_location(stream: Stream, number: int, where: Path) -> None:
    """Raise TraceDamaged where a line of `streams.jsonl` contradicts itself: else it would give another's tensors.

    Args:
        stream: what the line says.
        number: which line it is, from 0.
        where: the file.
    """
    if stream.id != number:
        raise TraceDamaged(f"{where} has stream {stream.id} in the place of stream {number}. Put it back from a copy.")
    if stream.location is None:
        return
    wanted = _first_location(stream.layer, stream.kind, stream.path)
    rest = stream.location.removeprefix(wanted)
    if not stream.location.startswith(wanted) or not re.fullmatch(r"(~\d+)?", rest):
        raise TraceDamaged(
            f"{where} has a stream of {stream.kind} of layer {stream.layer!r} with the location {stream.location!r}, "
            f"which is none of that: {wanted!r}. Put it back from a copy."
        )


class Locations:
    """Gives each stream a place in the store that no other has."""

    def __init__(self, taken: Iterator[str] | None = None) -> None:
        self._taken = {location.casefold() for location in taken or ()}

    def new(self, layer: str, kind: str, path: str) -> str:
        """Return a location for a further stream of (layer, kind, path)."""
        wanted = _first_location(layer, kind, path)
        location, variant = wanted, 1
        while location.casefold() in self._taken:
            variant += 1
            location = f"{wanted}~{variant}"
        self._taken.add(location.casefold())
        return location


@lru_cache(_STREAMS_ALIKE)
def _first_location(layer: str, kind: str, path: str) -> str:
    return f"{escape(layer)}/{escape(f'{kind}.{path}' if path else kind)}"


_UNSAFE = re.compile(rb'[\x00-\x1f\x7f/\\%~:*?"<>|]|^[. ]|[. ]$|^_(?=_)')


def escape(name: str) -> str:
    """Return `name` as one component of a path, as section 5 of the format says."""
    if not name:
        return "%root"
    if name == "zarr.json":
        return "zarr%2Ejson"  # the file that each group of the store has
    # Surrogates can stand in Python strings, not in UTF-8 proper; they are kept apart, not refused.
    raw = name.encode("utf-8", "surrogatepass")
    escaped = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw)
    if len(escaped) > 200:
        digest = hashlib.sha256(raw).hexdigest()[:16]
        return f"{escaped[:180].decode('utf-8', 'ignore')}%{digest}"
    return escaped.decode("utf-8", "backslashreplace").replace("\\", "%5C")


def as_attribute(name: str) -> str:
    """Return a name as other programs can read it: without surrogates and null bytes, as Python's strings may have."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file so that it is there whole or not at all; if `durable`, after a loss of power as well."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a kill, or a link to a file of somebody else
    with partial.open("x", encoding="utf-8") as file:
        file.write(text)
    if durable:
        sync(partial)
    os.replace(partial, path)
    if durable:
        sync(path.parent)


def parsed(text: str | bytes) -> Any:
    """Return the JSON value that a text is.

    Raises:
        ValueError: it is none, or is nested more deeply than anything of ours.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_lines(path: Path, start: int = 0) -> tuple[list[str], int]:
    """Return the lines of a JSON Lines file from byte `start` that end in a newline, and where the next begins."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", "replace").split("\n")[:-1], start + end
