"""Files that were cut off or changed are read right, or named: no wrong value, crash, hang or huge allocation."""

import subprocess
import sys

import pytest

from replay.errors import TraceDamaged
from replay.files import Files
from replay.format import parsed
from tests.damage import TARGETS


def _attack(inputs: int, *targets: str) -> None:
    command = [sys.executable, "-m", "tests.damage", "--inputs", str(inputs), *targets]
    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("inputs: ") == (len(targets) or len(TARGETS))


def test_a_damaged_file_is_read_right_or_named():
    _attack(50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_a_file_damaged_in_any_of_many_ways_is_read_right_or_named(target):
    _attack(100_000, target)


def test_no_memory_is_taken_for_bytes_that_are_not_there(tmp_path):
    (tmp_path / "shard").write_bytes(b"abc")

    with pytest.raises(TraceDamaged, match="too short: 4611686018427387904 bytes were committed at 1, 2 are there"):
        Files(0).read(tmp_path / "shard", 1, 1 << 62)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_text_that_is_nested_too_deeply_is_no_json(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed(text)
