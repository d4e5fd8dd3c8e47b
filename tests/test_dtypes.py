"""Each dtype of the format goes from a module through each store to a reader, to the byte."""

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from torch import nn

import hookrec
import hookrec.recorder
import replay
from replay.format import DTYPES, ML_DTYPES
from replay.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread", "no_process")

BYTES = torch.arange(256, dtype=torch.uint8)
"""In the floats of a byte: each value that there is, every NaN too."""


def tensor_of(name: str) -> torch.Tensor:
    if name == "bool":
        return BYTES.remainder(2).bool()
    return BYTES.view(getattr(torch, name))


def layers() -> nn.Module:
    """A layer for each dtype, of its name, which a module may have as an attribute already."""
    model = nn.Module()
    model._modules.update({name: nn.Identity() for name in sorted(DTYPES)})
    return model


@pytest.mark.parametrize(
    ("store", "compression"), [("zarr", None), ("zarr", "zstd"), ("hdf5", None), ("hdf5", "zstd"), ("hdf5", "blosc")]
)
def test_each_dtype_comes_back_from_each_store(tmp_path, store, compression):
    model = layers()

    with hookrec.attach(model, tmp_path / "a", store=store, compression=compression, clock="manual", keep_free=0):
        for name, layer in model._modules.items():
            layer(tensor_of(name))
            layer(tensor_of(name).reshape(2, -1))

    trace = replay.open(tmp_path / "a")
    assert trace.layers == sorted(DTYPES)
    for name in DTYPES:
        wanted = np.dtype(getattr(ml_dtypes, name) if name in ML_DTYPES else name)
        for call in (0, 1):
            found = trace.tensor(0, name, call=call)
            assert found.dtype == wanted
            assert found.tobytes() == tensor_of(name).view(torch.uint8).numpy().tobytes()
    assert list(verify(tmp_path / "a")) == []


def test_zarr_opens_what_it_knows_of_a_trace_with_dtypes_that_it_has_not(tmp_path):
    model = layers()
    with hookrec.attach(model, tmp_path / "a", clock="manual", keep_free=0):
        for name, layer in model._modules.items():
            layer(tensor_of(name))

    root = zarr.open_group(tmp_path / "a/rank-00000/tensors.zarr", mode="r")

    assert sorted(root.group_keys()) == sorted(DTYPES)
    for name in set(DTYPES) - set(ML_DTYPES):
        data = root[name]["output"]["data"]
        assert data.dtype == np.dtype(name)
        assert data[0].tobytes() == tensor_of(name).view(torch.uint8).numpy().tobytes()
