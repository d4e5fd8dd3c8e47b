"""Ctrl-C may come between any two lines of ours: what is recorded stays whole, and nothing is recorded twice."""

import dis
import shutil
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookrec
import hookrec.recorder
import replay
from hookrec.capture import Capture
from hookrec.recording import Recording
from hookrec.ring import Ring
from tests.writer_in_process import WriterInProcess

STEPS = 6
SENDING = (Ring.send, Ring._transmit, Capture.stream, Recording._send_step)
FUNCTIONS = (
    *(*SENDING, Ring.acknowledged, Ring.allocate, Ring.reserve_row),
    *(Capture.record, Recording.take, Recording._end_step, Recording._close_step),
)


class Negated(nn.Module):
    """Returns the negative of what comes in, so that its records are known from those of others."""

    def forward(self, x: Tensor) -> Tensor:
        return -x


class Interrupt:
    """Raises KeyboardInterrupt once, the n-th time that a place in a function is reached.

    Args:
        code: the function.
        event: "line", or "opcode" for each instruction.
        place: the line, or the offset of the instruction.
        time: how many times the place is passed before.
    """

    def __init__(self, code: CodeType, event: str, place: int, time: int) -> None:
        self._code, self._event, self._place, self._left = code, event, place, time
        self.came = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not self._code:
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_lineno if self._event == "line" else frame.f_lasti
        if event == self._event and place == self._place and not self.came:
            if not self._left:
                self.came = True
                raise KeyboardInterrupt
            self._left -= 1
        return self._inside


def value_of(step: int) -> Tensor:
    """What goes in: a value of its own and, in some steps, a shape that has not been there."""
    return torch.full((2 + step % 4,), float(step + 1))


def record_interrupted(path, interrupt: Interrupt) -> list[bool]:
    """Record steps; return of each whether it was interrupted."""
    model = nn.Sequential(nn.Identity(), Negated())
    recorder = hookrec.attach(model, path, clock="manual", ring="1MiB", kinds="output", keep_free=0)
    interrupted = []
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        for step in range(STEPS):
            came = interrupt.came
            try:
                model(value_of(step))
                recorder.log(value=float(step + 1))
                recorder.step()
            except KeyboardInterrupt:
                pass
            interrupted.append(interrupt.came and not came)
    finally:
        sys.settrace(before)
    recorder.detach()
    return interrupted


def assert_whole(path, interrupted: list[bool], where: str) -> None:
    """Each record is right, once; none is missing but of the step that was interrupted."""
    trace = replay.open(path)
    assert (trace.status, trace.not_kept) == ("sealed", {}), where
    found = []
    for row in trace.records().to_pylist():
        tensor = trace.tensor(row["step"], row["layer"], call=row["call"])
        value = {"0": 1, "1": -1}[row["layer"]] * float(tensor[0]) if row["layer"] else -float(tensor[0])
        assert tensor.tolist() == (float(tensor[0]) * torch.ones(2 + int(value - 1) % 4)).tolist(), where
        assert row["mean"] == float(tensor[0]), where
        found.append((row["layer"], int(value)))
    assert len(set(found)) == len(found), f"{where}: a record is doubled"
    whole = {(layer, step + 1) for step in range(STEPS) for layer in ("0", "1") if not interrupted[step]}
    assert whole <= set(found), f"{where}: records are missing"
    logged = [row["value"] for row in trace.scalars().to_pylist() if row["name"] == "value"]
    assert len(set(logged)) == len(logged), f"{where}: a number is doubled"
    assert {step + 1 for step in range(STEPS) if not interrupted[step]} <= set(logged), f"{where}: numbers are missing"


def _interrupt_everywhere(tmp_path, function, event: str, times) -> None:
    code = function.__code__
    if event == "line":
        places = sorted({line for _, _, line in code.co_lines() if line and line > code.co_firstlineno})
    else:
        places = [instruction.offset for instruction in dis.get_instructions(code)]
    came = 0
    for place in places:
        for time in times:
            interrupt = Interrupt(code, event, place, time)
            path = tmp_path / f"{place}-{time}"
            interrupted = record_interrupted(path, interrupt)
            came += interrupt.came
            assert_whole(path, interrupted, f"{function.__qualname__}, {event} {place}, time {time}")
            shutil.rmtree(path)
    assert came


@pytest.mark.parametrize("function", SENDING, ids=lambda function: function.__qualname__)
def test_an_interrupt_at_any_line_leaves_whole_records_and_doubles_none(tmp_path, monkeypatch, function):
    monkeypatch.setattr(hookrec.recorder, "WriterProcess", WriterInProcess)

    _interrupt_everywhere(tmp_path, function, "line", (0,))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_an_interrupt_at_any_instruction_leaves_whole_records_and_doubles_none(tmp_path, monkeypatch, function):
    monkeypatch.setattr(hookrec.recorder, "WriterProcess", WriterInProcess)

    _interrupt_everywhere(tmp_path, function, "opcode", (0, 1))
