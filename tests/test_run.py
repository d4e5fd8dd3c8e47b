"""Scripts under `hookrec run` print what they print without it, end as they do, and are recorded."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import replay

SCRIPTS = Path(__file__).parent / "scripts"
HOOKREC = [sys.executable, "-m", "hookrec"]


def run(command, **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    more = {"env": environment, "cwd": SCRIPTS, "timeout": 150, **more}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)


def both(tmp_path, *script, options=()) -> tuple[subprocess.CompletedProcess, replay.Trace]:
    """Run a script bare and recorded; see that it is the same."""
    bare = run([sys.executable, *script])
    recorded = run([*HOOKREC, "run", "-o", tmp_path / "a", *options, *script])
    assert recorded.stdout == bare.stdout
    assert recorded.returncode == bare.returncode
    ours = [line for line in recorded.stderr.splitlines() if line.startswith("hookrec: ")]
    assert [line for line in recorded.stderr.splitlines() if line not in ours] == bare.stderr.splitlines()
    return recorded, replay.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise", 1), ("SIGINT", -2)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("", 0), ("exit", 3), ("words", 1), ("SIGTERM", -15))],
)
def test_a_script_ends_as_it_would_without_us(tmp_path, end, status):
    recorded, trace = both(tmp_path, "plain.py", *([end] if end else []))

    assert recorded.returncode == status
    assert trace.steps == [0, 1, 2, 3]
    assert trace.layers == ["0", "1", "2"]
    assert len(trace.records()) == 4 * 6
    assert "hookrec: step 0: 6 records and " in recorded.stderr
    if end != "SIGTERM":
        assert recorded.stderr.splitlines()[-1].startswith("hookrec: recorded 4 steps. Next: replay info ")
        how = "exception" if end in ("raise", "SIGINT") else "detached"
        assert trace.endings[0]["how"] == how


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_and_pickles_of_main_work(tmp_path, context):
    recorded, trace = both(tmp_path, "workers.py", "--lr", "0.05", "--context", context)

    assert "__main__.Net" in recorded.stdout
    assert trace.layers == ["body", "head"]
    assert trace.steps == [0, 1, 2, 3]


def test_several_models_are_told_apart_by_the_names_of_their_variables(tmp_path):
    _, trace = both(tmp_path, "gan.py")

    assert {layer.rpartition(".")[0] for layer in trace.layers} == {"generator", "discriminator"}
    assert trace.records("discriminator.0", "output", 0)["call"].to_pylist() == [0, 1]


@pytest.mark.slow
def test_models_of_an_agent_have_the_names_of_its_attributes(tmp_path):
    _, trace = both(tmp_path, "reinforce.py")

    assert trace.layers == ["policy.0", "policy.1", "policy.2", "value"]
    assert trace.records("policy.0", "output", 0)["call"].to_pylist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_a_model_that_is_compiled_after_its_optimizer_is_recorded(tmp_path, every):
    _, trace = both(tmp_path, "compiled.py", options=("--every", every))

    assert trace.steps == list(range(0, 4, every))
    assert trace.layers == ["0", "1", "2"]


@pytest.mark.slow
def test_the_trainer_of_transformers_is_recorded(tmp_path):
    pytest.importorskip("accelerate")
    bare = run([sys.executable, "trainer.py", tmp_path / "out"])
    recorded = run([*HOOKREC, "run", "-o", tmp_path / "a", "trainer.py", tmp_path / "out"])

    assert (recorded.returncode, bare.returncode) == (0, 0), recorded.stderr + bare.stderr
    assert re.sub("'train_[^,}]*|'total_flos[^,}]*", "", recorded.stdout) == re.sub(
        "'train_[^,}]*|'total_flos[^,}]*", "", bare.stdout
    )
    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 1, 2]
    assert "transformer.h.0.mlp.c_fc" in trace.layers


@pytest.mark.slow
def test_a_module_of_lightning_is_recorded(tmp_path):
    pytest.importorskip("lightning")
    recorded, trace = both(tmp_path, "lightning_module.py", tmp_path)

    assert trace.layers == ["0", "1", "2"]  # the outermost module that is called is `net`
    assert trace.records("2", "grad_output")["step"].to_pylist() == [step for step in range(8) for _ in range(2)]
    assert trace.steps == list(range(9))  # the last one is the validation after the training
    assert recorded.stdout.splitlines()[-1].endswith(" 8")
    micro = [row["micro"] for row in trace.records("0", "output", 1, where="mode = 'train'").to_pylist()]
    assert micro == [0, 1]


@pytest.mark.slow
def test_a_loop_with_accelerate_is_recorded(tmp_path):
    pytest.importorskip("accelerate")
    _, trace = both(tmp_path, "accelerated.py")

    assert trace.steps == [0, 1, 2, 3]
    assert trace.layers == ["0", "1", "2", "3"]
    assert len(trace.records()) == 8 * 4 * 2


@pytest.mark.slow
def test_an_engine_of_ignite_is_recorded(tmp_path):
    pytest.importorskip("ignite")
    _, trace = both(tmp_path, "ignite_engine.py")

    assert trace.layers == ["0", "1", "2"]
    assert trace.records("2", "grad_output")["step"].to_pylist() == list(range(8))
    assert trace.steps == list(range(9))  # the last one is the evaluation after the training


@pytest.mark.slow
def test_ranks_under_torchrun_record_into_one_trace(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    bare = run([*launch, "distributed.py"], env={**environment, "LOSSES": str(tmp_path / "bare")})
    command = [*launch, "-m", "hookrec", "run", "-o", tmp_path / "a", "distributed.py"]
    recorded = run(command, env={**environment, "LOSSES": str(tmp_path / "recorded")})

    assert (bare.returncode, recorded.returncode) == (0, 0), bare.stderr + recorded.stderr
    for rank in "01":
        assert (tmp_path / f"recorded{rank}").read_text() == (tmp_path / f"bare{rank}").read_text()
    trace = replay.open(tmp_path / "a")
    assert trace.ranks == [0, 1]
    assert trace.layers == ["0", "1", "2"]
    assert len(trace.records()) == 2 * 3 * 6


@pytest.mark.slow
def test_a_module_with_relative_imports_runs_by_m(tmp_path):
    _, trace = both(tmp_path, "-m", "package.train", "--lr", "1")

    assert trace.steps == [0]
    assert (trace.tensor(0, "", "output") >= 3 - 1).all()


@pytest.mark.slow
def test_a_folder_with_a_main_runs(tmp_path):
    (tmp_path / "folder").mkdir()
    shutil.copy(SCRIPTS / "gan.py", tmp_path / "folder/__main__.py")

    _, trace = both(tmp_path, tmp_path / "folder")

    assert "generator.0" in trace.layers


def test_a_script_beside_a_replay_of_its_own_gets_that(tmp_path):
    for name in ("replay", "click", "statistics", "errors"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    (tmp_path / "it.py").write_text("import replay, click, errors\nprint(replay.mine, click.mine, errors.mine)")

    recorded = run([*HOOKREC, "run", "-o", tmp_path / "a", "it.py"], cwd=tmp_path)

    assert recorded.stdout == "True True True\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print(1)", "never imported torch"),
        ("import torch\nprint(1)", "no torch optimizer was made"),
        ("import torch\ntorch.optim.SGD([torch.zeros(1, requires_grad=True)], 1)", "in no torch.nn.Module"),
        ("import torch\nm = torch.nn.Linear(1, 1)\ntorch.optim.SGD(m.parameters(), 1)", "no module was called"),
    ],
)
def test_where_nothing_was_recorded_the_last_line_says_why(tmp_path, text, why):
    (tmp_path / "it.py").write_text(text)

    recorded = run([*HOOKREC, "run", "-o", tmp_path / "a", tmp_path / "it.py"])
    quiet = run([*HOOKREC, "run", "-q", "-o", tmp_path / "a", tmp_path / "it.py"])

    assert recorded.returncode == quiet.returncode == 0
    assert recorded.stderr.startswith("hookrec: nothing was recorded: ")
    assert why in recorded.stderr
    assert quiet.stderr == ""
    assert not (tmp_path / "a").exists()


def test_a_syntax_error_looks_as_it_does_without_us(tmp_path):
    (tmp_path / "it.py").write_text("def\n")

    bare = run([sys.executable, tmp_path / "it.py"])
    recorded = run([*HOOKREC, "run", "-q", "-o", tmp_path / "a", tmp_path / "it.py"])

    assert (recorded.returncode, recorded.stderr) == (bare.returncode, bare.stderr)


@pytest.mark.slow
def test_a_layer_that_is_not_there_costs_the_recording_and_not_the_training(tmp_path):
    bare = run([sys.executable, "plain.py"])

    recorded = run([*HOOKREC, "run", "-o", tmp_path / "a", "--layers", "zz*", "plain.py"])

    assert recorded.stdout == bare.stdout
    assert recorded.returncode == 0
    assert recorded.stderr.count("hookrec: ") == 1
    assert "matches none of the 3 leaf modules" in recorded.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "{tmp}/a", "nowhere.py"], "There is no script nowhere.py"),
        (["plain.py"], "Say where to with -o DIR"),
        (["--idle", "--every", "2", "plain.py"], "takes no plan"),
        (["-o", "{tmp}/file", "plain.py"], "is a file"),
        (["-o", "{tmp}", "plain.py"], "is not empty"),
        (["-o", "{tmp}/a", "--kinds", "zz", "plain.py"], "There is no kind 'zz'"),
        (["-o", "{tmp}/a", "--plan", "{tmp}/none.toml", "plain.py"], "cannot be read"),
        (["-o", "{tmp}/a", "--plan", "{tmp}/file", "plain.py"], "did you mean 'layers'?"),
        (["-o", "{tmp}/a", "--nonsense", "plain.py"], "There is no option --nonsense"),
    ],
)
def test_what_can_be_known_before_is_refused_before(tmp_path, arguments, words):
    (tmp_path / "file").write_text("layer = 'a'")

    result = run([*HOOKREC, "run", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)])

    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_plan_may_come_from_a_file_and_the_command_line_adds_to_it(tmp_path):
    (tmp_path / "plan.toml").write_text("every = 3\ntensors = false\nlayers = ['0', '2']\n")

    run([*HOOKREC, "run", "-o", tmp_path / "a", "--plan", tmp_path / "plan.toml", "--every", "2", "plain.py"])

    trace = replay.open(tmp_path / "a")
    assert trace.steps == [0, 2]
    assert trace.layers == ["0", "2"]
    assert trace.nbytes == 0
