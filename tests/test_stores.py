"""What every store promises: any order of appends, any name, dtype and shape, come back to the byte."""

import contextlib
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import h5py
import hdf5plugin  # noqa: F401  (it registers filters)
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay.errors import TraceDamaged
from replay.format import CODECS, DTYPES, ML_DTYPES, RAGGED, Locations, Placed, Rows, Stream
from replay.stores import StoreReader, StoreWriter, open_reader, open_writer, seal_streams

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (32, 32), (64, 256), (100, 170), (5, 1, 3, 2)])
NAMES = st.one_of(
    st.sampled_from(["", "a/b", "a|b", "层.0", ".", "data", "a\0b", "\ud800", "x" * 300]), st.text(max_size=20)
)


class StoreContract:
    """Run on each store. Records are made from a seed, lie in memory like in the ring, and are compared to the byte."""

    codec: str | None = None

    def writer(self, directory: Path) -> StoreWriter:
        raise NotImplementedError

    def reader(self, directory: Path) -> StoreReader:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def directories(self, tmp_path_factory):
        self.new_directory = lambda: tmp_path_factory.mktemp("rank-00000", numbered=True)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        kinds=st.lists(st.tuples(NAMES, st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=5),
        appends=st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 9), st.sampled_from(["", "rewind", "reopen", "crash"]))
        ),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_what_was_appended_comes_back(self, kinds, appends, seed):
        directory = self.new_directory()
        streams = self.streams(kinds)
        want: dict[int, list[tuple[Placed, bytes]]] = {stream.id: [] for stream in streams}
        writer = self.writer(directory)
        for stream in streams:
            writer.add(stream)
        rng = np.random.default_rng(seed)

        live = self.reader(directory)
        for number, count, then in appends:
            stream = streams[number % len(streams)]
            before = writer.rows(stream.id)
            records, memory, places = in_memory(rng, stream.nbytes, count, ones=stream.dtype == "bool")
            placed = writer.append(stream.id, memory, places)
            assert [p.row for p in placed] == list(range(before, before + count))
            want[stream.id] += zip(placed, records, strict=True)
            assert bytes(live.read(stream, *placed[-1])) == records[-1]
            if then == "rewind":
                writer.rewind(stream.id, before + count // 2)
                del want[stream.id][before + count // 2 :]
            elif then in ("reopen", "crash"):
                if then == "crash":
                    crash_in_append(writer, stream.id, memory, places)
                writer.close()
                writer = self.writer(directory)
                for known in streams:
                    writer.add(known, len(want[known.id]))
        live.close()
        self.compare(directory, streams, want)
        writer.close()
        for _ in range(2):
            self.seal(directory, [(stream, rows_of(want[stream.id])) for stream in streams])
            self.compare(directory, streams, want)
        self.compare_with_others(directory, streams, want)

    def seal(self, directory: Path, rows: list[tuple[Stream, Rows]]) -> None:
        seal_streams(directory, rows)

    def streams(self, kinds) -> list[Stream]:
        locations = Locations()
        return [
            Stream(number, name, "output", "", dtype, shape, locations.new(name, "output", ""), self.codec)
            for number, (name, dtype, shape) in enumerate(kinds)
        ]

    def compare(self, directory, streams, want):
        reader = self.reader(directory)
        for stream in streams:
            for placed, record in want[stream.id]:
                assert bytes(reader.read(stream, *placed)) == record
        reader.close()

    def compare_with_others(self, directory, streams, want):
        """Read a sealed store by a library that knows nothing of ours."""


class FileContract(StoreContract):
    def place_of(self, directory: Path, placed: Placed) -> tuple[Path, int]:
        """Return the file that a record is in, the largest, and the byte at which it begins."""
        files = (path for path in directory.rglob("*") if path.is_file())
        return max(files, key=lambda path: path.stat().st_size), placed.offset

    def test_a_file_that_is_cut_off_is_damaged(self):
        directory = self.new_directory()
        (stream,) = self.streams([("a", "float32", (1000,))])
        writer = self.writer(directory)
        writer.add(stream)
        _, memory, places = in_memory(np.random.default_rng(0), stream.nbytes, 3)
        placed = writer.append(0, memory, places)
        writer.close()
        path, begin = self.place_of(directory, placed[-1])
        with path.open("r+b") as file:
            file.truncate(begin + 10)
        reader = self.reader(directory)

        with pytest.raises(TraceDamaged, match="too short"):
            reader.read(stream, *placed[-1])

        reader.close()


class Crash(BaseException):
    """The end of a process in the middle of a write."""


def crash_in_append(writer: StoreWriter, stream_id: int, memory: memoryview, places: Sequence[int]) -> None:
    """Begin to append; half of the bytes reach the file."""

    def write_half(fd: int, parts, offset: int) -> None:
        write(fd, [half(b"".join(parts))], offset)
        raise Crash

    def half(data: bytes) -> memoryview:
        # Direct I/O takes whole pages from page borders.
        nbytes = len(data) // 2 if len(data) % mmap.PAGESIZE else -(-len(data) // 2 // mmap.PAGESIZE) * mmap.PAGESIZE
        copy = mmap.mmap(-1, max(1, nbytes))
        copy[:nbytes] = data[:nbytes]
        return memoryview(copy)[:nbytes]

    write = os.pwritev
    with patch("replay.files.os.pwritev", write_half), contextlib.suppress(Crash):
        writer.append(stream_id, memory, places)


def in_memory(rng, nbytes: int, count: int, *, ones: bool = False) -> tuple[list[bytes], memoryview, list[int]]:
    """Records, and memory in which each begins on a page border, as in the ring."""
    # Halves of them compress and halves do not.
    random = [rng.integers(0, 2 if ones else 256, nbytes // 2, np.uint8).tobytes() for _ in range(count)]
    records = [(half + bytes(nbytes))[:nbytes] for half in random]
    stride = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    memory = mmap.mmap(-1, stride * count)
    places = [i * stride for i in range(count)]
    for place, record in zip(places, records, strict=True):
        memory[place : place + nbytes] = record
    return records, memoryview(memory), places


def rows_of(records) -> Rows:
    count = len(records)
    offset, nbytes = (np.array([getattr(p, name) for p, _ in records], np.int64) for name in ("offset", "nbytes"))
    zeros = np.zeros(count, np.int32)
    return Rows(np.arange(count) // 2, np.arange(count, dtype=np.int32) % 2, zeros, offset, nbytes, zeros)


MODEL: dict[Path, dict[int, list[bytes]]] = {}


class ModelWriter:
    """The reference: lists of bytes in a dictionary, which outlast the writer."""

    def __init__(self, directory: Path) -> None:
        self._records = MODEL.setdefault(directory, {})
        self._nbytes: dict[int, int] = {}

    def add(self, stream: Stream, rows: int = 0) -> None:
        self._nbytes[stream.id] = stream.nbytes
        self.rewind(stream.id, rows)

    def append(self, stream_id: int, memory: memoryview, places: Sequence[int]) -> list[Placed]:
        first, nbytes = self.rows(stream_id), self._nbytes[stream_id]
        self._records[stream_id] += [bytes(memory[place : place + nbytes]) for place in places]
        return [Placed(first + i, 0, nbytes) for i in range(len(places))]

    def rows(self, stream_id: int) -> int:
        return len(self._records[stream_id])

    def rewind(self, stream_id: int, rows: int) -> None:
        del self._records.setdefault(stream_id, [])[rows:]

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self._nbytes.clear()


class ModelReader:
    def __init__(self, directory: Path) -> None:
        self._records = MODEL.setdefault(directory, {})

    def read(self, stream: Stream, row: int, offset: int, nbytes: int) -> bytearray:
        return bytearray(self._records[stream.id][row])

    def close(self) -> None:
        pass


class TestModel(StoreContract):
    """The contract holds for the simplest store that can be."""

    def writer(self, directory):
        return ModelWriter(directory)

    def reader(self, directory):
        return ModelReader(directory)

    def seal(self, directory, rows):
        assert {stream.id: len(part.step) for stream, part in rows} == {
            number: len(records) for number, records in MODEL[directory].items()
        }


class TestZarr(FileContract):
    def writer(self, directory):
        return open_writer("zarr", directory)

    def reader(self, directory):
        return open_reader(directory)

    def compare_with_others(self, directory, streams, want):
        for stream in streams:
            path = directory / "tensors.zarr" / stream.location / "data"
            if stream.dtype.endswith(("fnuz", "e8m0fnu")) or stream.dtype == "complex128":
                continue  # tensorstore has none of these in Zarr 3
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
            values = tensorstore.open(spec, read=True).result().read().result()
            assert values.shape == (len(want[stream.id]), *stream.shape)
            assert values.tobytes() == b"".join(record for _, record in want[stream.id])


class TestZarrWithZstd(TestZarr):
    codec = "zstd"


class RaggedContract(FileContract):
    """All shapes share a place, as matrices."""

    def streams(self, kinds):
        name, dtype, _ = kinds[0]
        location = Locations().new(name, "output", "") + "~3"
        shapes = [(shape[0] if shape else 1, int(np.prod(shape[1:]))) for _, _, shape in kinds]
        return [
            Stream(number, name, "output", "", dtype, shape, location, layout=RAGGED)
            for number, shape in enumerate(shapes)
        ]

    def in_order(self, streams, want):
        """Of each tensor step, call, number of its stream and row, in the order of the table."""
        return sorted((row // 2, row % 2, s.id, row) for s in streams for row in range(len(want[s.id])))

    def compare_with_others(self, directory, streams, want):
        for stream in streams:
            direct = stream.nbytes >= 65_536 or stream.nbytes % 4096 == 0
            for placed, _ in want[stream.id]:
                assert placed.offset % 4096 == 0 or not direct

    def test_a_writer_that_goes_on_keeps_off_what_is_there(self):
        """Also off what was written and never committed, of which no row tells."""
        directory = self.new_directory()
        one, other = self.streams([("a", "uint8", (5000,)), ("a", "uint8", (8192,))])
        rng, kept = np.random.default_rng(0), []
        for stream, committed in ((one, 3), (other, 0), (one, 2), (other, 4)):
            writer = self.writer(directory)
            rows = [sum(count for s, count, _ in kept if s is known) for known in (one, other)]
            writer.add(one, rows[0])
            writer.add(other, rows[1])
            records, memory, places = in_memory(rng, stream.nbytes, 4)
            placed = writer.append(stream.id, memory, places)
            kept.append((stream, committed, list(zip(placed, records, strict=True))[:committed]))
            writer.close()

        want = {s.id: [found for stream, _, part in kept if stream is s for found in part] for s in (one, other)}
        self.compare(directory, [one, other], want)
        assert [placed.row for placed, _ in want[one.id]] == list(range(5))


class TestZarrRagged(RaggedContract, TestZarr):
    """Its files are so small that tensors go from one to the next."""

    @pytest.fixture(autouse=True)
    def small_shards(self, monkeypatch):
        monkeypatch.setattr("replay.ragged.SHARD_BYTES", 1 << 15)
        monkeypatch.setattr("replay.ragged._INNER_BYTES", 1 << 12)

    def compare_with_others(self, directory, streams, want):
        super().compare_with_others(directory, streams, want)
        dtype = streams[0].dtype
        path = directory / "tensors.zarr" / streams[0].location
        expected = self.in_order(streams, want)
        if dtype not in ML_DTYPES:
            place = zarr.open_group(path, mode="r")
            assert list(zip(place["step"][:], place["call"][:], strict=True)) == [key[:2] for key in expected]
            for i, (_, _, number, row) in enumerate(expected):
                begin, numel, shape = place["begin"][i], place["numel"][i], place["shape"][i]
                tensor = place["data"][begin : begin + numel].reshape(shape)
                assert tensor.shape == streams[number].shape
                assert tensor.tobytes() == want[number][row][1]
        if not dtype.endswith(("fnuz", "e8m0fnu")) and dtype != "complex128":
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path / 'data'}/"}}
            data = tensorstore.open(spec, read=True).result().read().result()
            for stream in streams:
                for placed, record in want[stream.id]:
                    begin = placed.offset // data.itemsize
                    assert data[begin : begin + int(np.prod(stream.shape))].tobytes() == record

    def test_what_goes_by_direct_io_begins_on_a_page_border_and_the_rest_is_packed(self):
        directory = self.new_directory()
        streams = self.streams([("a", "uint8", (n,)) for n in (10, 8192, 70_000)])
        writer = self.writer(directory)
        for stream in streams:
            writer.add(stream)
        offsets = []
        for number in (0, 0, 1, 0, 2, 0):
            _, memory, places = in_memory(np.random.default_rng(0), streams[number].nbytes, 1)
            offsets += [placed.offset for placed in writer.append(number, memory, places)]
        writer.close()

        assert offsets == [0, 10, 4096, 12_288, 16_384, 90_112]


class TestZarrWithBlosc(TestZarr):
    codec = "blosc"

    def compare_with_others(self, directory, streams, want):
        # tensorstore cannot seek in what blosc has compressed inside of a shard.
        for stream in streams:
            if stream.dtype not in ML_DTYPES:
                data = zarr.open_array(directory / "tensors.zarr" / stream.location / "data", mode="r")
                assert data[:].tobytes() == b"".join(record for _, record in want[stream.id])


class TestZarrWithLz4(TestZarrWithBlosc):
    codec = "lz4"


class TestHdf5(FileContract):
    def writer(self, directory):
        return open_writer("hdf5", directory)

    def reader(self, directory):
        return open_reader(directory)

    def compare_with_others(self, directory, streams, want):
        with h5py.File(directory / "tensors.h5") as file:
            for stream in streams:
                data = file[stream.location]["data"]
                assert data.shape == (len(want[stream.id]), *stream.shape)
                assert data.dims[0]["step"][:].tolist() == [i // 2 for i in range(data.shape[0])]
                assert file[stream.location]["call"][:].tolist() == [i % 2 for i in range(data.shape[0])]
                if stream.dtype not in ("bfloat16", "float8_e5m2"):  # those h5py widens
                    assert data[:].tobytes() == b"".join(record for _, record in want[stream.id])


class TestHdf5Ragged(RaggedContract, TestHdf5):
    """Its segments are so small that most have room for a few tensors."""

    @pytest.fixture(autouse=True)
    def small_segments(self, monkeypatch):
        monkeypatch.setattr("replay.hdf5_segments._FIRST_SEGMENT_BYTES", 1 << 13)
        monkeypatch.setattr("replay.hdf5_segments._SEGMENT_BYTES", 1 << 15)

    def compare_with_others(self, directory, streams, want):
        super().compare_with_others(directory, streams, want)
        expected = self.in_order(streams, want)
        with h5py.File(directory / "tensors.h5") as file:
            place = file[streams[0].location]
            assert list(zip(place["step"][:], place["call"][:], strict=True)) == [key[:2] for key in expected]
            assert place["begin"].dims[0]["step"][:].tolist() == [key[0] for key in expected]
            if streams[0].dtype not in ("bfloat16", "float8_e5m2"):  # those h5py widens
                for i, (_, _, number, row) in enumerate(expected):
                    begin, numel, shape = place["begin"][i], place["numel"][i], place["shape"][i]
                    tensor = place["data"][begin : begin + numel].reshape(shape)
                    assert tensor.shape == streams[number].shape
                    assert tensor.tobytes() == want[number][row][1]

    def place_of(self, directory, placed):
        for line in map(json.loads, (directory / "segments.jsonl").read_text().splitlines()):
            ((_, first, rows, offset),) = line["places"]
            begin = placed.offset - 4 * first  # float32
            if 0 <= begin < 4 * rows:
                return directory / line["file"], offset + begin
        raise AssertionError("no segment has it")

    def test_places_that_fill_up_together_share_their_segments(self, monkeypatch):
        monkeypatch.setattr("replay.hdf5_segments._FIRST_SEGMENT_BYTES", 1 << 20)
        monkeypatch.setattr("replay.hdf5_segments._SEGMENT_BYTES", 1 << 23)
        directory = self.new_directory()
        writer, rng, streams, total = self.writer(directory), np.random.default_rng(0), {}, 0
        _, memory, places = in_memory(rng, 100_000, 1)
        for _ in range(400):
            length = int(rng.integers(1, 500))
            shapes = [(number, (length, (1, 4, 8)[number % 3])) for number in range(40)]
            for number, shape in shapes:
                if (number, shape) not in streams:
                    location = f"{number}/output"
                    new = Stream(len(streams), str(number), "output", "", "float32", shape, location, layout=RAGGED)
                    writer.add(streams.setdefault((number, shape), new))
            for key in shapes:
                writer.append(streams[key].id, memory, places)
                total += streams[key].nbytes
        writer.close()

        assert len(list(directory.glob("tensors-*.h5"))) < 2 * total / (1 << 23)

    def test_a_tensor_lies_in_one_segment_whatever_its_size(self):
        directory = self.new_directory()
        streams = self.streams([("a", "uint8", (n,)) for n in (10, 5000, 70_000, 1_000_000)])
        writer = self.writer(directory)
        for stream in streams:
            writer.add(stream)
        rng, want = np.random.default_rng(0), {stream.id: [] for stream in streams}
        for number in (0, 1, 2, 0, 3, 1, 1, 0, 2):
            records, memory, places = in_memory(rng, streams[number].nbytes, 1)
            want[number] += zip(writer.append(number, memory, places), records, strict=True)
        writer.close()

        lines = (directory / "segments.jsonl").read_text().splitlines()
        parts = [entry for line in map(json.loads, lines) for entry in line["places"]]
        assert [first for _, first, _, _ in parts[1:]] == [first + rows for _, first, rows, _ in parts[:-1]]
        for found in want.values():
            for placed, _ in found:
                (holds,) = [(first, rows) for _, first, rows, _ in parts if first <= placed.offset < first + rows]
                assert placed.offset + placed.nbytes <= sum(holds)
        self.compare(directory, streams, want)
        self.seal(directory, [(stream, rows_of(want[stream.id])) for stream in streams])
        self.compare_with_others(directory, streams, want)


class TestHdf5WithZstd(TestHdf5):
    codec = "zstd"


class TestHdf5WithLz4(TestHdf5):
    codec = "lz4"


class TestHdf5WithBlosc(TestHdf5):
    codec = "blosc"


@pytest.mark.parametrize("store", [TestZarr, TestHdf5])
def test_all_codecs_are_tried(store):
    assert {case.codec for case in (store, *_below(store))} == {None, *CODECS}


def _below(case: type) -> set[type]:
    return {lower for found in case.__subclasses__() for lower in (found, *_below(found))}
