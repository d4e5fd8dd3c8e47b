"""How much memory may be taken: by files as the kernel writes them."""

from pathlib import Path

import pytest
from torch import nn

import hookrec
from hookrec.available import available_bytes

MEMINFO = "MemTotal:       24689540 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n"


@pytest.fixture
def machine(tmp_path):
    def write(files: dict[str, str]) -> dict[str, Path]:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return {"proc": tmp_path / "proc", "groups": tmp_path / "groups"}

    return write


def test_of_a_system_without_groups_it_is_what_the_system_says(machine):
    assert available_bytes(**machine({})) == 1_024_000
    assert available_bytes(**machine({"proc/self/cgroup": "not what was expected\n"})) == 1_024_000


def test_where_nobody_says_it_is_not_known(tmp_path):
    assert available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize("of", ["job", "job/step", "."])
def test_of_groups_of_version_two_it_is_what_the_smallest_around_us_has_left(machine, of):
    limits = {"job": "900000\n", "job/step": "max\n", ".": "max\n", of: "300000\n"}
    files = {f"groups/{name}/memory.max": limit for name, limit in limits.items()}
    files |= {f"groups/{name}/memory.current": "200000\n" for name in limits}
    files |= {f"groups/{of}/memory.stat": "anon 150000\nfile 40000\ninactive_file 30000\nactive_file 10000\n"}

    assert available_bytes(**machine({"proc/self/cgroup": "0::/job/step\n", **files})) == 130_000


def test_of_groups_of_version_one_it_is_what_is_left_of_the_limit(machine):
    group = "groups/memory/job"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": "500000\n",
        f"{group}/memory.usage_in_bytes": "450000\n",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\n",
    }

    assert available_bytes(**machine(files)) == 70_000


def test_in_a_container_whose_own_name_is_not_there_the_root_counts(machine):
    files = {
        "proc/self/cgroup": "0::/../../docker/abc\n",
        "groups/memory.max": "250000\n",
        "groups/memory.current": "260000\n",
    }

    assert available_bytes(**machine(files)) == 0


def test_a_ring_that_is_larger_than_what_is_left_is_refused_before_it_is_populated(tmp_path):
    available = available_bytes()
    assert available is not None

    with pytest.raises(hookrec.AttachError, match=r"bytes of memory are available.*ring='64MB'"):
        hookrec.attach(nn.Linear(2, 2), tmp_path / "a", ring=available + 2**30, keep_free=0)
    assert not (tmp_path / "a").exists()
