"""`replay.check` names the trouble of each sick training of `examples/sick`, and says nothing of its healthy twin."""

import math
import re

import pytest

import replay
from examples.sick import AILMENTS
from examples.sick.training import one_thread

# Four of the healthy twins are one and the same training, two more are another: one of each is enough, and with few
# seconds to spend, the kinds of models and loops that differ most.
HEALTHY = ("dead_relus", "vanishing", "log_of_zero", "half_underflow", "wrong_tying", "random_labels", "diverging_rank")


@pytest.mark.parametrize("name", AILMENTS)
def test_the_first_finding_is_the_trouble(name, tmp_path):
    assert_found_first(name, tmp_path / "trace", seed=0)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_training(name, tmp_path):
    assert_nothing_found(name, tmp_path / "trace", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", AILMENTS)
def test_it_is_no_luck(name, seed, tmp_path):
    assert_found_first(name, tmp_path / "sick", seed)
    assert_nothing_found(name, tmp_path / "healthy", seed)


def assert_found_first(name, path, seed):
    ailment = AILMENTS[name]

    with one_thread():
        losses = ailment.train(path, sick=True, seed=seed)
    findings = replay.check(replay.open(path))

    step = ailment.step
    if name == "log_of_zero":
        step = next(number for number, loss in enumerate(losses) if not math.isfinite(loss))
    elif name == "random_labels":
        step = 240 - 240 // 5  # where the last fifth begins
    assert all(re.search(r"steps? \d", finding.message) for finding in findings)
    found = [(finding.rule, finding.layer, finding.first_step) for finding in findings]
    assert found[0] == (ailment.rule, ailment.layer, step), found


def assert_nothing_found(name, path, seed):
    with one_thread():
        AILMENTS[name].train(path, sick=False, seed=seed)

    assert replay.check(replay.open(path)) == []
