"""`docs/files.md`: what it shows is run, on a trace in each store."""

import re
from pathlib import Path

import numpy as np

from tests.stored import write_stored

PAGE = Path(__file__).parents[1] / "docs" / "files.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_each_block_of_the_page_reads_what_was_written(tmp_path, monkeypatch):
    tensors = write_stored(tmp_path / "runs/zarr")
    assert write_stored(tmp_path / "runs/hdf5", "hdf5") == tensors
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    seen = []

    for block in BLOCKS:
        names.pop("last", None)
        exec(block, names)  # the page is ours
        if "last" in names:
            assert np.asarray(names["last"]).tobytes() == tensors[5, "0"]
            assert names["steps"].tolist() == [0, 2, 3, 4, 5]
            seen.append(type(names["data"]).__module__)

    assert len(seen) == 2
    assert names["at_step_3"].tobytes() == tensors[3, "0"]
    assert names["records"]["step"].to_pylist() == [step for step in range(6) for _ in range(3)]
