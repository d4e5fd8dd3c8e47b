"""How an export is divided into folders that readers of datasets know: `by_layer=fc1/`, `from_step=300/`.

The names of the keys are none of the columns': readers make numbers of what looks like one, and layers of a
`Sequential` are called `0` and `1`. So each file has all of its columns, of their own types, and the folder says it
once more for readers who choose files by it.
"""

import hashlib
import urllib.parse
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute

from replay.errors import BadQuery

_LONGEST = 200
_ROOT = "(root)"
"""For the empty name, which readers would take for null; a null among names is more than some of them can bear."""


def divided(table: pa.Table, partition: str) -> Iterator[tuple[str, pa.Table]]:
    """Return the records by the name of the folder that they belong in, each part in its order.

    Args:
        table: plain records.
        partition: "layer", or "step:N" for a folder N steps.

    Raises:
        BadQuery: the partition cannot be understood.
    """
    what, _, number = partition.partition(":")
    if what == "layer" and not number:
        return _by_layer(table)
    if what == "step" and number.isdecimal() and 0 < int(number) < 2**62:
        return _by_steps(table, int(number))
    raise BadQuery(f"A partition is 'layer', or 'step:100' for a file a hundred steps; {partition!r} is neither.")


def _by_layer(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    taken = set()
    for layer in table["layer"].unique().to_pylist():
        name = urllib.parse.quote(layer or _ROOT, safe="")
        if len(name) > _LONGEST:  # file systems take 255 bytes
            name = f"sha256-{hashlib.sha256(layer.encode()).hexdigest()}"
        while name in taken:
            name += "~"
        taken.add(name)
        yield f"by_layer={name}", table.filter(pa.compute.equal(table["layer"], layer))


def _by_steps(table: pa.Table, steps: int) -> Iterator[tuple[str, pa.Table]]:
    first = table["step"].to_numpy() // steps * steps
    for begin in np.unique(first).tolist():
        yield f"from_step={begin}", table.filter(pa.array(first == begin))
