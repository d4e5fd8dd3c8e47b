"""The run of rules, users' own rules, and the command `replay check`."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import replay
from replay.check import examine
from replay.cli import main
from replay.rulebook import installed_rules, source_of
from replay.rules import RULES
from replay.series import median, sustained, usual
from tests.test_rules import steps
from tests.written import module, write_trace

DOCS = Path(__file__).parent.parent / "docs" / "check.md"

MY_RULE = '''
import numpy as np
import replay

@replay.rule(severity="error", advice="Lower it.")
def too_large(records, *, limit=1e3):
    """Outputs larger than `limit`."""
    grid = records.grid("output")
    large = grid["absmax"] > limit
    for n in np.flatnonzero(large.any(axis=0)):
        yield grid.seen(n, large[:, n], f"{grid.places[n]} has {grid['absmax'][:, n].max():.0f}.")
'''


@pytest.fixture
def sick(tmp_path):
    """A trace with an error late in layer b, and a warning early in layer a, and more of it in layer c."""
    relu = {"n_zero": lambda s: 100 if s > 3 else 0}
    records = {"layer": "a", **relu}, {"layer": "b", "n_nan": lambda s: int(s > 15)}, {"layer": "c", **relu}
    return write_trace(tmp_path / "sick", steps(20, *records), [module(n, "ReLU") for n in "abc"])


@pytest.fixture
def healthy(tmp_path):
    return write_trace(tmp_path / "healthy", steps(20, {"layer": "a"}))


@pytest.fixture
def my_rules(tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text(MY_RULE)
    return path


def run(*args):
    return CliRunner().invoke(main, ["check", *map(str, args)])


class TestFindings:
    def test_errors_come_first_then_what_came_first(self, sick):
        findings = replay.check(replay.open(sick))

        assert [(f.severity, f.layer, f.first_step) for f in findings] == [
            ("error", "b", 16),
            ("warning", "a", 4),
            ("warning", "c", 4),
        ]

    def test_since_asks_for_what_is_still_so(self, tmp_path):
        relu = {"layer": "a", "n_zero": lambda s: 100 if 3 < s < 12 else 0}
        trace = replay.open(write_trace(tmp_path / "t", steps(20, relu), [module("a", "ReLU")]))

        assert [f.rule for f in replay.check(trace, since=11)] == ["dead-relu"]
        assert replay.check(trace, since=12) == []
        assert replay.check(trace, since=1000) == []

    def test_a_finding_is_the_same_one_while_the_trace_grows(self, tmp_path):
        relu = {"layer": "a", "n_zero": lambda s: 100 if s > 30 else 0}
        seen = set()
        for count in range(25, 400, 25):
            path = write_trace(tmp_path / str(count), steps(count, relu), [module("a", "ReLU")])
            for finding in replay.check(replay.open(path), since=count - 25):
                seen.add((finding.rule, finding.rank, finding.layer, finding.kind))

        assert seen == {("dead-relu", 0, "a", "output")}

    def test_only_the_end_of_a_long_trace_is_looked_at(self, tmp_path):
        path = write_trace(tmp_path / "t", steps(1000, {"layer": "a"}), scalars=[(s, "loss", 1.0) for s in range(1000)])
        records = replay.Records(replay.open(path), since=950)

        assert (records.steps[0], records.earlier, len(records.table)) == (750, 750, 250)
        assert records.scalar("loss")[0][1][0] == 750

    def test_a_live_trace_is_looked_at_as_it_grows(self, tmp_path):
        torch = pytest.importorskip("torch")
        import hookrec

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        torch.nn.init.constant_(model[0].bias, -100.0)
        with hookrec.attach(model, tmp_path / "t", clock="manual", keep_free=0, tensors=False) as rec:
            trace, found = None, []
            for _ in range(2000):
                model(torch.rand(4, 3))
                rec.step()
                if trace is None and (tmp_path / "t" / "rank-00000" / "model.json").exists():
                    trace = replay.open(tmp_path / "t")
                if trace is not None:
                    found = replay.check(trace.refresh())
                if found:
                    break
            assert trace is not None
            assert trace.status == "live"

        assert [(f.rule, f.layer, f.first_step) for f in found] == [("dead-relu", "1", 0)]

    def test_an_empty_trace_has_no_finding_and_no_rule_passes_for_one_that_looked(self, tmp_path):
        report = examine(replay.open(write_trace(tmp_path / "t", [])))

        assert (report.findings, report.quiet) == ([], [])
        assert set(report.not_applicable.values()) == {"no step is committed yet"}

    def test_no_value_of_a_threshold_breaks_a_rule(self, tmp_path):
        records = {"layer": "a"}, {"layer": "a", "kind": "grad_output"}
        scalars = [(s, name, 1.0) for s in range(30) for name in ("loss", "hookrec/grad_scale")]
        trace = replay.open(write_trace(tmp_path / "t", steps(30, *records), [module("a", "ReLU")], scalars))

        for value in (0, 1, 1e9):
            thresholds = {f"{rule.name}.{name}": value for rule in RULES for name in rule.thresholds}
            assert not any("broken" in f.message for f in replay.check(trace, thresholds=thresholds))

    def test_a_model_that_is_described_badly_is_passed_over(self, tmp_path):
        odd = {"name": "a", "recorded": True, "parameters": [{}, {"name": "weight", "shape": None}], "aliases": []}
        records = [{"layer": "a", "kind": k, "path": "weight"} for k in ("output", "param", "update", "grad_output")]
        path = write_trace(tmp_path / "t", steps(60, *records), [odd])

        assert not any("broken" in f.message for f in replay.check(replay.open(path)))

    def test_odd_names_and_odd_tensors_are_taken(self, tmp_path):
        odd = {"numel": 0, "min": np.nan, "max": np.nan, "absmax": np.nan, "mean": np.nan, "std": np.nan, "l2": np.nan}
        records = [
            {"layer": name, "kind": kind, "dtype": dtype, **facts}
            for name in ("", "a.b|c", "层", "it's")
            for kind in ("output", "grad_output", "input", "param", "param_grad", "update")
            for dtype, facts in (("float16", odd), ("complex64", {"mean": np.nan, "std": np.nan}), ("bool", {}))
        ]
        huge = {"layer": "huge", "dtype": "float64", "l2": 1e308, "absmax": 1e308, "std": 1e307, "numel": 2**40}

        path = write_trace(tmp_path / "t", steps(60, *records, huge, {**huge, "call": 1}))

        assert not any("itself is broken" in f.message for f in replay.check(replay.open(path)))

    def test_calls_of_a_step_are_joined_as_if_they_were_one_tensor(self, tmp_path):
        values = [np.arange(4.0), np.array([10.0, -2.0])]
        records = [
            {
                "step": 0,
                "layer": "a",
                "call": call,
                "numel": len(v),
                "n_zero": int(np.sum(v == 0)),
                "min": v.min(),
                "max": v.max(),
                "absmax": np.abs(v).max(),
                "mean": v.mean(),
                "std": v.std(),
                "l2": np.linalg.norm(v),
            }
            for call, v in enumerate(values)
        ]
        nothing = dict.fromkeys(("min", "max", "absmax", "mean", "std", "l2"), np.nan)
        records.append({"step": 0, "layer": "a", "call": 2, "numel": 0, **nothing})
        both = np.concatenate(values)

        grid = replay.Records(replay.open(write_trace(tmp_path / "t", records))).grid("output")

        joined = {name: grid[name][0, 0] for name in ("numel", "n_zero", "min", "max", "absmax", "mean", "std", "l2")}
        assert joined == pytest.approx(
            {"numel": 6, "n_zero": 1, "min": -2, "max": 10, "absmax": 10}
            | {"mean": both.mean(), "std": both.std(), "l2": np.linalg.norm(both)}
        )

    def test_long_files_of_scalars_are_read_from_near_the_end(self, tmp_path):
        count = 20_000
        path = write_trace(tmp_path / "t", steps(1, {"layer": "a"}), scalars=[(s, "x", float(s)) for s in range(count)])
        file = path / "rank-00000" / "scalars.jsonl"
        damaged = b"#" + file.read_bytes()[1:]  # whoever reads the beginning would say so
        file.write_bytes(damaged)

        from replay.documents import read_scalars

        found = [step for step, *_ in read_scalars(path / "rank-00000", since=count - 5)]
        assert found[-5:] == list(range(count - 5, count))
        with pytest.raises(replay.TraceDamaged):
            list(read_scalars(path / "rank-00000", since=0))


class TestSeries:
    def test_a_run_is_of_consecutive_records_and_gaps_do_not_end_it(self):
        so = np.array([[1, 1, 0, 1, 0, 1, 1, 1]], bool).T
        known = np.array([[1, 1, 1, 1, 0, 1, 1, 0]], bool).T

        assert sustained(so, known, 3)[:, 0].tolist() == [False, False, False, True, False, True, True, False]
        assert sustained(so, known, 4).any() == np.False_

    def test_median_passes_over_nan(self):
        values = np.array([[1.0, np.nan, 5.0], [np.nan, np.nan, np.nan], [4.0, 2.0, 1.0]])

        assert median(values, axis=1).tolist()[::2] == [3.0, 2.0]
        assert np.isnan(median(values, axis=1)[1])

    def test_usual_knows_only_what_came_before(self):
        middle, spread = usual(np.array([1.0, 3.0, np.inf, 2.0, 100.0, 7.0]), window=4, least=3)

        assert middle[4] == 2.0  # of 1, 3, 2
        assert spread[4] == pytest.approx(1.4826)  # of 1, 1, 0
        assert np.isnan(middle[:4]).all()


class TestUsersRules:
    def test_a_rule_of_a_file_is_run_with_the_others(self, my_rules, tmp_path):
        path = write_trace(tmp_path / "t", steps(9, {"layer": "a", "absmax": lambda s: 2e3 if s == 5 else 1.0}))

        found = json.loads(run(path, "--rules", my_rules, "--json").output)["findings"]

        assert [(f["rule"], f["severity"], f["layer"], f["first_step"], f["advice"]) for f in found] == [
            ("too-large", "error", "a", 5, "Lower it.")
        ]
        assert run(path, "--rules", my_rules, "--threshold", "too-large=1e4").exit_code == 0

    def test_a_rule_that_breaks_neither_hides_the_others_nor_passes(self, sick):
        @replay.rule(advice="Mend it.")
        def broken(records):
            raise ZeroDivisionError("by me")

        @replay.rule(advice="Mend it.")
        def strange(records):
            return ["a string"]

        @replay.rule(advice="Mend it.")
        def meddling(records):
            records.grid("output")["n_zero"][:] = 0

        findings = replay.check(replay.open(sick), rules=[broken, strange, meddling, *RULES])

        messages = {f.rule: f.message for f in findings}
        assert "itself is broken: ZeroDivisionError: by me" in messages["broken"]
        assert "itself is broken: TypeError: it yields a str" in messages["strange"]
        assert "itself is broken: ValueError" in messages["meddling"]
        assert "dead-relu" in messages
        assert {f.advice for f in findings if f.rule in ("broken", "strange", "meddling")} == {
            "Mend the rule, or leave it out."
        }
        assert findings[0].rule == "non-finite"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import replay", "has no rule"),
            ("1 +", "SyntaxError"),
            ("1 / 0", "ZeroDivisionError"),
            ("raise SystemExit(0)", "SystemExit"),
            (MY_RULE.replace("limit=1e3", "limit"), "is no threshold"),
            (MY_RULE.replace("*, limit=1e3", "limit=1e3"), "is no threshold"),
            (MY_RULE.replace('"error"', '"fatal"'), "no severity"),
            (MY_RULE.replace("too_large", "dead_relu"), "two rules named"),
        ],
    )
    def test_a_file_that_is_no_file_of_rules_is_one_message(self, healthy, tmp_path, text, words):
        (tmp_path / "bad.py").write_text(text)

        result = run(healthy, "--rules", tmp_path / "bad.py")

        assert result.exit_code == 2
        assert words in result.output
        assert result.output.startswith("Error: ")

    def test_a_package_offers_rules_by_an_entry_point(self, my_rules, monkeypatch):
        monkeypatch.syspath_prepend(str(my_rules.parent))
        monkeypatch.delitem(sys.modules, "my_rules", raising=False)
        entry = importlib.metadata.EntryPoint("mine", "my_rules", "replay.rules")
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] * (group == "replay.rules"))

        assert [rule.name for rule in installed_rules()] == ["too-large"]


class TestCommand:
    def test_the_exit_status_tells_whether_something_was_found(self, sick, healthy):
        assert run(healthy).exit_code == 0
        assert run(sick).exit_code == 1
        assert run(sick, "--fail-on", "never").exit_code == 0
        assert run(sick, "--skip", "non-finite", "--fail-on", "error").exit_code == 0
        assert run(sick, "--fail-on", "error").exit_code == 1

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--threshold", "dead-relu"], "is not like dead-relu=0.95"),
            (["--threshold", "dead-relu=much"], "is not like dead-relu=0.95"),
            (["--threshold", "dead-relu=nan"], "takes a number"),
            (["--threshold", "dead-relu.steps=2.5"], "takes a whole number"),
            (["--threshold", "dead-relu.steps=-1"], "takes a whole number"),
            (["--threshold", "dead-relu.steps=inf"], "takes a whole number"),
            (["--threshold", "dead-rulu=1"], "There are dead-relu"),
            (["--threshold", "dead-relu.shore=1"], "Those of the rule are: dead-relu.share, dead-relu.steps"),
            (["--only", "dead"], "There is no rule 'dead'"),
            (["--skip", "dead"], "There is no rule 'dead'"),
            (["--since", "-1"], "--since"),
            (["--rules", "nowhere.py"], "does not exist"),
            (["--rules", "."], "is a directory"),
        ],
    )
    def test_what_cannot_be_understood_is_status_2_and_one_message(self, healthy, args, words):
        result = run(healthy, *args)

        assert result.exit_code == 2
        assert words in result.output
        assert "Traceback" not in result.output

    def test_a_place_without_a_trace_is_no_finding(self, tmp_path):
        assert run(tmp_path / "nowhere").exit_code == 2

    def test_a_damaged_trace_is_no_finding(self, sick):
        (sick / "rank-00000" / "scalars.jsonl").write_text('{"step": 0, "time"\n')

        assert run(sick).exit_code == 2

    def test_words_and_json_say_the_same(self, sick):
        words, facts = run(sick, "-v").output, json.loads(run(sick, "--json").output)

        for finding in facts["findings"]:
            assert " ".join(finding["message"].split()) in " ".join(words.split())
        for name, reason in facts["not_applicable"].items():
            assert f"does not apply: {name}: {reason}" in words
        assert "1 error, 2 warnings" in words

    def test_ranks_that_share_a_trouble_share_a_line(self, tmp_path):
        for rank in range(3):
            relu = {"layer": "a", "n_zero": 100}
            write_trace(tmp_path / "t", steps(20, relu), [module("a", "ReLU")], rank=rank)

        output = run(tmp_path / "t").output

        assert output.count("dead-relu") == 1
        assert "ranks 0, 1, 2" in output

    def test_a_folder_that_cannot_be_written_is_read(self, healthy, tmp_path):
        copy = tmp_path / "read-only"
        shutil.copytree(healthy, copy)
        for path in (copy / "rank-00000", copy):
            path.chmod(0o555)

        assert run(copy).exit_code == 0

    def test_it_needs_no_torch(self, healthy):
        code = f"import replay, sys; replay.check(replay.open({str(healthy)!r})); assert 'torch' not in sys.modules"

        subprocess.run([sys.executable, "-c", code], check=True)


class TestPage:
    def test_the_table_has_each_rule_as_it_is(self):
        rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)

        documented = {name: (severity, thresholds, source) for name, severity, thresholds, _, source in rows}
        assert list(documented) == [rule.name for rule in RULES]
        for rule in RULES:
            thresholds = ", ".join(f"`{name}` {value:g}" for name, value in rule.thresholds.items())
            assert documented[rule.name] == (rule.severity, thresholds, source_of(rule))

    def test_the_rule_of_the_page_works(self, tmp_path):
        text = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
        (tmp_path / "my_rules.py").write_text(text)
        records = {"layer": "a", "kind": "param", "path": "bias", "absmax": 70.0}
        path = write_trace(tmp_path / "t", steps(9, records), [module("a", "Linear", ("bias", [8]))])

        result = run(path, "--rules", tmp_path / "my_rules.py", "--only", "large-biases")

        assert result.exit_code == 1
        assert "large-biases" in result.output
