"""`docs/integrations.md`: its scripts run as they stand, and record what the page says."""

import importlib
import re
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
