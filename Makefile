# Everything sets itself up in .venv; nothing else is needed but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv

# Bytecode is kept, since the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench check demo docs gpu test test-slow

$(VENV)/ready: pyproject.toml constraints.txt hatch_build.py hookrec/native/capture.c
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/ready
	$(VENV)/bin/python -m pytest -q -m "slow or not slow"

demo: $(VENV)/ready
	rm -rf runs/demo
	$(VENV)/bin/python examples/digits.py runs/demo
	$(VENV)/bin/replay info runs/demo/sigmoid

docs: $(VENV)/ready
	$(VENV)/bin/python docs/answers.py

check: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/ready
	$(VENV)/bin/python -m benchmarks

# On a machine with a GPU, with a torch of its own that has CUDA.
gpu:
	$(PYTHON) -m benchmarks.gpu
