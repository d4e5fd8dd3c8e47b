"""How the records of a step and place become one number: as if their tensors were one.

Records are added up in the order of execution, part after part, so a result is the same to the last bit however many
parts they are read in.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from replay.format import MODES, STATISTICS
from replay.passes import Passes
from replay.series import Bools, Floats

COUNTS = STATISTICS[:5]
"""Statistics that are added up."""
NOT_FINITE = STATISTICS[1:4]

_NEEDED = {"l2": ("l2", "numel"), "mean": ("mean", "numel"), "std": ("std", "mean", "numel")}


class Cells:
    """The statistics of the records of a kind, arrays of shape `(steps, places)`.

    Args:
        passes: the records.
        kind: which of them.
        steps: shape `(steps,)`: their steps, sorted.
        column: shape `(origins,)`: the column of each origin; -1 for those that are left out.
        in_training: shape `(origins,)`: whether only records of training count.
    """

    def __init__(
        self, passes: Passes, kind: str, steps: NDArray[np.int64], column: NDArray[np.int64], in_training: Bools
    ) -> None:
        self._passes = passes
        self._kind = kind
        self._steps = steps
        self._column = column
        self._in_training = in_training
        self.shape = len(steps), int(column.max(initial=-1)) + 1

    def __getitem__(self, name: str) -> Floats:
        if name in COUNTS or self._single:
            grid = np.zeros(self.shape[0] * self.shape[1])
            for cell, (values,) in self._read(name):
                if name in COUNTS:
                    np.add.at(grid, cell, values.astype(np.float64))
                else:
                    grid[cell] = values
        else:
            grid = self._joined(name)
        grid[self._count == 0] = np.nan
        if name not in COUNTS:
            grid[self._not_finite] = np.nan
        return grid.reshape(self.shape)

    def _read(self, *names: str) -> Iterator[tuple[NDArray[np.int64], Sequence[Floats]]]:
        """Yield the cell of each record that counts, by number, and statistics of it, in parts."""
        train = MODES.index("train")
        for part in self._passes.read(["step", "mode", *names], self._kind):
            column = self._column[part["origin"]]
            rows = np.flatnonzero((column >= 0) & (np.equal(part["mode"], train) | ~self._in_training[part["origin"]]))
            cell = np.searchsorted(self._steps, part["step"][rows]) * self.shape[1] + column[rows]
            yield cell, [part[name][rows] for name in names]

    @cached_property
    def _count(self) -> NDArray[np.int32]:
        count = np.zeros(self.shape[0] * self.shape[1], np.int32)
        for cell, _ in self._read():
            np.add.at(count, cell, 1)
        return count

    @property
    def _single(self) -> bool:
        return bool(np.all(self._count <= 1))

    @cached_property
    def _not_finite(self) -> Bools:
        found = np.zeros(self.shape[0] * self.shape[1], bool)
        for cell, counts in self._read(*NOT_FINITE):
            found[cell[sum(counts) > 0]] = True
        return found

    def _joined(self, name: str) -> Floats:
        size = self.shape[0] * self.shape[1]
        needed = _NEEDED.get(name, (name,))
        if name in ("min", "max", "absmax"):
            join, least = (np.fmin, np.inf) if name == "min" else (np.fmax, -np.inf)
            grid = np.full(size, least)
            for cell, (values,) in self._read(*needed):
                join.at(grid, cell, values)
            return grid
        grid = np.zeros(size)
        if name == "l2":
            for cell, (values, numel) in self._read(*needed):
                np.hypot.at(grid, cell, np.where(numel > 0, values, 0))
            return grid
        # A tensor without elements has no mean, and no weight either.
        total = np.zeros(size)
        for cell, (mean, numel) in self._read(*_NEEDED["mean"]):
            np.add.at(total, cell, numel.astype(np.float64))
            np.add.at(grid, cell, numel * np.where(numel > 0, mean, 0))
        np.maximum(total, 1, out=total)
        grid /= total
        if name == "mean":
            return grid
        squares = np.zeros(size)
        for cell, (std, mean, numel) in self._read(*needed):
            apart = np.where(numel > 0, mean, 0) - grid[cell]
            np.add.at(squares, cell, numel * (np.where(numel > 0, std, 0) ** 2 + apart**2))
        return np.sqrt(squares / total)
