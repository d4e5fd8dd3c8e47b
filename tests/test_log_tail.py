"""Commits that are read many at a time are those that were written, whatever follows, and however it is damaged."""

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
