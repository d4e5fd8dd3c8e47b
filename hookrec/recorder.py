"""What a user calls: `attach`, and the recorder that it returns."""

import atexit
import contextlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from hookrec.choices import Choices
from hookrec.clock import check as check_clock
from hookrec.control import heard, unheard
from hookrec.errors import AttachError, DetachedError
from hookrec.layers import Layer, choose, layers_of, model_facts
from hookrec.ops import check as check_ops
from hookrec.parameters import KINDS as PARAMETER_KINDS
from hookrec.place import absolute, identity, make_directories, rank_of_process
from hookrec.plan import Plan, plan_of
from hookrec.recording import Recording, is_recorded
from hookrec.signals import Signals
from hookrec.signals import check as check_signals
from hookrec.transforms import Function, functions_of
from hookrec.writer_process import WriterProcess

_WAIT_S = 60.0
"""How long a training that is resumed waits for the writer of the one before, which may be busy with what that left."""

_MOST_STEPS = 2**62


def attach(
    model: nn.Module | Mapping[str, nn.Module],
    path: str | os.PathLike[str],
    *,
    layers: str | Iterable[str] = "*",
    containers: bool = False,
    kinds: str | Iterable[str] = ("output", "grad_output"),
    ops: str | Iterable[str] = (),
    every: int = 1,
    steps: str = ":",
    tensors: bool = True,
    tensor_steps: str = ":",
    tensor_dtype: str | None = None,
    tensor_rows: int | None = None,
    exponents: bool = False,
    store: str = "zarr",
    compression: str | None = None,
    ring: str | int = "512MB",
    when_full: str = "block",
    clock: str | Optimizer = "optimizer",
    max_bytes: str | int = "50GB",
    keep_free: float = 0.1,
    durability: str = "process",
    restart: int = 1,
    flight: int | None = None,
    after: int = 5,
    triggers: str | Iterable[str] | None = None,
    trigger_rest: int = 100,
    trigger_limit: int = 10,
    signals: str | Iterable[str] = (),
    rules: Iterable[Mapping[str, Any]] = (),
    transform: Mapping[str, Function | str] | None = None,
    resume: bool | int = False,
) -> "Recorder":
    """Record what flows through the layers of a model.

    Recording begins at once, with step 0 unless `resume` says otherwise, and ends with `detach()`, at the end of a
    `with` block, or when the process ends. The training is not changed: losses and parameters are bit for bit what they
    are without a recorder.

    Args:
        model: a model, or several by name; the name is put before the names of their layers.
        path: the directory of the trace, which must not exist or be empty unless `resume` is given.
        layers: glob or globs over qualified names, of leaf modules.
        containers: choose among all modules, the root (`""`) included.
        kinds: "output" (what a layer returned), "grad_output" (the gradient of the loss with respect to it), "input",
            "grad_input" (through this call alone), and of the parameters that the modules own, leaves or not: "param"
            and "param_grad" as the optimizer meets them, after clipping and unscaling, "param_grad_acc" as each
            backward pass leaves it, and "update", what the optimizer changed.
        ops: functions of torch, such as "relu", "matmul" or "add", or globs over their names: what they return inside
            of the modules that `layers` matches, leaves or not, is recorded as layers such as `blocks.0/add#1`, the
            second addition in a call of `blocks.0`. Not inside of the leaf modules of `torch.nn`.
        every: record steps 0, `every`, 2 × `every`, …; between them the hooks are gone.
        steps: record these alone: ranges of steps as Python writes slices, such as "0:100" or "0:100,1000:2000:10", or
            "::100x3" for three steps in a row each hundred.
        tensors: keep the tensors; else their statistics alone.
        tensor_steps: of the recorded steps those whose tensors are kept, such as "::100"; the others have their
            statistics.
        tensor_dtype: store tensors of a wider floating dtype in this one: "float32", "bfloat16", "float16" (beyond its
            range infinite), "float8_e4m3fn" or "float8_e5m2". The statistics are those of the tensor itself.
        tensor_rows: store so many rows (of the first dimension, the samples of most batches) of each output, input and
            gradient of these. The statistics are those of all rows.
        exponents: count the elements of each floating tensor by their binary exponents, also where the tensor itself is
            not kept: about a kilobyte a record, by which `Trace.exponents` and `replay plot --exponents` tell what
            bfloat16, float16 and float8 would lose.
        store: layout of the tensors on the disk, "zarr" or "hdf5".
        compression: "zstd", "lz4" or "blosc" (zstd of shuffled bytes), by the writer; without loss. None for none.
        ring: shared memory between the training and the writer process, in bytes or as "512MB".
        when_full: what to do when the disk is slower than the training: "block" waits, "skip" drops the tensors of the
            step and keeps their statistics.
        clock: what ends a step: "optimizer" (the first that steps and holds parameters of the model), an optimizer,
            "forward" (a forward pass of the model begins a step) or "manual" (`step()`).
        max_bytes: bytes of tensors past which only statistics are recorded; the step that passes them is kept whole.
        keep_free: share of the file system to leave free, likewise.
        durability: what a step that is committed outlives: "process", the death of training and writer, by any signal;
            "power", a loss of power as well, for which the writer waits for the disk before each commit. The training
            waits for it only if the ring is full.
        restart: how many times another writer process is started when it dies; it goes on in the same trace.
        flight: flight mode: statistics of each step, and tensors only around a trigger: of its step, of so many
            recorded steps before it, and of `after` steps after it. An exception that ends the training and the death
            of the process are triggers too. The ring must hold `flight` + 2 steps.
        after: in flight mode, how many steps after a trigger are kept.
        triggers: conditions on statistics and logged numbers, such as "l2 > 1e4" or "loss > 3 * median(loss, 100)";
            "n_nan > 0" if not given.
        trigger_rest: steps after which a condition that was false in between may fire again.
        trigger_limit: how often a condition may fire.
        signals: names of signals that are triggers, such as "SIGUSR1"; earlier handlers are called as before.
        rules: what is recorded otherwise of some layers and kinds, each a dict such as `{"layers": "encoder.*",
            "kinds": "output", "every": 10, "tensor_rows": 4}`, with any of `every`, `steps`, `tensors`, `tensor_steps`,
            `tensor_dtype`, `tensor_rows` and `exponents`, or `{"layers": "head", "record": False}`. The last rule that
            matches a record decides; what it does not say is as the other arguments have it.
        transform: functions by globs over layer names, of which the last that matches is called with layer, kind and a
            clone of each tensor that is recorded. The tensor that it returns, if it does, is recorded as well, as layer
            `encoder.0/function`. Also as "module:function". It must not call the model.
        resume: go on in the trace at `path`, or begin one if there is none: so the same line serves the first start of
            a training and each later one. A number is the step that comes next, which a checkpoint has if `steps` of
            the recorder was saved with it; True is the step after the last that was committed. What was recorded
            before of steps from there on stays in the trace, and readers show the latest.

    Returns:
        The recorder, which is a context manager.

    Raises:
        AttachError: the model, the path or an argument will not do. Nothing was changed.
    """
    plan = plan_of(
        layers=layers,
        containers=containers,
        kinds=kinds,
        ops=ops,
        every=every,
        steps=steps,
        tensors=tensors,
        tensor_steps=tensor_steps,
        tensor_dtype=tensor_dtype,
        tensor_rows=tensor_rows,
        exponents=exponents,
        store=store,
        compression=compression,
        ring=ring,
        when_full=when_full,
        clock=clock if isinstance(clock, str) else "given",
        max_bytes=max_bytes,
        keep_free=keep_free,
        durability=durability,
        restart=restart,
        flight=flight,
        after=after,
        triggers=triggers,
        trigger_rest=trigger_rest,
        trigger_limit=trigger_limit,
        signals=signals,
        rules=rules,
        transform=transform,
    )
    functions = functions_of(transform or {})
    return Recorder(_as_models(model), absolute(path), plan, clock, _as_resume(resume), functions)


class Recorder:
    """A recording, as its user sees it. Made by `attach`.

    Attributes:
        path: the directory of the trace.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        path: Path,
        plan: Plan,
        clock: str | Optimizer,
        resume: bool | int = False,
        functions: Mapping[str, Function] | None = None,
    ) -> None:
        check_clock(clock)
        check_ops(plan.ops)
        check_signals(plan.signals)
        for name, model in models.items():
            if is_recorded(model):
                which = f"The model {name!r}" if name else "The model"
                raise AttachError(f"{which} is being recorded already. Call detach() of that recorder first.")
        layers = layers_of(models)
        chosen = self._choose(layers, plan)
        self.path = path
        with contextlib.ExitStack() as stack:
            rank, ranks = rank_of_process()
            try:
                rank_directory = make_directories(path, rank, ranks, stack, resume=resume is not False)
            except OSError as error:
                raise AttachError(
                    f"{path} cannot be made: {error.strerror}. Choose a directory where you may write."
                ) from None
            first_step = None if resume is True else resume
            attempt = {"first_step": first_step, "ranks": ranks, "wait_s": _WAIT_S}
            config = {
                "directory": str(rank_directory),
                "pid": os.getpid(),
                "plan": plan.as_json(),
                "model": model_facts(layers, chosen, Choices.of_plan(plan, layers)),
                "trace": {**identity(), "ranks": ranks} if rank == 0 else None,
                "attempt": None if resume is False else attempt,
            }
            writer = WriterProcess(config, plan.ring_bytes, plan.restart)
            stack.pop_all()
        try:
            self._recording = Recording(models, layers, chosen, plan, clock, writer, writer.first_step, functions)
        except BaseException:
            writer.wait()
            raise
        self._recording.look_for_globs(layers, chosen)
        self._waiting = threading.Lock()
        self._signals = Signals(plan.signals, self._recording.trigger_soon)
        self._waited = False
        self._left = False
        if (why := heard(self)) is not None:
            self._recording.note(None, f"this recording cannot be controlled from outside: {why}")
        # This also keeps a recorder alive that nobody holds: hookrec.attach(model, path) as a line of its own records.
        atexit.register(self._at_exit)

    @staticmethod
    def _choose(layers: list[Layer], plan: Plan) -> list[Layer]:
        try:
            return choose(layers, plan.layers, containers=plan.containers)
        except AttachError:
            # Parameters are recorded of any module, also where the globs match no leaf.
            if set(plan.kinds) <= set(PARAMETER_KINDS) and all(
                any(layer.matches((glob,)) for layer in layers) for glob in plan.layers
            ):
                return []
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._detach(error)

    @property
    def steps(self) -> int:
        """The number of the step that is under way: how many have ended, where step 0 was the first.

        What a checkpoint has to keep for `attach(resume=…)`.
        """
        return self._recording.step_number

    @property
    def first_step(self) -> int:
        """The step that this recording began with."""
        return self._recording.first_step

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the recorded models have one of some parameters."""
        return self._recording.holds(parameters)

    def step(self) -> None:
        """End the step that is under way. From the first call on nothing else ends a step.

        Raises:
            DetachedError: the recorder was detached.
        """
        self._check_attached("step")
        self._recording.step()

    @property
    def active(self) -> bool:
        """Whether it records: it was not detached and has not failed."""
        return self._recording.active

    def facts(self) -> dict[str, Any]:
        """Return what `hookrec status` shows: the trace, the plan, how far it is."""
        return {"trace": str(self.path), **self._recording.facts()}

    @property
    def cost(self) -> str | None:
        """What the first recorded step was, and for how many like it there is room; None before, and in flight mode."""
        return self._recording.cost

    def at_boundary(self, do: Callable[[], None]) -> None:
        """Call a function between two steps, on the thread that trains. Any thread may ask.

        It must not raise, but a SystemExit, which ends the training.
        """
        self._recording.requests.append(do)

    def change(self, changes: Mapping[str, Any]) -> str:
        """Record by another plan from the next step on: the one under way, if nothing of it has been recorded yet.

        Args:
            changes: arguments of `attach` that may be changed, such as `{"every": 1}`.

        Returns:
            What is different now, in words.

        Raises:
            AttachError: there is no such argument or value, or no layer is matched. Nothing was changed.
        """
        return self._recording.change(changes)

    def finish(self) -> Callable[[], None]:
        """Stop recording; return what waits until the trace is sealed. Used where the training must not wait."""
        self._signals.close()
        self._recording.end("detached", None)
        return self._wait

    def _wait(self) -> None:
        with self._waiting:
            if not self._waited:
                self._recording.wait()
                self._waited = True
        self._recording.answer_requests()
        atexit.unregister(self._at_exit)

    def log(self, **values: float | Tensor) -> None:
        """Record numbers with the step that is under way, or with the one that has just ended.

        Between two steps, until the next forward pass, they belong to the one that ended. Forward passes of steps that
        are not recorded are not seen: there a name belongs to the step under way if it was logged in the middle of a
        recorded one before, else to the one that ended.

        Args:
            values: numbers, or tensors of one element, by name, such as `loss=loss`.

        Raises:
            DetachedError: the recorder was detached.
            TypeError: a value is no number.
        """
        self._check_attached("log")
        for name, value in values.items():
            try:
                number = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"log({name}=…) takes a number or a tensor of one element, not {value!r:.80}") from None
            self._recording.log(name, number)

    def trigger(self, why: str) -> None:
        """Keep the tensors of the last steps and of the next ones, in flight mode; else leave a note.

        Args:
            why: the reason, which is written into the trace.

        Raises:
            DetachedError: the recorder was detached.
        """
        self._check_attached("trigger")
        self._recording.trigger("call", str(why))

    def pause(self) -> contextlib.ExitStack:
        """Record no calls of layers until `resume()`, or the end of `with recorder.pause():`.

        For an evaluation in the middle of a training: its forward passes would be calls of the step under way. Numbers
        that are logged meanwhile belong to the step that ended. Steps are counted as before.

        Returns:
            A context manager that resumes when it is left.

        Raises:
            DetachedError: the recorder was detached.
        """
        self._check_attached("pause")
        self._recording.pause()
        left = contextlib.ExitStack()
        left.callback(self._recording.resume)
        return left

    def resume(self) -> None:
        """Record again after `pause()`. May be repeated.

        Raises:
            DetachedError: the recorder was detached.
        """
        self._check_attached("resume")
        self._recording.resume()

    def detach(self) -> None:
        """Stop recording, write what is under way, seal the trace, and leave the model as it was. May be repeated."""
        self._detach(None)

    def _detach(self, error: BaseException | None) -> None:
        self._left = True
        unheard(self)
        self._signals.close()
        if error is None:
            self._recording.end("detached", None)
        else:
            self._recording.end("exception", f"{type(error).__name__}: {error}")
        self._wait()

    def _at_exit(self) -> None:
        self._detach(getattr(sys, "last_value", None))

    def _check_attached(self, what: str) -> None:
        # Whoever detaches from outside ends no training that goes on to log.
        if self._left and self._waited:
            raise DetachedError(
                f"{what}() after detach(): the trace at {self.path} is finished. attach() again, to another path."
            )


def _as_models(model: nn.Module | Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    if isinstance(model, Mapping) and model and all(isinstance(m, nn.Module) for m in model.values()):
        if all(isinstance(name, str) and name for name in model):
            return model
        raise AttachError(f"The models are named {list(model)!r}; each name must be a string that is not empty.")
    raise AttachError(
        f"model is a {type(model).__qualname__}; it takes a torch.nn.Module, or a dict of name to module."
    )


def _as_resume(resume: object) -> bool | int:
    """Return the argument as a boolean or a step.

    Raises:
        AttachError: it is neither.
    """
    if isinstance(resume, bool):
        return resume
    try:
        step = operator.index(resume)  # type: ignore[arg-type] # what is none, such as None, is refused by it
    except TypeError:
        step = -1
    if not 0 <= step < _MOST_STEPS:
        raise AttachError(f"resume is {resume!r}; it takes the step that comes next, from 0, or True, or False.")
    return step
