"""A recording under way: what happens at the end of a step, and when something of ours breaks.

It ties the hooks and the clock to the ring. It is called from hooks, on the threads of the training, and starts no
thread of its own. A fault of ours (disk full, writer gone, a bug) ends the recording with one warning, and the training
goes on.
"""

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from hookrec.calls import Call, Fingerprint, Named, nothing
from hookrec.capture import Capture
from hookrec.choices import Choices
from hookrec.clock import Clock
from hookrec.errors import AttachError, warn
from hookrec.guard import Guard
from hookrec.hooks import Hooks
from hookrec.layers import Layer, choose, layers_of, model_facts, parameter_ids
from hookrec.parameters import KINDS as PARAMETER_KINDS
from hookrec.parameters import Parameters
from hookrec.plan import Plan
from hookrec.remarks import Remarks
from hookrec.ring import WriterGone
from hookrec.transforms import Function, Transforms
from hookrec.writer_process import WriterProcess

_recordings: "weakref.WeakSet[Recording]" = weakref.WeakSet()


class Recording:
    """The steps of one recorder, from the first to the end.

    Args:
        models: the roots, by name.
        modules: all of their modules.
        layers: those that are hooked.
        plan: what is recorded.
        clock: what ends a step.
        writer: where it goes.
        first_step: the number of the first step.
        functions: those of the user, by globs over layer names.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        modules: list[Layer],
        layers: list[Layer],
        plan: Plan,
        clock: str | Optimizer,
        writer: WriterProcess,
        first_step: int = 0,
        functions: Mapping[str, Function] | None = None,
    ) -> None:
        self.first_step = self.step_number = first_step
        self.active = True
        self._failed = False
        self._plan = plan
        self._writer = writer
        self._ring = writer.ring
        self._choices = Choices.of_plan(plan, modules)
        self._capture = Capture(self._ring, plan, self._choices)
        self._guard = Guard(self.fault)
        self._transforms: Transforms | None = None
        if functions:
            self._transforms = Transforms(functions, self._record, self._wants, self.note, self._guard)
        self._hooks = Hooks(layers, self, plan.kinds, self._guard, plan.ops)
        self._choose_ops(modules)
        self._parameters = Parameters(self, plan.kinds, plan.layers, self._guard)
        self._parameters.choose(modules)
        self._scalars: dict[str, float] = {}
        self.requests: deque[Callable[[], None]] = deque()  # what others want done between two steps
        self._noted: set[tuple[str | None, str]] = set()
        self._logged: set[str] = set()  # what the step that ended last has
        self._logged_within: set[str] = set()  # what was logged before the optimizer stepped
        self._between = False  # whether a step has ended and no forward pass has begun since
        self._paused = False
        self._under_way = False
        self._coming: Plan | None = None  # what is followed when the step under way has ended
        self._remarks = Remarks(self.note)
        self._signals: list[str] = []
        self._since = self._began = time.perf_counter()
        self._books = {"recorded_steps": 0, "hook_s": 0.0, "capture_s": 0.0, "wait_s": 0.0, "step_s": 0.0}
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._models_changed = False
        self._registrations = [
            register_module_module_registration_hook(_weakly(self._registered)),
            register_module_parameter_registration_hook(_weakly(self._registered)),
        ]
        # Another thread may be training: what its hooks tell waits until everything is there.
        with self._capture.lock:
            self._clock = Clock(
                models, clock, self._tick, self._begin_forward, self._end_forward, self._log_own, self.fault
            )
            _recordings.add(self)
            try:
                self._begin_step()
            except BaseException as error:
                self.end("failed", f"{type(error).__name__}: {error}")
                raise

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the models have one of some parameters."""
        ours = parameter_ids(self._roots().values())
        return any(id(parameter) in ours for parameter in parameters)

    # What the hooks report.

    def micro(self, root: int) -> int:
        """Return which forward pass of a root in the step is under way, from 0."""
        return max(0, self._clock.forwards[root] - 1)

    def take(self, layer: Named, kind: str, path: str, tensor: Tensor, call: Call) -> Fingerprint:
        """Record a tensor; return its statistics."""
        statistics = self._record(layer, kind, path, tensor, call)
        if self._transforms is not None:
            self._transforms.give(layer.name, kind, path, tensor, call)
        return statistics

    def _record(self, layer: Named, kind: str, path: str, tensor: Tensor, call: Call) -> Fingerprint:
        key = (kind, path, tensor.dtype, tensor.shape)
        stream = layer.streams.get(key)
        if stream is None:
            stream = layer.streams[key] = self._capture.stream(layer.name, *key)
        return self._capture.record(stream, tensor, call)

    def _wants(self, layer: str, kind: str, step: int) -> bool:
        return self._choices is None or kind not in self._choices.left_out(layer, step)

    def fingerprint(self, tensor: Tensor) -> Fingerprint:
        """Return the statistics of a tensor that is not recorded."""
        return self._capture.fingerprint(tensor)

    def note(self, layer: str | None, note: str, **more: Any) -> None:
        """Take the reason why something of a layer is not recorded; the same reason once."""
        if (layer, note) not in self._noted:
            with self._capture.lock:
                self._ring.facts.setdefault("notes", []).append(
                    {"step": self.step_number, "layer": layer, "note": note, **more}
                )
            self._noted.add((layer, note))

    def fault(self, error: Exception) -> None:
        """End the recording because of an error of ours."""
        if self.active:
            if self._ring.control.failed:
                why = f"The writer has given up: {self._writer.last_words()}. What was committed before is there."
            else:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if not isinstance(error, WriterGone) and not self._writer.is_alive():
                    why += f" (the writer's last words: {self._writer.last_words()})"
            self._failed = True
            self.end("failed", why)
            warn(f"recording has stopped at step {self.step_number}, the training goes on. {why}")

    # Steps.

    def log(self, name: str, value: float) -> None:
        """Take a number of the step under way, or of the one that has just ended.

        Most loops log the loss after the optimizer has stepped, which is after the end of the step. So until the next
        forward pass a number belongs to the step that ended, unless that step has one of this name. Of steps that are
        not recorded no forward pass is seen: there it is as it was when the name was logged in one that was.
        """
        with self._capture.lock:
            if not self.active:
                return
            if any(self._clock.forwards):
                self._logged_within.add(name)
            elif self._clock.watches:
                self._logged_within.discard(name)
            within = name in self._logged_within and not (self._clock.watches or self._paused)
            if self._between and name not in self._logged and not within:
                self._logged.add(name)
                self._add_scalars(self.step_number - 1, {name: value})
            else:
                self._scalars[name] = value

    def trigger(self, by: str, why: str) -> None:
        """Take a trigger; like a number it belongs to the step that ended, until the next forward pass."""
        with self._capture.lock:
            if not self.active:
                return
            step = self.step_number - self._between
            self._ring.facts.setdefault("triggers", []).append({"step": step, "by": by, "why": why})

    def trigger_soon(self, signal_name: str) -> None:
        """Take a trigger of a signal. Its handler may run in the middle of ours, so it is sent when the step ends."""
        self._signals.append(signal_name)

    def _log_own(self, name: str, value: float) -> None:
        """Take a number that the recorder itself has to say of a step, if it is recorded."""
        if self.active and self._hooks.installed:
            with self._capture.lock:
                self._scalars[f"hookrec/{name}"] = value

    def _add_scalars(self, step: int, values: dict[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3), "values": values}
        self._ring.facts.setdefault("scalars", []).append(line)

    def _begin_forward(self) -> None:
        self._between = False
        self._guard.call(self._look_at_model)

    def _look_at_model(self) -> None:
        with self._capture.lock:
            if self.active:
                self._choose_again()
                self._hooks.be_last()

    def _end_forward(self) -> None:
        self._guard.call(self._finish_forward)

    def _finish_forward(self) -> None:
        self._hooks.settle_all()
        with self._capture.lock:
            self._parameters.materialise()

    def _choose_again(self) -> None:
        """Look at the models again where modules were added or replaced."""
        if self._models_changed:
            self._models_changed = False
            layers = layers_of(self._roots())
            with contextlib.suppress(AttachError):  # what matched before may be gone now
                chosen = choose(layers, self._plan.layers, containers=self._plan.containers)
                if self._choices is not None:
                    self._choices.know(layers)
                self._hooks.choose(chosen)
                self._parameters.choose(layers)
                self._choose_ops(layers)
                self._ring.facts["model"] = model_facts(layers, chosen, self._choices)

    def _choose_ops(self, modules: list[Layer]) -> None:
        if self._hooks.ops is not None:
            self._hooks.ops.choose(modules, self._plan.layers)

    def _registered(self, module: nn.Module, name: str, what: object) -> None:
        self._models_changed = True

    def step(self) -> None:
        """End the step because the user says so; from then on nothing else does."""
        self._clock.manual = True
        self._tick()
        self._between = False  # who ends steps by hand knows where a number belongs

    def _tick(self) -> None:
        # Under the lock, since another thread may detach: no hook must be put on after that has taken them off.
        with self._capture.lock:
            if self.active:
                ended = self.step_number
                try:
                    if self._passes_by():
                        return
                    self._end_step()
                    self._follow_coming()
                    self.answer_requests()
                    if self.active:
                        self._begin_step()
                except Exception as error:
                    self.fault(error)
                except BaseException:
                    self._guard.call(self._end_interrupted, ended)
                    raise

    def _passes_by(self) -> bool:
        """End a step of which there is nothing to record, before another such one; return whether it was that."""
        following = self.step_number + 1
        if (
            self._hooks.installed
            or self._paused
            or self._coming
            or self.requests
            or self._signals
            or self._scalars
            or self._capture.records
            or self._ring.facts
            or self._ring.held
            or self._ring.control.failed
            or self._samples(following)
        ):
            return False
        self._capture.begin_step(following)
        self._clock.begin_step(sampled=False)
        self._logged.clear()
        self._began = time.perf_counter()
        self._between = True
        self.step_number = following  # last: a step at whose end Ctrl-C comes goes on, and ends with the next
        return True

    def _end_interrupted(self, ended: int) -> None:
        """Make an end of a step at whose end Ctrl-C came, or the next would have its number and its forward passes."""
        if self.step_number == ended:
            self._close_step()
        self._begin_step()

    def change(self, changes: Mapping[str, Any]) -> str:
        """Record by another plan from the step on of which nothing has come yet; see `Recorder.change`."""
        with self._capture.lock:
            if not self.active:
                return "the recording has ended"
            before = self._coming or self._plan
            plan = before.changed(changes)
            self._layers_for(plan)
            words = plan.unlike(before)
            if not words:
                return "that is the plan already"
            step = self.step_number
            if self._under_way and (self._capture.records or any(self._clock.forwards)):
                self._coming = plan
                step += 1
            else:
                self._follow(plan)
                if self._under_way:
                    self._begin_step()
            return f"from step {step} on: {words}"

    def _layers_for(self, plan: Plan) -> tuple[list[Layer], list[Layer]]:
        """Return all layers, and those that a plan chooses.

        Raises:
            AttachError: it chooses none.
        """
        layers = layers_of(self._roots())
        return layers, choose(layers, plan.layers, containers=plan.containers)

    def _follow_coming(self) -> None:
        if (plan := self._coming) is not None:
            try:
                self._follow(plan)
            except AttachError as error:  # the model is another by now
                self.note(None, f"the plan could not be changed: {error}")
            self._coming = None

    def _follow(self, plan: Plan) -> None:
        """Go by another plan; called when no step is under way, or nothing of it has come."""
        layers, chosen = self._layers_for(plan)
        words = plan.unlike(self._plan)
        self._plan = plan
        self._hooks.remove()
        self._hooks.choose(chosen, plan.kinds)
        self._choose_ops(layers)
        self._choices = Choices.of_plan(plan, layers)
        self._leave_out(nothing)
        if self._capture.follow(plan, self._choices):
            self._hooks.forget_streams()
            if self._transforms is not None:
                self._transforms.forget_streams()
        self._parameters.close()
        self._parameters = Parameters(self, plan.kinds, plan.layers, self._guard)
        self._parameters.choose(layers)
        self._clock.be_last()
        self._ring.facts["model"] = model_facts(layers, chosen, self._choices)
        self._ring.facts["plan"] = plan.as_json()
        self.look_for_globs(layers, chosen)
        self._noted.discard((None, f"the plan was changed: {words}"))  # it may be changed back and forth
        self.note(None, f"the plan was changed: {words}", time=round(time.time(), 3), plan=plan.as_json())

    def _roots(self) -> dict[str, nn.Module]:
        return {name: model for name, reference in self._models.items() if (model := reference()) is not None}

    def answer_requests(self) -> None:
        """Do what was asked for meanwhile; between two steps, or when there will be none."""
        for _ in range(len(self.requests)):  # one may ask for the next time
            self.requests.popleft()()

    @property
    def cost(self) -> str | None:
        """What the first recorded step was, and for how many like it there is room; None before."""
        return self._remarks.cost

    def facts(self) -> dict[str, Any]:
        """Return how far the recording is, for whoever looks from another thread."""
        now = time.perf_counter()
        stopped = False
        with contextlib.suppress(ValueError):  # the ring was given back meanwhile
            stopped = bool(self._ring.control.stop_tensors)
        return {
            "step": self.step_number,
            "step_s": round(now - self._began, 3),
            "steps_per_s": round((self.step_number - self.first_step) / max(now - self._since, 1e-9), 3),
            "tensors_stopped": stopped,
            "plan": self._plan.as_json(),
        }

    def _begin_step(self) -> None:
        self._under_way = True
        self._began = time.perf_counter()
        self._before = (self._guard.seconds, self._capture.seconds, self._ring.wait_s)
        self._ring.high_water_bytes = 0
        self._capture.begin_step(self.step_number)
        sampled = self._samples(self.step_number)
        self._clock.begin_step(sampled=sampled)
        if sampled:
            self._choose_again()
            if self._choices is not None:
                choices, step = self._choices, self.step_number
                self._leave_out(lambda layer: choices.left_out(layer, step))
            self._hooks.install()
            self._parameters.install()
        else:
            self._hooks.remove()
            self._parameters.remove()
        if self._paused:
            self.pause()

    def _samples(self, step: int) -> bool:
        return (self._plan if self._choices is None else self._choices).samples(step)

    def _leave_out(self, left_out: Callable[[str], frozenset[str]]) -> None:
        self._parameters.left_out = left_out
        self._hooks.leave_out(left_out)

    def look_for_globs(self, layers: list[Layer], chosen: list[Layer]) -> None:
        """Warn of rules that are about no layer."""
        if self._choices is not None:
            every_module = bool(self._plan.ops) or not set(self._plan.kinds).isdisjoint(PARAMETER_KINDS)
            self._remarks.unmatched(self._choices.unmatched(layers if every_module else chosen))

    def pause(self) -> None:
        """Take the hooks off the modules until `resume`; parameters are still watched, since they have no calls."""
        with self._capture.lock:
            if self.active:
                self._paused = True
                self._hooks.remove()
                self._clock.unwatch()

    def resume(self) -> None:
        """Go on with the step that is under way."""
        with self._capture.lock:
            if self.active and self._paused:
                self._paused = False
                sampled = self._samples(self.step_number)
                self._clock.watch(sampled=sampled)
                if sampled:
                    self._choose_again()
                    self._hooks.install()

    def _end_step(self) -> None:
        with self._capture.lock:
            self._hooks.end_step()
            self._guard.call(self._parameters.end_step)
            self._look_for_records()
            self._logged = set(self._scalars)
            self._close_step()
        self._look_at_writer()

    def _close_step(self) -> None:
        if self._capture.records or self._scalars or self._ring.facts or self._signals:
            self._send_step()
        self.step_number += 1
        self._between = True
        self._under_way = False

    def _look_for_records(self) -> None:
        """See that a step that should have records has some."""
        if self._capture.records or not self._hooks.installed:
            return
        if self._choices is None or self._hooks.any_on or self._parameters.any_due:
            notes = sorted((layer, note) for layer, note in self._noted if layer is not None)
            called = any(self._clock.forwards)
            self._remarks.no_record(self.step_number, called=called, kinds=self._plan.kinds, notes=notes)

    def _send_step(self) -> None:
        while self._signals:
            self.trigger("signal", self._signals.pop(0))
        if self._plan.flight is not None:
            step_bytes, self._ring.step_bytes = self._ring.step_bytes, 0
            self._remarks.room(self.step_number, self._plan.flight, self._ring.size, step_bytes)
        scalars = self._scalars
        if self._capture.records:
            now = (self._guard.seconds, self._capture.seconds, self._ring.wait_s)
            hook_s, capture_s, wait_s = (after - before for after, before in zip(now, self._before, strict=True))
            step_s = time.perf_counter() - self._began
            cost = {"hook_s": hook_s, "capture_s": capture_s, "wait_s": wait_s, "step_s": step_s}
            scalars |= {f"hookrec/{name}": round(seconds, 7) for name, seconds in cost.items()}
            scalars["hookrec/ring_bytes"] = self._ring.high_water_bytes
            for name, seconds in cost.items():
                self._books[name] += seconds
            self._books["recorded_steps"] += 1
            if self._remarks.cost is None and self._plan.flight is None:
                plan = None if self._writer.goes_on else self._plan
                self._remarks.first_step(
                    self.step_number, self._capture.records, self._ring.step_bytes, step_s, self._writer.directory, plan
                )
        lines = self._ring.facts.get("scalars")
        if scalars and not (lines and lines[-1]["values"] is scalars):  # it is there if Ctrl-C came behind it
            self._add_scalars(self.step_number, scalars)
        self._scalars = {}
        self._ring.facts["commit"] = self.step_number
        if self._capture.ring_was_full:
            self._ring.facts["drop_tensors"] = True
        self._capture.records = 0
        self._ring.send()

    def _look_at_writer(self) -> None:
        """Send what waited for a device, and hear what the writer has to say."""
        self._ring.send_held()
        if self._ring.control.failed:
            raise WriterGone
        self._remarks.stopped(self.step_number, self._ring.control.stop_tensors)

    # The end.

    def end(self, how: str, detail: str | None) -> None:
        """Stop recording: send what is left, take every hook off, say goodbye. The writer seals the trace."""
        with self._capture.lock:
            if not self.active:
                return
            if how == "detached" and self.step_number == self.first_step and self._clock.strangers:
                warn(
                    "no step has ended: the optimizers that stepped hold no parameter of the model. Is another object "
                    "trained, such as a copy of it? Pass clock='forward' or clock='manual' if that is meant."
                )
            self.active = self._guard.alive = False
            for registration in self._registrations:
                registration.remove()
            self._clock.close()
            self._hooks.close()
            self._parameters.close()
            with contextlib.suppress(Exception):
                if how != "failed" and (self._capture.records or self._scalars or self._signals):
                    self._send_step()
            with contextlib.suppress(Exception):
                books = {name: round(value, 6) for name, value in self._books.items()}
                self._ring.facts["end"] = {"how": how, "detail": detail, "books": books}
                self._ring.send_last()

    def wait(self) -> None:
        """Wait until the writer has sealed the trace, and give the ring's memory back."""
        failed = self._writer.wait()
        self._capture.close()
        self._ring.release()
        if failed is not None and not self._failed:
            warn(f"the writer process failed: {failed}; `replay info` shows what is there.")

    def forget(self) -> None:
        """Be as if there had never been a recording, in a child that was forked from the training."""
        self.active = self._guard.alive = False
        self._clock.close()
        self._hooks.close()
        self._parameters.close()
        self._writer.forget()


def is_recorded(model: nn.Module) -> bool:
    """Whether a recording of the model is under way."""
    return any(
        recording.active and any(reference() is model for reference in recording._models.values())
        for recording in _recordings
    )


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (bound := reference()) is not None:
            bound(*args)

    return call


def _forget_all() -> None:
    for recording in list(_recordings):
        recording.forget()


# Workers of a DataLoader are forked with the model's hooks and our end of the socket.
os.register_at_fork(after_in_child=_forget_all)
