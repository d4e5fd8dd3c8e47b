"""Which plan each record follows: that of the last rule that matches its layer and kind, or the plan itself.

The hooks ask which kinds to leave out of a step, and the capture what to store of the rest. Neither is asked anything
where a plan has no rules.
"""

import difflib
import fnmatch
from collections.abc import Iterable
from typing import Any, Protocol, Self

from hookrec.plan import Plan


class HasNames(Protocol):
    """A module by its names, such as a `Layer`."""

    @property
    def name(self) -> str:
        """The first of them."""

    @property
    def aliases(self) -> list[str]:
        """The others."""


class Choices:
    """What a plan with rules wants of each layer. Asked under the lock of the capture, or by one thread.

    Args:
        plan: has rules.
        layers: all modules, whose further names rules may use as well.
    """

    def __init__(self, plan: Plan, layers: Iterable[HasNames]) -> None:
        self._plan = plan
        self._plans = [plan.by(rule) if rule.record else None for rule in plan.rules]
        self._found: dict[str, dict[str, tuple[Plan | None, int | None]]] = {}
        self.know(layers)

    @classmethod
    def of_plan(cls, plan: Plan, layers: Iterable[HasNames]) -> Self | None:
        """Return the choices of a plan; None if it has no rules."""
        return cls(plan, layers) if plan.rules else None

    def know(self, layers: Iterable[HasNames]) -> None:
        """Take the modules that there are now."""
        self._names = {layer.name: (layer.name, *layer.aliases) for layer in layers}
        self._found.clear()

    def plan_for(self, layer: str, kind: str) -> Plan | None:
        """Return the plan that records of a kind follow; None if there are to be none."""
        return self._of(layer).get(kind, (self._plan, None))[0]  # a late gradient may be of an earlier plan

    def left_out(self, layer: str, step: int) -> frozenset[str]:
        """Return the kinds of which the layer has no records in a step."""
        plans = self._of(layer).items()
        return frozenset(kind for kind, (plan, _) in plans if plan is None or not plan.samples(step))

    def samples(self, step: int) -> bool:
        """Whether anything may be recorded in a step."""
        return self._plan.samples(step) or any(plan is not None and plan.samples(step) for plan in self._plans)

    def why_silent(self, layer: str) -> str | None:
        """Return why a layer may have no record although it was called; None if no rule is to blame."""
        found = self._of(layer).values()
        numbers: set[Any] = {number for _, number in found}
        which = " and ".join(f"rules[{number}]" for number in sorted(numbers - {None}, key=int))
        if self.is_off(layer):
            return f"not recorded, by {which} of the plan"
        schedule = (self._plan.every, self._plan.steps)
        if None in numbers or any(plan is not None and (plan.every, plan.steps) == schedule for plan, _ in found):
            return None
        return f"it was not called in a step that {which} of the plan takes"

    def is_off(self, layer: str) -> bool:
        """Whether a layer has no records in any step."""
        return all(plan is None for plan, _ in self._of(layer).values())

    def unmatched(self, layers: Iterable[HasNames]) -> list[str]:
        """Return a sentence for each glob that matches none of the layers that may have records."""
        names = [name for layer in layers for name in (layer.name, *layer.aliases)]
        said = []
        for number, rule in enumerate(self._plan.rules):
            for glob in rule.layers:
                if "/" in glob and self._plan.ops:  # of operations, which are known when they run
                    continue
                if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                    near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[:3]
                    there = f"there are, for example, {', '.join(map(repr, near))}" if near else "there is none"
                    said.append(f"layers={glob!r} of rules[{number}] matches no recorded layer; {there}")
        return said

    def _of(self, layer: str) -> dict[str, tuple[Plan | None, int | None]]:
        found = self._found.get(layer)
        if found is None:
            names = self._names.get(layer, (layer,))
            found = self._found[layer] = {kind: self._decide(names, kind) for kind in self._plan.kinds}
        return found

    def _decide(self, names: tuple[str, ...], kind: str) -> tuple[Plan | None, int | None]:
        for number in reversed(range(len(self._plans))):
            if self._plan.rules[number].matches(names, kind):
                return self._plans[number], number
        return self._plan, None
