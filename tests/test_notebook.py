"""What a trace and a selection show of themselves in a notebook, a shell or a traceback."""

import shutil

import replay
from tests.written import write_trace


def written(path, count=3):
    return replay.open(write_trace(path, [{"step": step, "layer": "<b>&", "l2": step + 0.5} for step in range(count)]))


def test_a_trace_says_in_a_line_what_it_is(tmp_path):
    trace = written(tmp_path / "a")

    assert repr(trace) == f"<Trace '{tmp_path}/a': torn, steps 0 to 2, 1 layers, 3 records>"


def test_a_trace_that_can_no_longer_be_read_still_has_a_representation(tmp_path):
    trace = written(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    trace.close()

    assert repr(trace).startswith("<Trace ")


def test_tables_have_what_is_recorded_and_no_markup_of_others(tmp_path):
    trace = written(tmp_path / "a", 25)

    shown = trace.select()._repr_html_()
    assert shown.startswith("<p>25 records, of which the first 20</p>")
    assert shown.count("<tr>") == 21
    assert "<td>&lt;b&gt;&amp;</td>" in shown
    assert "<td>19.5</td>" in shown
    assert "<b>" not in shown
    assert "<td>torn, steps 0 to 24, 1 layers, 25 records</td>" in trace._repr_html_()
