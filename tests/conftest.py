"""What several files of tests ask for."""

import signal
import threading

import pytest
import torch

from hookrec import client, control, plan, recorder
from tests.writer_in_process import WriterInProcess

# A shell starts what it puts in the background with SIGINT ignored, and so would be what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The memory of a ring is taken when a recording begins: of half a gigabyte, that is half a second of a core each time.
for function in (recorder.attach, plan.plan_of):
    function.__kwdefaults__["ring"] = "64MB"

_LONGEST = ("workloads", "recording", "flight", "restart", "faults", "daemon", "disks", "control", "schedules", "run")


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, lest one is left to the end; skip what needs a GPU that is not there."""
    longest = {f"test_{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: longest.get(item.path.name, len(longest)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture
def one_thread():
    """One thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def deterministic(one_thread):
    """One thread, and none but deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_process(monkeypatch):
    """Writers that are no processes, so that a small recording takes milliseconds."""
    monkeypatch.setattr(recorder, "WriterProcess", WriterInProcess)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sockets of their own for one test."""
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(client, "folders", lambda: [runtime / "hookrec"])  # not those of other runs of these tests
    yield runtime / "hookrec"
    for thread in threading.enumerate():
        if thread.name == "hookrec-detach":
            thread.join()  # a trace that was let go from outside is still being sealed, and its folder is removed next
    control._listener.close()
