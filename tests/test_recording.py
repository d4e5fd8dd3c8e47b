"""Records are what flowed through the layers, and the training is what it was without a recorder."""

import copy
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (it registers filters)
import numpy as np
import pytest
import torch
import zarr
from torch import nn
from torch.nn import functional

import hookrec
import replay
from hookrec.statistics import FIELDS, STATISTICS, describe
from replay.verify import verify
from tests.oracle import Oracle, differences, leaves, recorded
from tests.samples import SAMPLES, convolutional, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "how", [{}, {"store": "hdf5"}, {"compression": "zstd"}, {"store": "hdf5", "compression": "blosc"}]
)
@pytest.mark.parametrize("make", SAMPLES)
def test_each_record_is_bit_for_bit_what_a_clone_holds(tmp_path, make, how):
    model, twin = make(), make()
    oracle = Oracle(leaves(twin))

    with hookrec.attach(model, tmp_path / "a", keep_free=0, **how):
        train(model, SAMPLES[make], 3)

    train(twin, SAMPLES[make], 3, oracle)
    trace = replay.open(tmp_path / "a")
    assert trace.status == "sealed"
    assert trace.steps == [0, 1, 2]
    assert len(oracle.records) == 3 * 2 * len(leaves(twin))
    assert differences(recorded(trace), oracle.records) == []


def test_a_module_that_is_replaced_within_a_step_numbers_its_calls_on(tmp_path):
    class Double(nn.Module):
        def forward(self, x):
            return x * 2.0

    model = nn.Sequential(nn.Linear(3, 3), Double())
    kinds = ("output", "grad_output", "param", "param_grad_acc")
    weights = {}
    with hookrec.attach(model, tmp_path / "a", clock="manual", ops="mul", kinds=kinds, keep_free=0) as rec:
        for step in range(2):
            for call in range(3):
                model[0], model[1] = nn.Linear(3, 3), Double()
                weights[step, call] = model[0].weight.detach().clone()
                model(torch.eye(3)).sum().backward()
            rec.step()

    trace = replay.open(tmp_path / "a")
    rows = trace.records(kinds=kinds[:2]).to_pylist()
    assert sorted((row["step"], row["layer"], row["kind"], row["call"], row["micro"]) for row in rows) == sorted(
        (step, layer, kind, call, call)
        for step in range(2)
        for layer in ("0", "1", "1/mul#0")
        for kind in kinds[:2]
        for call in range(3)
    )
    for (step, call), weight in weights.items():
        doubled = trace.tensor(step, "1", call=call) - 2 * trace.tensor(step, "0", call=call)
        assert not doubled.any()
        bias = trace.tensor(step, "0", call=call) - weight.T.numpy()
        np.testing.assert_allclose(bias, np.tile(bias[0], (3, 1)), atol=1e-6)
        assert trace.tensor(step, "0", "param_grad_acc", call=call, path="bias").tolist() == [6.0] * 3
    of_weight = trace.records(kinds="param", where="path = 'weight'").to_pylist()
    assert [(row["step"], row["call"]) for row in of_weight] == [(0, 0), (1, 0)]


def padded(watching=None, lengths=range(1, 41), store="zarr") -> nn.Module:
    """Train on sequences of other lengths each step, two in some, so that a layer is called with two shapes in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 600), nn.ReLU(inplace=True), nn.Linear(600, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if watching == "oracle":
        watching = Oracle(leaves(model))
    elif watching is not None:
        watching = hookrec.attach(model, watching, store=store, keep_free=0)
    for length in lengths:
        optimizer.zero_grad()
        for n in (length, 2 * length) if length % 3 == 0 else (length,):
            model(torch.arange(2 * n).remainder(50).reshape(2, n)).pow(2).mean().backward()
        optimizer.step()
        if isinstance(watching, Oracle):
            watching.step()
    return watching


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_each_record_of_forty_lengths_is_what_a_clone_holds_live_and_sealed(tmp_path, store):
    """Tensors of a few bytes, packed ones and such of whole pages share a place."""
    oracle = padded("oracle")

    recorder = padded(tmp_path / "a", store=store)
    trace = replay.open(tmp_path / "a")
    deadline = time.monotonic() + 10
    while len(trace.refresh().steps) < 40 and time.monotonic() < deadline:
        time.sleep(0.02)
    live = trace.status, recorded(trace)
    recorder.detach()

    assert live[0] == "live"
    assert differences(live[1], oracle.records) == []
    assert differences(recorded(replay.open(tmp_path / "a")), oracle.records) == []


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_forty_lengths_make_less_than_four_times_the_files_of_one(tmp_path, store):
    padded(tmp_path / "one", [20] * 40, store).detach()
    padded(tmp_path / "forty", store=store).detach()

    one, forty = (sum(1 for _ in (tmp_path / name).rglob("*")) for name in ("one", "forty"))

    assert one <= forty < 4 * one


def test_h5py_reads_tensors_of_many_shapes(tmp_path):
    padded(tmp_path / "a", store="hdf5").detach()
    trace = replay.open(tmp_path / "a")

    with h5py.File(tmp_path / "a/rank-00000/tensors.h5") as file:
        place = file["1/output~3"]
        records = trace.records("1", "output").select(["step", "call", "shape"]).to_pylist()
        assert place["data"].attrs["layer"] == "1"
        assert place["step"].size == len(records) - 2  # what came before it was shared has places of its own
        for i in range(place["step"].size):
            begin, numel, shape = place["begin"][i], place["numel"][i], place["shape"][i]
            tensor = place["data"][begin : begin + numel].reshape(shape)
            key = {"step": int(place["step"][i]), "call": int(place["call"][i])}
            assert np.array_equal(tensor, trace.tensor(layer="1", **key))


def test_zarr_python_reads_tensors_of_many_shapes(tmp_path):
    padded(tmp_path / "a").detach()
    trace = replay.open(tmp_path / "a")

    place = zarr.open_group(tmp_path / "a/rank-00000/tensors.zarr/1/output~3", mode="r")

    records = trace.records("1", "output").select(["step", "call", "shape"]).to_pylist()
    assert place["data"].attrs["layer"] == "1"
    assert place["step"].size == len(records) - 2  # what came before it was shared has places of its own
    for i in range(place["step"].size):
        begin, numel, shape = place["begin"][i], place["numel"][i], place["shape"][i]
        tensor = place["data"][begin : begin + numel].reshape(shape)
        key = {"step": int(place["step"][i]), "call": int(place["call"][i])}
        assert np.array_equal(tensor, trace.tensor(layer="1", **key))


@pytest.mark.parametrize("make", SAMPLES)
def test_losses_and_parameters_are_those_of_the_bare_run(tmp_path, make):
    bare, recorded = make(), make()
    losses = train(bare, SAMPLES[make], 20)

    with hookrec.attach(recorded, tmp_path / "a", keep_free=0) as rec:
        assert train(recorded, SAMPLES[make], 20, rec) == losses

    for one, other in zip(bare.parameters(), recorded.parameters(), strict=True):
        assert torch.equal(one, other)
    scalars = replay.open(tmp_path / "a").scalars().to_pylist()
    assert [row["value"] for row in scalars if row["name"] == "loss"] == losses
    assert [row["step"] for row in scalars if row["name"] == "loss"] == list(range(20))


def test_statistics_stay_right_where_float32_sums_would_not(tmp_path):
    class Fixed(nn.Module):
        def forward(self, x):
            return x

    values = torch.randn(50_000, dtype=torch.float64)
    hard = {
        "spread": (values * 0.1 + 1e6).float(),
        "halves": (values * 1e4).half(),
        "brains": (values * 1e30).bfloat16(),
        "huge": values * 1e200,
        "odd": torch.tensor([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0, -3.0]),
    }
    model = nn.ModuleDict({name: Fixed() for name in hard})

    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        for name, tensor in hard.items():
            model[name](tensor)

    for row in replay.open(tmp_path / "a").records().to_pylist():
        x = hard[row["layer"]].double().numpy()
        finite = x[np.isfinite(x)]
        scale = np.abs(finite).max()
        assert row["n_nan"] == np.isnan(x).sum()
        assert row["n_posinf"] == np.isposinf(x).sum()
        assert row["n_neginf"] == np.isneginf(x).sum()
        assert row["n_zero"] == (x == 0).sum()
        assert (row["min"], row["max"], row["absmax"]) == (finite.min(), finite.max(), scale)
        assert row["mean"] == pytest.approx(finite.mean(), rel=1e-4)
        assert row["std"] == pytest.approx((finite / scale).std() * scale, rel=1e-4)
        assert row["l2"] == pytest.approx(np.sqrt(((finite / scale) ** 2).sum()) * scale, rel=1e-4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("values", [[np.nan] * 3, [np.inf, -np.inf, np.nan], [np.nan] * 40_000, []])
def test_what_has_no_finite_element_has_no_size(native, dtype, values):
    found = dict(zip(FIELDS, STATISTICS.unpack(describe(torch.tensor(values).to(dtype), native=native)), strict=True))

    assert found["numel"] == len(values)
    assert all(np.isnan(found[name]) for name in FIELDS[5:]), found


def test_a_layer_that_is_nan_is_not_taken_for_a_dead_one(tmp_path):
    model = nn.ModuleDict({"nan": nn.Identity(), "dead": nn.Identity(), "complex": nn.Identity()})

    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        model["nan"](torch.full((3,), np.nan))
        model["dead"](torch.zeros(3))
        model["complex"](torch.full((3,), complex(np.nan, 0)))

    trace = replay.open(tmp_path / "a")
    assert trace.records(where="l2 = 0")["layer"].to_pylist() == ["dead"]
    assert trace.records(where="l2 < 1e-6")["layer"].to_pylist() == ["dead"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8])
@pytest.mark.parametrize("numel", [32_769, 2_097_152, 2_400_001])
def test_statistics_do_not_depend_on_the_number_of_threads(dtype, numel):
    """The kernel shares a large tensor out among threads; the same one is described by plain torch for comparison."""
    torch.manual_seed(0)
    values = (torch.randn(numel) * 3 + torch.linspace(0, 100, numel)).to(dtype)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(describe(values))
    finally:
        torch.set_num_threads(threads)

    assert found[0] == found[1] == found[2]
    np.testing.assert_allclose(
        STATISTICS.unpack(found[0]), STATISTICS.unpack(describe(values, native=False)), rtol=1e-9
    )


KILLED = """
import sys, torch, hookrec
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.0)
hookrec.attach(model, sys.argv[1], store=sys.argv[2], compression=sys.argv[4] or None, keep_free=0)
step = 0
while True:
    optimizer.zero_grad()
    rows = 32 if sys.argv[3] == "one" else 32 + step % 50
    model(torch.full((rows, 64), float(step))).sum().backward()
    optimizer.step()
    print(step, flush=True)
    step += 1
"""


_MOMENTS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 50))]


@pytest.mark.parametrize(("store", "shapes"), [("zarr", "one"), ("hdf5", "one"), ("zarr", "many")])
@pytest.mark.parametrize("seed", _MOMENTS)
def test_a_killed_training_leaves_each_step_whole(tmp_path, seed, store, shapes):
    _kill(tmp_path / "a", seed, store, shapes)


@pytest.mark.parametrize("seed", _MOMENTS[3:])
def test_a_killed_training_leaves_hdf5_of_compressed_steps(tmp_path, seed):
    _kill(tmp_path / "a", seed, "hdf5", "one", "zstd")

    assert list(verify(tmp_path / "a")) == []
    last = replay.open(tmp_path / "a").steps[-1]
    with h5py.File(tmp_path / "a/rank-00000/tensors.h5") as file:
        assert file["2/grad_output/step"][-1] == last
        assert (file["2/grad_output/data"][-1] == 1).all()


def _kill(trace_path, seed: int, store: str, shapes: str, compression: str = "") -> None:
    command = [sys.executable, "-c", KILLED, str(trace_path), store, shapes, compression]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(float(np.random.default_rng(seed).uniform(0.01, 0.5)))
    process.send_signal(signal.SIGKILL)
    printed = [int(line) for line in process.stdout if line.strip().isdigit()]
    process.stdout.close()
    process.wait()

    deadline = time.monotonic() + 20
    while replay.open(trace_path).status == "live" and time.monotonic() < deadline:
        time.sleep(0.05)

    trace = replay.open(trace_path)
    assert trace.status == "sealed"
    assert trace.endings[0]["how"] == "died"
    assert trace.steps == list(range(len(trace.steps)))
    assert trace.steps[-1] >= max(printed, default=0)
    for step in trace.steps[:: max(1, len(trace.steps) // 50)] + trace.steps[-1:]:
        assert len(trace.records(steps=step)) == 6
        assert np.all(trace.tensor(step, "2", "grad_output") == 1)
        assert np.all(trace.tensor(step, "0", "grad_output")[0] == trace.tensor(step, "0", "grad_output")[31])


def test_steps_between_sampled_ones_have_no_hook(tmp_path):
    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", every=3, keep_free=0):
        assert len(model[0]._forward_hooks) == 1
        train(model, SAMPLES[convolutional], 1)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        train(model, SAMPLES[convolutional], 4)

    assert replay.open(tmp_path / "a").steps == [0, 3]


def test_detach_leaves_the_model_as_it_was_and_may_be_repeated(tmp_path):
    model = convolutional()
    rec = hookrec.attach(model, tmp_path / "a", keep_free=0)
    train(model, SAMPLES[convolutional], 1)

    rec.detach()
    rec.detach()

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(hookrec.DetachedError, match="after detach"):
        rec.step()


def test_copies_and_pickles_carry_nothing_of_ours(tmp_path):
    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        twin = copy.deepcopy(model)
        twin(torch.randn(4, 1, 8, 8))
        file = io.BytesIO()
        torch.save(model, file)

    assert b"hookrec" not in file.getvalue()
    assert replay.open(tmp_path / "a").steps == []


def test_a_step_larger_than_the_ring_is_recorded_in_parts(tmp_path):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with hookrec.attach(model, tmp_path / "a", ring="1MiB", keep_free=0):
        train(model, (512, 256), 2)

    trace = replay.open(tmp_path / "a")
    assert trace.records()["kept"].to_pylist() == [True] * 32
    assert trace.tensor(1, "7", "grad_output").shape == (512, 256)


def test_the_death_of_the_writer_does_not_end_the_training(tmp_path):
    model = convolutional()
    bare = train(convolutional(), SAMPLES[convolutional], 4)
    rec = hookrec.attach(model, tmp_path / "a", keep_free=0, restart=0)
    os.kill(rec._recording._writer._process.pid, signal.SIGKILL)
    rec._recording._writer._process.wait()

    with pytest.warns(hookrec.HookrecWarning) as warned:
        losses = train(model, SAMPLES[convolutional], 4)
        rec.detach()

    assert losses == bare
    assert "the training goes on" in str(warned[0].message)


def test_gradient_accumulation_counts_calls_and_micro_batches(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookrec.attach(model, tmp_path / "a", keep_free=0):
        for _ in range(2):
            for _ in range(3):
                functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
            optimizer.step()

    rows = replay.open(tmp_path / "a").records(kinds="grad_output").to_pylist()
    assert [(row["step"], row["call"], row["micro"]) for row in rows] == [(s, m, m) for s in (0, 1) for m in (0, 1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": "conv*"}, "matches none of the 6 leaf modules"),
        ({"kinds": "weights"}, "There is no kind 'weights'; there are 'output', 'grad_output'"),
        ({"ring": "many"}, "is no size"),
        ({"every": 0}, "every is 0"),
        ({"clock": "loss"}, "There is no clock 'loss'"),
        ({"store": "csv"}, "There is no store 'csv'"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_made(tmp_path, arguments, message):
    with pytest.raises(hookrec.AttachError, match=message):
        hookrec.attach(convolutional(), tmp_path / "a", **arguments)

    assert not (tmp_path / "a").exists()


def test_an_existing_trace_or_file_is_not_overwritten(tmp_path):
    model = convolutional()
    hookrec.attach(model, tmp_path / "a", keep_free=0).detach()
    (tmp_path / "file").write_text("mine")

    with pytest.raises(hookrec.AttachError, match="holds a trace already"):
        hookrec.attach(model, tmp_path / "a")
    with pytest.raises(hookrec.AttachError, match="is a file"):
        hookrec.attach(model, tmp_path / "file")


def test_two_recorders_on_one_model_are_refused(tmp_path):
    model = convolutional()
    with hookrec.attach(model, tmp_path / "a", keep_free=0), pytest.raises(hookrec.AttachError, match="already"):
        hookrec.attach(model, tmp_path / "b")


def test_the_training_process_never_imports_replay(tmp_path):
    (tmp_path / "replay.py").write_text("raise RuntimeError('the user has a module of this name')")
    code = (
        "import sys, torch, hookrec; m = torch.nn.Linear(2, 2)\n"
        "with hookrec.attach(m, 'a', clock='manual', keep_free=0): m(torch.ones(1, 2))\n"
        "assert 'replay' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert replay.open(Path(tmp_path) / "a").steps == [0]


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
def test_the_writer_process_loads_neither_torch_nor_pandas(tmp_path, store):
    pytest.importorskip("pandas")
    model = nn.Linear(1, 1)
    with hookrec.attach(model, tmp_path / "a", clock="manual", store=store, keep_free=0) as recorder:
        writer = recorder._recording._writer._process.pid
        model(torch.ones(1, 1))
        recorder.step()
        while not len(replay.open(tmp_path / "a").steps):
            time.sleep(0.001)
        loaded = Path(f"/proc/{writer}/maps").read_text()

    assert "/numpy/" in loaded
    assert "/torch/" not in loaded
    assert "/pandas/" not in loaded


@pytest.mark.parametrize("native", ["1", "0"])
def test_checksums_of_the_kernel_and_of_the_writer_are_those_of_the_bytes(tmp_path, native):
    """The sizes lie around the borders of the kernel's blocks, of what its checksum interleaves and joins."""
    code = """
import sys, torch, hookrec
torch.manual_seed(0)
model = torch.nn.ModuleDict({str(n): torch.nn.Identity() for n in map(int, sys.argv[2:])})
with hookrec.attach(model, sys.argv[1], clock="manual", kinds="output", keep_free=0):
    for name, layer in model.items():
        layer(torch.randint(0, 256, (int(name),), dtype=torch.uint8))
        layer(torch.randn(int(name), 2).t())
"""
    sizes = ["1", "7", "8", "1023", "1024", "1025", "4032", "4033", "100003", "2097152", "3000001"]
    environment = {**os.environ, "HOOKREC_NATIVE": native}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), *sizes], env=environment, check=True)

    trace = replay.open(tmp_path / "a")
    assert len(trace.records()) == 2 * len(sizes)
    for size in sizes:
        for call in (0, 1):
            # tensor() compares what it reads with the checksum in the log, by another implementation of CRC-32C
            trace.tensor(0, size, call=call)
