"""What is a rank of a trace, and what only looks like one, is the same to each reader."""

import shutil

import replay
from replay.catalog import entry_of
from replay.follow import Follower
from replay.ranks import name_of, ranks_of
from replay.verify import verify
from tests.stored import SHAPES, write_stored


def test_what_is_named_after_a_rank_is_none(tmp_path):
    path = tmp_path / "a"
    write_stored(path)
    for name in ("rank-00000.partial", "rank-00001 (copy)", "rank-0²", "rank-"):
        shutil.copytree(path / "rank-00000", path / name)
    (path / "rank-00002").touch()

    assert replay.open(path).ranks == [0]
    assert entry_of(path, tmp_path).records == 6 * len(SHAPES)
    assert sum(len(records) for records in Follower(path).read()) == 6 * len(SHAPES)
    assert list(verify(path)) == []


def test_ranks_are_in_order_of_their_numbers_also_past_five_digits(tmp_path):
    for number in (100_000, 7, 20_000):
        (tmp_path / name_of(number)).mkdir()

    assert [(number, path.name) for number, path in ranks_of(tmp_path).items()] == [
        (7, "rank-00007"),
        (20_000, "rank-20000"),
        (100_000, "rank-100000"),
    ]
