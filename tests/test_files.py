"""`docs/files.md`: its scripts are run as they stand, each by itself, where nothing of ours can be imported."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replay.format import CODECS
from tests.handwritten import Written, write_trace
from tests.stored import write_stored

PAGE = Path(__file__).parents[1] / "docs" / "files.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
WITHOUT_OURS = """
import sys
sys.modules["replay"] = sys.modules["hookrec"] = None
"""


def said(script: str, expression: str, directory: Path) -> str:
    """What a script of the page leaves behind, told by a process that cannot import our code."""
    code = f"{WITHOUT_OURS}{script}\nprint({expression})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def only_script(of: str, having: str) -> str:
    (script,) = [script for script in SCRIPTS if f"import {of}\n\n" in script and having in script]
    return script


@pytest.mark.parametrize(("library", "store"), [("h5py", "hdf5"), ("zarr", "zarr"), ("xarray", "zarr")])
def test_the_scripts_read_a_tensor_by_layer_and_step_without_our_code(tmp_path, library, store):
    tensors = write_stored(tmp_path / "runs" / store, store)

    assert said(only_script(library, "tensor ="), "tensor.tobytes().hex()", tmp_path) == tensors[3, "0"].hex()


@pytest.mark.parametrize("codec", CODECS)
def test_h5py_reads_a_compressed_tensor_by_the_filters_of_a_plugin(tmp_path, codec):
    tensors = write_stored(tmp_path / "runs/compressed", "hdf5", codec)

    found = said(only_script("hdf5plugin", "tensor ="), "tensor.tobytes().hex()", tmp_path)

    assert found == tensors[3, "0"].hex()


def test_zarr_reads_a_tensor_of_many_shapes(tmp_path):
    tensors = [np.full((2, 1 + step), step, np.float32) for step in range(5)]
    write_trace(tmp_path / "runs/zarr", *(Written("0", tensor, step) for step, tensor in enumerate(tensors)))

    found = said(only_script("zarr", "values ="), "values.tolist()", tmp_path)

    assert eval(found) == tensors[3].tolist()


def test_h5py_shows_each_stream_by_the_name_of_its_layer(tmp_path):
    write_stored(tmp_path / "runs/hdf5", "hdf5")

    assert eval(said(only_script("h5py", "visititems"), "ascii(names)", tmp_path)) == {
        "0/output/data": ("0", "output", (5, 40)),
        "blocks.0%2Fadd#1/output/data": ("blocks.0/add#1", "output", (5, 3, 7)),
        "层/output/data": ("层", "output", (5,)),
    }


@pytest.mark.skipif(shutil.which("h5ls") is None, reason="HDF5's tools are not installed")
def test_h5ls_lists_the_streams_as_the_page_shows(tmp_path):
    write_stored(tmp_path / "runs/hdf5", "hdf5")
    shown = re.search(r"\$ h5ls (.*)\n((?:/.*\n)+)", PAGE.read_text())

    listed = subprocess.run(["h5ls", *shown[1].split()], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert set(shown[2].splitlines()) <= set(listed.stdout.splitlines())


def test_the_statistics_are_a_table(tmp_path):
    write_stored(tmp_path / "runs/zarr")

    steps = said(only_script("pyarrow.parquet", "records"), "records['step'].to_pylist()", tmp_path)

    assert eval(steps) == [step for step in range(6) for _ in range(3)]
