"""Each case of trouble with hooks is recorded as its replica says, and the training stays what it is."""

import importlib
from pathlib import Path

import pytest

import hookrec.recorder
from tests.hookcases.case import CASES, judge
from tests.writer_in_process import WriterInProcess

for file in sorted(Path(__file__).with_name("hookcases").glob("[a-z]*.py")):
    importlib.import_module(f"tests.hookcases.{file.stem}")

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("store", ["zarr", "hdf5"])
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_recorded_as_its_replica_says(tmp_path, monkeypatch, name, store):
    monkeypatch.setattr(hookrec.recorder, "WriterProcess", WriterInProcess)

    assert judge(CASES[name], tmp_path / "a", store) == []
