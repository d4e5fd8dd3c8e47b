"""How commits are taken from a segment that grows: as far as they are whole, and those that are alike many at a time.

A commit is a message of an Arrow IPC stream, a head and a body, with a checksum of its columns in the head. Most
commits of a training have as many records as the one before, so that their heads differ in the checksum alone. Of a run
of these, pyarrow reads the first, which tells how the others lie: it takes a tenth of a millisecond for each message.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from replay.errors import TraceDamaged
from replay.format import RECORD_SCHEMA, VERSION

CHECKSUM = b"hookrec:crc32c"
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises at files that are damaged."""

_FEW = 4  # commits that pyarrow takes sooner one by one
_WIDTHS = [field.type.bit_width // 8 for field in RECORD_SCHEMA]


class TailReader:
    """Reads an Arrow segment from where the last look ended, as far as it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._head = b""

    def read(self) -> list[pa.RecordBatch]:
        """Return the batches that are new and whole; `position` is the byte after the last of them."""
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read()
        whole = self._head + data
        source = pa.BufferReader(whole)
        try:
            reader = pa.ipc.open_stream(source)
        except UNREADABLE:
            return []  # the head is not there yet, or torn
        if not reader.schema.equals(RECORD_SCHEMA):
            raise TraceDamaged(f"{self.path} is no commit log of format version {VERSION}: its columns are others.")
        if not self._head:
            self._head = data[: source.tell()]
            self.position = len(self._head)
            data = data[self.position :]
        batches, good = [], source.tell()
        while True:
            begin = good
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                batch.validate()  # lengths that were damaged would have us read beyond the file
                if metadata is None or metadata.get(CHECKSUM) != checksum_of(batch):
                    break
            except (StopIteration, *UNREADABLE):
                break
            batch, good = _with_alike(batch, metadata[CHECKSUM], whole, begin, source.tell())
            source.seek(good)
            batches.append(batch)
        self.position += good - len(self._head)
        return batches


def _with_alike(
    batch: pa.RecordBatch, checksum: bytes, data: bytes, begin: int, end: int
) -> tuple[pa.RecordBatch, int]:
    """Return a batch with those that follow it and are alike, as one, and where these end.

    Args:
        batch: the first.
        checksum: its checksum, which lies in its head as text.
        data: the bytes of the messages.
        begin: where its message begins there.
        end: and ends.
    """
    places, body_bytes = _layout(len(batch))
    length, head_bytes = end - begin, end - begin - body_bytes
    at = data.find(checksum, begin, begin + head_bytes) - begin
    if at < 0:
        return batch, end
    behind = at + len(checksum)
    head = data[begin : begin + head_bytes]
    count, place = 1, end
    while (
        place + length <= len(data)
        and data[place : place + at] == head[:at]
        and data[place + behind : place + head_bytes] == head[behind:]
    ):
        count, place = count + 1, place + length
    if count < _FEW:
        return batch, end
    messages = np.frombuffer(data, np.uint8, count * length, begin).reshape(count, length)
    columns = [messages[:, head_bytes + first : head_bytes + last] for first, last in places]
    checksums = [b"%08x" % google_crc32c.value(row.tobytes()) for row in np.concatenate(columns, axis=1)]
    good = [said.tobytes() == found for said, found in zip(messages[:, at:behind], checksums, strict=True)]
    count = good.index(False) if False in good else count
    if count < _FEW:
        return batch, end
    return batch_of(count * len(batch), [column[:count].tobytes() for column in columns]), begin + count * length


@functools.lru_cache(256)
def _layout(rows: int) -> tuple[list[tuple[int, int]], int]:
    """Return where the columns of a commit begin and end in its body, and how long that is."""
    places, begin = [], 0
    for width in _WIDTHS:
        places.append((begin, begin + width * rows))
        begin += -(-width * rows // 8) * 8
    return places, begin


def batch_of(rows: int, columns: Iterable[bytes]) -> pa.RecordBatch:
    """Return records of which the bytes of each column are known, in the order of the schema.

    Not by `pyarrow.array`, which imports pandas: 50 MB and a fifth of a second in each writer process.
    """
    arrays = [
        pa.Array.from_buffers(field.type, rows, [None, pa.py_buffer(column)])
        for field, column in zip(RECORD_SCHEMA, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def checksum_of(batch: pa.RecordBatch) -> bytes:
    """Return the checksum of the columns, one behind the other, as a commit has it."""
    columns = batch.columns  # to make them takes longer than the checksum
    buffers = [column.buffers() for column in columns]
    data = b"".join([values for valid, values in buffers if valid is None and values is not None])
    if len(data) != len(batch) * sum(_WIDTHS) or any(column.offset for column in columns):
        data = b"".join([column.to_numpy(zero_copy_only=True).tobytes() for column in columns])
    return b"%08x" % google_crc32c.value(data)
