"""`docs/integrations.md`: its scripts run as they stand, and record what the page says."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import replay

PAGE = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
SECTIONS = re.split(r"^## (\w+)\n", PAGE, flags=re.MULTILINE)[1:]
SCRIPTS = dict(zip(SECTIONS[::2], SECTIONS[1::2], strict=False))
WANTED = {
    "transformers": ("transformers", {"loss", "eval_loss", "grad_norm", "learning_rate"}, 4),
    "Lightning": ("lightning", {"loss"}, 8),
    "Accelerate": ("accelerate", {"loss"}, 4),
    "Ignite": ("ignite", {"loss", "mse"}, 8),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("transformers", "Accelerate")]


@pytest.mark.parametrize("section", ["Lightning", "Ignite", *SLOW])
def test_a_script_of_the_page_records_its_training(tmp_path, monkeypatch, section):
    library, names, steps = WANTED[section]
    pytest.importorskip(library)
    importlib.import_module(f"hookrec.integrations.{library}")
    (script,) = re.findall(r"```python\n(.*?)```", SCRIPTS[section], re.DOTALL)
    monkeypatch.chdir(tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, of small things that a script for a page leaves as they are
        exec(compile(script, section, "exec"), {"__name__": "__main__"})

    trace = replay.open(f"runs/{library}")
    assert trace.endings[0]["how"] == "detached"
    assert trace.steps == list(range(steps))
    assert names <= set(trace.scalars()["name"].to_pylist())
    assert set(trace.records()["mode"].to_pylist()) == {"train"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "one", "two", "steps"),
    [
        ("transformers", "use_cpu=True", 'use_cpu=True, ddp_backend="gloo"', 4),
        ("Lightning", 'accelerator="cpu"', 'accelerator="cpu", devices=2, strategy="ddp"', 4),
        ("Accelerate", "", "", 2),
    ],
)
def test_a_script_of_the_page_records_two_ranks_into_one_trace(tmp_path, section, one, two, steps):
    library = WANTED[section][0]
    pytest.importorskip(library)
    (script,) = re.findall(r"```python\n(.*?)```", SCRIPTS[section], re.DOTALL)
    (tmp_path / "it.py").write_text(script.replace(one, two) if one else script)
    launch = [] if section == "Lightning" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    ended = subprocess.run(
        [sys.executable, *launch, "it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )

    assert ended.returncode == 0, ended.stderr
    trace = replay.open(tmp_path / "runs" / library)
    assert (trace.ranks, trace.steps) == ([0, 1], list(range(steps)))
    assert {end["how"] for end in trace.endings.values()} == {"detached"}
