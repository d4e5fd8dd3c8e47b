"""How a divergence is told: the first record that differs, in a sentence that says what else is known of its layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay.tolerance import GROWTH


@dataclass(frozen=True)
class Divergence:
    """A record of A that is not what its partner in B is.

    Attributes:
        rank: which process of A.
        step: the step, of A.
        layer: the layer, as A names it.
        layer_b: as B names it.
        kind: what of the layer.
        call: which use of the layer within the step.
        path: where in a nested value.
        max_abs: largest absolute difference; NaN where only statistics were compared.
        relative: l2(a - b) / l2(a), likewise.
        where: index of the largest difference, or None.
        error: what was held against the tolerance, see `replay.tolerance`.
        tolerance: what was allowed.
        before: the largest error that was within tolerance before it.
        note: what is to be said of this record, such as other shapes.
        inputs: "agree", "differ", or "were not recorded".
        parameters: likewise; empty where the layer has none.
    """

    rank: int
    step: int
    layer: str
    layer_b: str
    kind: str
    call: int
    path: str
    max_abs: float
    relative: float
    where: tuple[int, ...] | None
    error: float
    tolerance: float
    before: float
    note: str
    inputs: str
    parameters: str

    def __str__(self) -> str:
        return f"first divergence: {self._place()}: {self._size()}; {self._around()}"

    def _place(self) -> str:
        details = [self.kind]
        if self.path:
            details.append(f"path {self.path!r}")
        if self.call:
            details.append(f"call {self.call}")
        if self.rank:
            details.append(f"rank {self.rank}")
        name = repr(self.layer) if self.layer else "(the root)"
        other = f", {self.layer_b!r} in B" if self.layer_b != self.layer else ""
        return f"step {self.step}, layer {name}{other} ({', '.join(details)})"

    def _size(self) -> str:
        said = [self.note] if self.note else []
        if math.isfinite(self.error) and not math.isnan(self.max_abs):
            at = f" at {list(self.where)}" if self.where is not None else ""
            said.append(f"max abs {self.max_abs:.3g}{at}, relative {self.relative:.3g}")
        if math.isfinite(self.error):
            if math.isnan(self.relative):
                said.append(f"error {self.error:.3g}")
            elif self.relative <= self.tolerance:
                said.append(f"error {self.error:.3g} in single elements")
            said.append(f"tolerance {self.tolerance:.2g}")
        return ", ".join(said)

    def _around(self) -> str:
        if self.error <= GROWTH * self.before:
            return (
                f"the error has grown by and by, the largest before it is {self.before:.2g}, so no single layer is to "
                "blame: this is what rounding has become"
            )
        said = []
        if self.kind == "output":
            said.append(f"its inputs {self.inputs}")
            if self.parameters:
                said.append(f"its parameters {self.parameters}")
            if self.inputs == "agree" and self.parameters in ("agree", ""):
                said.append("so it is the layer itself that computes something else")
        elif self.kind == "input":
            said.append("what leads to it, from the batch or from the layers that ran before, is something else")
        elif self.kind.startswith("grad_"):
            said.append("a gradient comes from the backward pass of what takes this output, or of the loss")
        before = f"differs by at most {self.before:.2g}" if self.before else "is equal"
        return ", ".join([*said, f"what was compared before it {before}"])


def first_divergence(rows: Sequence[Mapping[str, Any]], bare: Callable[[str], bool]) -> Divergence | None:
    """Return the first of a step's rows that is out of tolerance, with what the others say of its layer.

    Args:
        rows: of one step and rank, in the order of execution; the columns of `Diff.rows`, `before` and `order`.
        bare: whether a layer is known to have no parameters.
    """
    row = next((row for row in rows if not row["within"]), None)
    if row is None:
        return None
    of_layer = [other for other in rows if other["layer_a"] == row["layer_a"] and other is not row]
    inputs = [other for other in of_layer if other["kind"] == "input" and other["call"] == row["call"]]
    parameters = [other for other in of_layer if other["kind"] == "param"]
    return Divergence(
        layer=row["layer_a"],
        where=None if row["where"] is None else tuple(row["where"]),
        inputs=_agree(inputs),
        parameters="" if not parameters and bare(row["layer_a"]) else _agree(parameters),
        **{name: row[name] for name in ("rank", "step", "layer_b", "kind", "call", "path", "max_abs", "relative")},
        **{name: row[name] for name in ("error", "tolerance", "before", "note")},
    )


def _agree(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "were not recorded"
    differing = [str(row["path"]) for row in rows if not row["within"]]
    return f"differ ({', '.join(differing)})" if differing else "agree"
