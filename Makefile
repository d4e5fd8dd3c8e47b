# Everything sets itself up in .venv; nothing else is needed but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv

.PHONY: test

$(VENV)/ready: pyproject.toml constraints.txt hatch_build.py hookrec/native/capture.c
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[torch,pandas,xarray]' pytest pytest-timeout tensorstore polars
	touch $@

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -q
