"""How the writer process finds our packages and nobody else's.

It runs in the environment of the training, whose folders may hold a `replay.py` or a `schemas.py` of the user's.
`python -P` keeps the current folder out of the path, but `PYTHONPATH` stays; so the two packages are loaded by their
places, next to this file, before anything is imported by name.
"""

import importlib.util
import sys
from pathlib import Path


def _load(name: str) -> None:
    place = Path(__file__).resolve().parent.parent / name / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _load("hookrec")
    _load("replay")
    from hookrec.writer_main import main

    sys.exit(main(*map(int, sys.argv[1:])))
