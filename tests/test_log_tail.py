"""Commits that are read many at a time are those that were written, whatever follows, and however it is damaged."""

import random

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from replay.format import RECORD_SCHEMA
from replay.log import LogWriter
from replay.log_tail import TailReader

SEGMENT = "records-00000.arrows"


def written(folder, counts):
    """Commit so many records each; return the columns of each commit, and where it ends in the file."""
    rng = np.random.default_rng(0)
    log = LogWriter(folder)
    commits, ends = [], []
    for count in counts:
        commits.append({f.name: rng.integers(0, 200, count).astype(f.type.to_pandas_dtype()) for f in RECORD_SCHEMA})
        log.append(commits[-1])
        ends.append((folder / SEGMENT).stat().st_size)
    log.close()
    return commits, ends


def check(batches, commits):
    table = pa.Table.from_batches(batches, RECORD_SCHEMA)
    for field in RECORD_SCHEMA:
        expected = np.concatenate([commit[field.name] for commit in commits] or [np.zeros(0)])
        assert np.array_equal(table[field.name].to_numpy(), expected), field.name


@pytest.mark.parametrize(
    "counts",
    [
        [3] * 50,
        [1] * 5 + [2] * 3 + [7] * 9 + [1],
        [4, 5] * 10,
        [0] * 6 + [3] * 6,
        [17],
    ],
)
@pytest.mark.parametrize("looks", [1, 7])
def test_all_commits_are_read_as_they_were_written(tmp_path, counts, looks):
    commits, ends = written(tmp_path, counts)
    data = (tmp_path / SEGMENT).read_bytes()
    reader = TailReader(tmp_path / SEGMENT)
    batches = []
    for end in np.linspace(0, len(data), looks + 1).astype(int)[1:]:
        (tmp_path / SEGMENT).write_bytes(data[:end])
        batches += reader.read()
        assert reader.position == max((e for e in ends if e <= end), default=reader.position)

    check(batches, commits)


def test_alike_commits_are_one_batch(tmp_path):
    written(tmp_path, [3] * 50)

    assert [len(batch) for batch in TailReader(tmp_path / SEGMENT).read()] == [150]


def test_what_comes_before_a_damaged_byte_is_read_and_nothing_of_it_or_behind_it(tmp_path):
    commits, ends = written(tmp_path, [3] * 12)
    data = (tmp_path / SEGMENT).read_bytes()
    begin = ends[6]
    for at in range(begin, ends[7]):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        (tmp_path / SEGMENT).write_bytes(damaged)

        reader = TailReader(tmp_path / SEGMENT)
        batches = reader.read()

        # Bytes between columns say nothing, and some of the message's own only where the next one begins.
        read = sum(map(len, batches)) // 3
        assert read in (7, 8, 12), at
        check(batches, commits[:read])


def one_by_one(data):
    """Return the commits as pyarrow reads them, and where the last whole one ends."""
    source = pa.BufferReader(data)
    reader = pa.ipc.open_stream(source)
    batches, good = [], source.tell()
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            batch.validate()
            values = b"".join(column.to_numpy(zero_copy_only=True).tobytes() for column in batch.columns)
            if metadata[b"hookrec:crc32c"] != b"%08x" % google_crc32c.value(values):
                break
        except (StopIteration, TypeError, KeyError, pa.ArrowException, OSError, UnicodeDecodeError):
            break
        batches.append(batch)
        good = source.tell()
    return batches, good


@pytest.mark.parametrize("seed", range(6))
def test_of_any_damage_is_read_what_is_read_one_by_one(tmp_path, seed):
    some = random.Random(seed)
    counts = [some.choice([0, 1, 3, 8, 9])] * 9 + [some.choice([1, 3, 200]) for _ in range(3)] + [3] * 6
    _, ends = written(tmp_path, counts)
    path = tmp_path / SEGMENT
    whole = path.read_bytes()
    begins = [ends[0] - (ends[1] - ends[0]), *ends[:-1]]
    messages = [whole[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def flipped(*places):
        data = bytearray(whole)
        for place in places:
            data[place % len(data)] ^= 1 << place % 8
        return bytes(data)

    for _ in range(20):
        at, offset = some.randrange(len(messages) - 1), some.randrange(400)
        mixed = some.sample(messages, len(messages))
        for data in (
            whole[: some.randint(begins[0], len(whole))],
            flipped(some.randrange(begins[0], len(whole)), some.randrange(begins[0], len(whole))),
            flipped(begins[at] + offset, begins[at + 1] + offset),
            flipped(*(begin + offset for begin in begins)),
            whole[: begins[0]] + b"".join(mixed),
            whole + some.randbytes(99),
        ):
            path.write_bytes(data)
            expected, good = one_by_one(data)
            reader = TailReader(path)
            found = pa.Table.from_batches(reader.read(), RECORD_SCHEMA).combine_chunks()

            assert found.equals(pa.Table.from_batches(expected, RECORD_SCHEMA).combine_chunks())
            assert reader.position == good


def test_a_column_is_written_in_its_type_or_refused(tmp_path):
    columns = {name: np.array([1, 2]) for name in RECORD_SCHEMA.names}
    log = LogWriter(tmp_path)
    log.append(columns | {"l2": np.array([0.5, np.nan])})
    for wrong in ({"stream": np.array([0, 1 << 31])}, {"kept": np.array([-1, 0])}, {"l2": np.array([0.5])}):
        with pytest.raises(ValueError, match="is to have 2 values of"):
            log.append(columns | wrong)
    log.close()

    table = pa.Table.from_batches(TailReader(tmp_path / SEGMENT).read(), RECORD_SCHEMA)
    assert table["stream"].to_pylist() == [1, 2]
    assert np.array_equal(table["l2"].to_numpy(), [0.5, np.nan], equal_nan=True)
