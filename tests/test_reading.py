"""What replay and other programs read of a trace is what was recorded, while it is written, sealed or damaged."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import hookrec
import replay
from tests.samples import SAMPLES, convolutional, train
from tests.stored import write_stored

pytestmark = pytest.mark.usefixtures("one_thread")


def test_zarr_python_and_tensorstore_read_a_sealed_trace(tmp_path):
    import tensorstore
    import xarray
    import zarr

    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        train(model, SAMPLES[convolutional], 4)

    trace = replay.open(tmp_path / "a")
    expected = np.stack([trace.tensor(step, "0") for step in range(4)])
    store = tmp_path / "a/rank-00000/tensors.zarr"
    array = store / "0/output/data"
    assert np.array_equal(zarr.open_array(str(array), mode="r")[:], expected)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(array)}}
    assert np.array_equal(tensorstore.open(spec).result().read().result(), expected)
    dataset = xarray.open_zarr(store, group="0/output", consolidated=False)
    assert np.array_equal(dataset.data.sel(step=2).values, expected[2])


def test_h5py_alone_reads_a_trace_by_step_and_layer(tmp_path):
    """Live segments by themselves, and all of it when it is sealed."""
    import h5py

    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", store="hdf5", keep_free=0):
        train(model, SAMPLES[convolutional], 3)
        trace = replay.open(tmp_path / "a")
        deadline = time.monotonic() + 10
        while trace.refresh().steps != [0, 1, 2] and time.monotonic() < deadline:
            time.sleep(0.02)
        with h5py.File(tmp_path / "a/rank-00000/tensors-00000.h5") as file:
            assert np.array_equal(file["4/output/data"][2], trace.tensor(2, "4"))

    (tmp_path / "a").rename(tmp_path / "moved")
    trace = replay.open(tmp_path / "moved")
    with h5py.File(tmp_path / "moved/rank-00000/tensors.h5") as file:
        for layer in trace.layers:
            for kind in trace.kinds:
                group = file[f"{layer}/{kind}"]
                row = int(np.flatnonzero(group["step"][:] == 1)[0])
                assert np.array_equal(group["data"][row], trace.tensor(1, layer, kind))
                assert group["data"].dims[0].label == "step"
                assert group["data"].dims[0][0].name == f"/{layer}/{kind}/step"
                assert group["data"].attrs["layer"] == layer


def test_exported_statistics_open_in_pandas_polars_and_duckdb(tmp_path):
    import duckdb
    import pandas as pd
    import polars as pl

    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0, tensors=False):
        train(model, SAMPLES[convolutional], 3)
    selection = replay.open(tmp_path / "a").select(kinds="output", where="l2 > 0")

    selection.to_parquet(tmp_path / "out.parquet")

    expected = selection.stats()["l2"].to_pylist()
    assert len(expected) == 18
    assert pd.read_parquet(tmp_path / "out.parquet")["l2"].tolist() == expected
    assert pl.read_parquet(tmp_path / "out.parquet")["l2"].to_list() == expected
    assert [row[0] for row in duckdb.sql(f"select l2 from '{tmp_path}/out.parquet'").fetchall()] == expected


def test_exported_tensors_are_those_of_the_trace(tmp_path):
    import pandas as pd
    import polars as pl

    model = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 4).to(torch.bfloat16))
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for _ in range(3):
            model[2](model[1](model[0](torch.randn(5, 3))).to(torch.bfloat16)).sum().backward()
            recorder.step()
    trace = replay.open(tmp_path / "a")

    trace.select().to_parquet(tmp_path / "out.parquet", tensors=True)

    expected = [tensor.astype(np.float32).ravel().tolist() for _, tensor in trace.select().tensors()]
    assert len(expected) == 18
    assert [list(values) for values in pd.read_parquet(tmp_path / "out.parquet")["values"]] == expected
    assert pl.read_parquet(tmp_path / "out.parquet")["values"].to_list() == expected
    with pytest.raises(replay.BadQuery, match="exists already"):
        trace.select().to_parquet(tmp_path / "out.parquet")


def test_xarray_has_a_labelled_dataset_of_each_stream(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for _ in range(4):
            for _ in range(2 if recorder._recording.step_number % 2 else 1):
                model[1](model[0](torch.randn(5, 3)))
            recorder.step()
    trace = replay.open(tmp_path / "a")

    tree = trace.select(steps=slice(0, None, 2)).to_xarray()

    assert tree["0/output"].data.dims == ("step", "d0", "d1")
    assert np.array_equal(tree["0/output"].data.sel(step=2).values, trace.tensor(2, "0"))
    everything = trace.select(layers="1").to_xarray()["1/output"]
    assert everything.data.dims[0] == "row"
    assert everything.step.values.tolist() == [0, 1, 1, 2, 3, 3]
    assert everything.call.values.tolist() == [0, 0, 1, 0, 0, 1]


def test_a_tensor_of_8_kb_is_read_within_100_microseconds(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0) as recorder:
        for _ in range(50):
            model(torch.randn(32, 64)).sum().backward()
            recorder.step()
    trace = replay.open(tmp_path / "a")
    for step in trace.steps:
        assert trace.tensor(step, "1", "grad_output").nbytes == 8192

    seconds = []
    for step in trace.steps * 4:
        begin = time.perf_counter()
        trace.tensor(step, "1", "grad_output")
        seconds.append(time.perf_counter() - begin)

    assert np.median(seconds) <= 100e-6


WATCHER = """
import sys, time, replay
path, steps = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 30
seen = 0
trace = replay.open(path)
print("ready", flush=True)
while seen < steps and time.monotonic() < deadline:
    for step in trace.refresh().steps[seen:]:
        print(step, trace.status, time.time(), trace.tensor(step, "4", "grad_output").shape, sep="|", flush=True)
        seen += 1
    time.sleep(0.02)
"""


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_a_second_process_sees_each_step_of_a_live_trace_within_a_second(tmp_path, store):
    model = convolutional()
    ended = []
    with hookrec.attach(model, tmp_path / "a", store=store, keep_free=0):
        command = [sys.executable, "-c", WATCHER, str(tmp_path / "a"), "5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdout.readline().strip() == "ready"
            for _ in range(5):
                train(model, SAMPLES[convolutional], 1)
                ended.append(time.time())
                time.sleep(0.3)
            lines = [line.strip().split("|") for line in watcher.stdout]

    assert [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert {(line[1], line[3]) for line in lines} == {("live", "(4, 3)")}
    assert max(float(line[2]) - end for line, end in zip(lines, ended, strict=True)) < 1


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        train(model, SAMPLES[convolutional], 2)
    trace = replay.open(tmp_path / "a")

    with pytest.raises(replay.StepNotCommitted, match="no step 9; its last committed step is 1"):
        trace.tensor(9, "0")
    with pytest.raises(replay.NotRecorded, match=r"it has output \(call 0\), grad_output \(call 0\)"):
        trace.tensor(1, "0", "grad_output", call=3)
    with pytest.raises(replay.BadQuery, match="The columns are"):
        trace.records(where="norm > 1")
    with pytest.raises(replay.TraceNotFound, match="does not exist"):
        replay.open(tmp_path / "b")


def test_a_newer_version_is_refused_by_its_number(tmp_path):
    hookrec.attach(convolutional(), tmp_path / "a", keep_free=0).detach()
    file = tmp_path / "a/trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 7}))

    with pytest.raises(replay.TraceTooNew, match="version 7"):
        replay.open(tmp_path / "a")


def test_replay_brings_in_neither_torch_nor_hookrec():
    code = "import sys, replay; print([m for m in ('torch', 'hookrec') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_replay_is_imported_in_the_time_of_what_it_stands_on(tmp_path):
    # Of the processor and beside numpy and pyarrow, since a slow or a busy machine says nothing of us.
    code = """if True:
        import time
        began = time.process_time()
        import numpy, pyarrow.compute
        between = time.process_time()
        import replay
        print(between - began, time.process_time() - between)"""
    # Where bytecode is not kept, all would be compiled anew.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) for _ in range(4)]
    libraries, ours = zip(*([float(seconds) for seconds in run.split()] for run in runs[1:]), strict=True)
    assert min(ours) < min(libraries) / 2


def test_a_flipped_bit_is_named_and_never_returned(tmp_path):
    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        train(model, SAMPLES[convolutional], 2)
    shard = tmp_path / "a/rank-00000/tensors.zarr/4/output/data/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 16
    shard.write_bytes(data)

    with pytest.raises(replay.TraceDamaged, match="checksum differs"):
        replay.open(tmp_path / "a").tensor(0, "4")
    replay.open(tmp_path / "a").tensor(1, "4")


@pytest.mark.parametrize("sealed", [True, False])
def test_an_export_in_parts_is_the_whole_in_its_order(tmp_path, monkeypatch, sealed):
    monkeypatch.setattr("replay.rank._PART_ROWS", 4)
    monkeypatch.setattr("replay.log.COMPACT_ROWS", 2)
    for rank in (0, 1):
        write_stored(tmp_path / "a", steps=7, rank=rank, sealed=sealed)
    trace = replay.open(tmp_path / "a")

    parts = list(trace.record_parts())
    trace.select(steps=slice(1, 5)).to_parquet(tmp_path / "some.parquet")
    trace.select(steps=slice(50, 60)).to_parquet(tmp_path / "none.parquet")

    assert len(parts) > 6
    assert pa.concat_tables(parts).to_pylist() == trace.records().to_pylist()
    some = pq.read_table(tmp_path / "some.parquet").to_pylist()
    assert [(row["rank"], row["step"], row["l2"]) for row in some] == [
        (rank, step, step + 0.5) for rank in (0, 1) for step in range(1, 5) for _ in range(3)
    ]
    none = pq.read_table(tmp_path / "none.parquet")
    assert len(none) == 0
    assert none.column_names == trace.records().column_names
