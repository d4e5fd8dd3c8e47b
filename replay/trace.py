"""A trace as its reader sees it: ranks joined, records found by step, layer, kind and call.

What is asked for and not there is told from what is there, so that a message can say what to ask for instead.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from replay import notebook
from replay.documents import read_identity, read_modules, read_notes, read_scalars, read_triggers
from replay.errors import NotRecorded, StepNotCommitted, TraceDamaged
from replay.filters import Names, Steps, check_globs, globs_of
from replay.format import EXPONENTS, EXPONENTS_KIND, KEPT, TRACE_FILE, WHY_NOT_KEPT, Stream
from replay.history import history
from replay.query import MODULES, Part, answer, answer_parts, modules_of
from replay.rank import Rank
from replay.ranks import ranks_of
from replay.records import Progress, check_rows
from replay.search import Search
from replay.selection import Selection

_SCALARS = pa.schema(
    [("rank", pa.int32()), ("step", pa.int64()), ("time", pa.float64()), ("name", pa.string()), ("value", pa.float64())]
)


def open(path: str | Path, attempt: int | None = None) -> "Trace":
    """Open a trace, also while it is being written, or after a crash.

    Args:
        path: the directory.
        attempt: of a training that was resumed, show what there was up to this attempt, of `Trace.attempts`; None
            for the latest. Of each step the last of these attempts counts that went on from it or from before it.

    Raises:
        NotRecorded: there is no such attempt.
        TraceNotFound: there is no trace at the path.
        TraceTooNew: a newer version of the format.
        TraceDamaged: a file is not what the format says.
    """
    return Trace(Path(path), attempt)


class Trace:
    """What was recorded of one training. Made by `open`.

    Attributes:
        path: the directory.
        identity: `trace.json`: when, where and how the trace was made.
        attempt: the last attempt that is shown; None for the latest.
    """

    def __init__(self, path: Path, attempt: int | None = None) -> None:
        self.path = path
        self.attempt = attempt
        self.identity = read_identity(path)
        self._ranks: dict[int, Rank] = {}
        self.refresh()
        if not self._ranks:
            raise TraceDamaged(f"{path} has a {TRACE_FILE} and no rank in it: what was recorded has been moved away.")
        last = max(rank.log.attempts.last for rank in self._ranks.values())
        if attempt is not None and not 0 <= attempt <= last:
            there = f"the attempts 0 to {last}" if last else "one attempt, 0: it was not resumed"
            raise NotRecorded(f"{path} has no attempt {attempt}; it has {there}.")

    def refresh(self) -> Self:
        """Look for steps that were committed since the last look."""
        for number, directory in ranks_of(self.path).items():
            if number not in self._ranks:
                self._ranks[number] = Rank(directory, self.attempt)
            self._ranks[number].refresh()
        return self

    def __repr__(self) -> str:
        return f"<Trace {str(self.path)!r}: {notebook.trace_in_words(self)}>"

    def _repr_html_(self) -> str:
        return notebook.trace_as_html(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for rank in self._ranks.values():
            rank.store.close()

    @property
    def ranks(self) -> list[int]:
        """The processes that recorded."""
        return sorted(self._ranks)

    @property
    def steps(self) -> list[int]:
        """The steps that are committed."""
        return sorted({int(step) for rank in self._ranks.values() for step in rank.steps()})

    def steps_since(self, since: int | None, background: int) -> tuple[int, NDArray[np.int64]]:
        """Return the steps from one on, and some before it.

        Args:
            since: the step; None for all.
            background: how many recorded steps before it.

        Returns:
            How many recorded steps there are before these, and these, shape `(steps,)`.
        """
        steps = np.asarray(self.steps, np.int64)
        earlier = 0 if since is None else max(0, int(np.searchsorted(steps, since)) - background)
        return earlier, steps[earlier:]

    @property
    def layers(self) -> list[str]:
        """The layers that have records, in the order in which they first ran."""
        return list(dict.fromkeys(stream.layer for rank in self._ranks.values() for stream in rank.streams))

    @property
    def kinds(self) -> list[str]:
        """The kinds that have records."""
        return list(dict.fromkeys(stream.kind for rank in self._ranks.values() for stream in rank.streams))

    @property
    def status(self) -> str:
        """Return "live" while it is written, "sealed" when it is finished, "torn" if its writer died."""
        states = {rank.status() for rank in self._ranks.values()}
        return next((state for state in ("live", "torn") if state in states), "sealed")

    @property
    def endings(self) -> dict[int, dict[str, Any]]:
        """How each sealed rank ended: `end.json`."""
        return {n: end for n, rank in self._ranks.items() if (end := rank.end()) is not None}

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts of each rank; more than one where the training was resumed in this trace.

        Each with rank, attempt, first_step and last_step of what it committed (None if that is nothing), steps,
        superseded (how many of these count no more), ended (its `end.json`, None if it is live or torn), and, of all
        but the first, time, plan and provenance.
        """
        return [one for number, rank in sorted(self._ranks.items()) for one in history(rank.directory, number)]

    @property
    def count(self) -> int:
        """How many records are committed, but those of kind `exponents`: as many as `records` has."""
        return sum(rank.count for rank in self._ranks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept, those of earlier attempts as well."""
        recorded = sum(
            int(pa.compute.sum(rank.whole_log().table(["nbytes"])["nbytes"]).as_py() or 0)
            for rank in self._ranks.values()
        )
        return recorded - sum(rank.dropped.nbytes for rank in self._ranks.values())

    @property
    def stored_in_part(self) -> list[str]:
        """Streams of which first rows or values in another dtype are stored, in words; statistics are of the whole."""
        return [
            f"{stream.kind} of {stream.layer or '(root)'}: {stream.dtype} {_by(stream.shape)} of {dtype} {_by(shape)}"
            for number in self.ranks
            for stream in self._ranks[number].streams
            for dtype, shape in (stream.whole,)
            if (dtype, shape) != (stream.dtype, stream.shape)
        ]

    @property
    def not_kept(self) -> dict[str, int]:
        """How many records have statistics and no tensor, by the reason."""
        found: dict[str, int] = {}
        for rank in self._ranks.values():
            table = rank.log.table(["stream", "kept", "row"])
            gone = int(np.sum(table["kept"].to_numpy() == KEPT)) - int(np.sum(rank.dropped.kept(table)))
            if gone:
                found[str(rank.dropped)] = found.get(str(rank.dropped), 0) + gone
            for reason, count in zip(*np.unique(table["kept"], return_counts=True), strict=True):
                if reason != KEPT:
                    why = WHY_NOT_KEPT.get(int(reason), "not kept")
                    found[why] = found.get(why, 0) + int(count)
        return found

    @property
    def notes(self) -> list[dict[str, Any]]:
        """What could not be recorded, and why."""
        return [note for rank in self._ranks.values() for note in read_notes(rank.directory, self.attempt)]

    @property
    def triggers(self) -> list[dict[str, Any]]:
        """Which triggers of flight mode have fired: rank, step, by, why, detail and first_step."""
        return [
            {"rank": n, **line}
            for n, rank in self._ranks.items()
            for line in read_triggers(rank.directory, self.attempt)
        ]

    @property
    def directories(self) -> dict[int, Path]:
        """The directory of each rank."""
        return {number: rank.directory for number, rank in self._ranks.items()}

    def modules(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Return the modules of the model in the order of `named_modules()`, as `model.json` has them.

        Args:
            rank: which process; the first if None.
        """
        return read_modules(self._ranks[min(self._ranks) if rank is None else rank].directory)

    @property
    def silent(self) -> list[tuple[str, str]]:
        """Leaf modules without a record, each with the reason as far as it is known."""
        heard = set(self.layers)
        found = []
        for rank in self._ranks.values():
            for module in read_modules(rank.directory):
                if module["name"] not in heard and (module["recorded"] or "why" in module):
                    found.append((module["name"], module.get("why", "it was never called")))
        return list(dict.fromkeys(found))

    def scalars(self) -> pa.Table:
        """Return what was logged: columns rank, step, time (seconds since 1970), name, value."""
        ranks = self._ranks.items()
        rows = [(n, *row) for n, rank in ranks for row in read_scalars(rank.directory, attempt=self.attempt)]
        columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(_SCALARS)
        return pa.table([pa.array(c, t) for c, t in zip(columns, _SCALARS.types, strict=True)], schema=_SCALARS)

    def tensor(
        self, step: int, layer: str, kind: str = "output", *, call: int = 0, path: str = "", rank: int = 0
    ) -> NDArray[Any]:
        """Return one recorded tensor.

        Args:
            step: optimizer step, one of `steps`.
            layer: qualified module name, one of `layers`.
            kind: "output", or "grad_output" for the gradient of the loss with respect to it.
            call: which use of the layer within the step, from 0.
            path: where in a nested output the tensor sits; of an input its position or keyword, of a parameter its
                name.
            rank: which process.

        Returns:
            Array of the shape and dtype of the recorded tensor, or of what the plan stores of it: its first rows, or
            its values in another dtype. A gradient has the unit of loss per unit of output; a
            loss averaged over the batch is not rescaled.

        Raises:
            StepNotCommitted: the step is not in the trace. Call `refresh` if it is live.
            NotRecorded: the step is there and this record is not, or only its statistics are.
            TraceDamaged: the bytes are not those that were committed.
        """
        if rank not in self._ranks:
            raise NotRecorded(f"{self.path} has no rank {rank}; it has {', '.join(map(str, self.ranks)) or 'none'}.")
        part = self._ranks[rank]
        if (places := part.places(layer, kind, path)) is not None:
            first, last = np.searchsorted(places.step, (step, step + 1))
            hits = first + np.flatnonzero(places.call[first:last] == call)
            if len(hits):
                return part.tensor(places, int(hits[-1]))
        raise self._not_found(part, step, layer, kind, call, path)

    def exponents(
        self, step: int, layer: str, kind: str = "output", *, call: int = 0, path: str = "", rank: int = 0
    ) -> NDArray[np.int64]:
        """Return how many elements of one recorded tensor there are of each binary exponent, as the recorder counted.

        The exponent of x is that e for which 2**e <= abs(x) < 2**(e + 1). What is 0, NaN or infinite has none; how many
        those are is in the statistics of the record. Arguments and errors are those of `tensor`; there are counts where
        `exponents=True` was in the plan.

        Returns:
            Shape `(279,)`: element i is the number of those whose exponent is i - 150. The first counts all smaller
            ones too, and the last all larger ones; only float64 has such.
        """
        where = f"{kind}.{path}" if path else kind
        counts = self.tensor(step, layer, EXPONENTS_KIND, call=call, path=where, rank=rank)
        if counts.shape != (len(EXPONENTS),):
            raise TraceDamaged(f"The exponents of {kind} of layer {layer!r} in {self.path} have shape {counts.shape}.")
        return counts.astype(np.int64)

    def _not_found(self, part: Rank, step: int, layer: str, kind: str, call: int, path: str) -> Exception:
        steps = part.steps()
        if step not in steps:
            last = f"its last committed step is {int(steps[-1])}" if len(steps) else "it has no committed step yet"
            return StepNotCommitted(
                f"{self.path} has no step {step}; {last}. If recording is under way, look again later (in Python: "
                "refresh())."
            )
        there = part.log.table(["stream", "call"], pa.compute.field("step") == step)
        check_rows(there, len(part.streams), part.directory)
        found = [(part.streams[row["stream"]], row["call"]) for row in there.to_pylist()]
        same = [f"{s.kind} (call {c}{f', path {s.path!r}' if s.path else ''})" for s, c in found if s.layer == layer]
        wanted = f"{kind} (call {call}{f', path {path!r}' if path else ''}) for layer {layer!r}"
        if same:
            have = f"it has {', '.join(same[:8])}"
        else:
            near = difflib.get_close_matches(layer, self.layers, n=3, cutoff=0.3) or self.layers[:3]
            have = f"there are layers such as {', '.join(map(repr, near))}"
        return NotRecorded(
            f"Step {step} of {self.path} has no {wanted}; {have}. Run `replay ls {self.path}` to list what is there."
        )

    def records(
        self,
        layers: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        where: str | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Return records with their statistics, in the order of execution.

        Args:
            layers: glob or globs over layer names.
            kinds: glob or globs over kinds; None for all but `exponents`, which is no kind of values.
            steps: a step, a slice of steps, or several steps.
            where: a SQL condition over the columns, such as "n_nan > 0 and kind = 'output'". In SQL, NaN is greater
                than any number: `l2 > 10` holds of a tensor without a finite element, and `l2 < 10` does not.
            limit: how many are wanted, the first ones; all if None.

        Returns:
            Columns rank, step, layer, kind, call, path, micro, mode, dtype, shape, kept, and the statistics.

        Raises:
            BadQuery: a filter cannot be understood, or a glob matches nothing that there is.
        """
        return self._search(layers, kinds, steps).records(where, limit)

    def record_parts(
        self,
        layers: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        where: str | None = None,
        progress: Progress | None = None,
    ) -> Iterator[pa.Table]:
        """Yield what `records` returns in parts, one at least, of which few are in memory at once.

        Where a condition looks at more than a record at a time, as one with a subquery does, all are one part.

        Args:
            layers: as of `records`.
            kinds: as of `records`.
            steps: as of `records`.
            where: as of `records`.
            progress: is told how many records were looked at, and how many there are to look at.
        """
        return self._search(layers, kinds, steps).record_parts(where, progress)

    def column_parts(
        self,
        columns: Sequence[str],
        layers: Names = None,
        kinds: Names = None,
        where: str | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns of some records in parts, each with its rank, of which few are in memory at once.

        Args:
            columns: of the log: `stream`, which is its number, `step`, `call`, `micro`, and the statistics.
            layers: as of `records`.
            kinds: as of `records`.
            where: as of `records`.
            progress: as of `record_parts`.
        """
        return self._search(layers, kinds, None).column_parts(columns, where, progress)

    def scan(self, columns: Sequence[str], kinds: Names = None, steps: Steps = None) -> Iterator[tuple[int, pa.Table]]:
        """Yield columns of records in parts, of which few are in memory at once, each with its rank.

        Args:
            columns: of the log: `stream`, the number of the record's stream in `streams`, `step`, `call`, `micro`,
                `mode`, by its number, and the statistics.
            kinds: glob or globs over kinds.
            steps: as of `records`.
        """
        return self._search(None, kinds, steps).scan(columns)

    def columns(
        self,
        columns: str,
        layers: Names = None,
        kinds: Names = None,
        steps: Steps = None,
        where: str | None = None,
        further: str = "",
    ) -> pa.Table:
        """Return what SQL makes of some records, without the rest of them in memory.

        Args:
            columns: in DuckDB's SQL, over the columns of the table `records`; see `sql`.
            layers: glob or globs over layer names.
            kinds: glob or globs over kinds.
            steps: as of `records`.
            where: as of `records`.
            further: what follows the condition, such as `group by`.
        """
        return self._search(layers, kinds, steps).columns(columns, where, further)

    def streams(self, rank: int) -> Sequence[Stream]:
        """Return the streams of a rank, by their ids."""
        return self._ranks[rank].streams

    def _search(self, layers: Names, kinds: Names, steps: Steps) -> Search:
        found = globs_of(layers), globs_of(kinds)
        check_globs("layer", found[0], self.layers if found[0] else (), self.path)
        check_globs("kind", found[1], self.kinds if found[1] else (), self.path)
        return Search(dict(sorted(self._ranks.items())), *found, steps)

    def sql(self, query: str) -> pa.Table:
        """Return what a query in DuckDB's SQL finds.

        Tables: `records`, the columns of `records()` and `nbytes`, `stream`; `streams`, one row a stream; `scalars`, as
        of `scalars()`; `modules`, one row a module. The function `tensor(records)` gives the values of a record as a
        list of doubles (of a complex number its absolute value), null where no tensor was kept:

            select step, list_aggregate(tensor(r), 'quantile_cont', 0.99) from records r where layer = 'fc1'

        A query neither reads nor writes files. Where it is silent about the order of rows, there is none.

        Args:
            query: a statement that gives rows, such as `select`, `from`, `describe`, `summarize`.

        Returns:
            The columns that the query names. Sums of integers are int64 where they fit, else float64.

        Raises:
            BadQuery: the query cannot be answered; the message has DuckDB's reason and the columns that are there.
            TraceDamaged: the log, or a tensor that the query looks at, cannot be read.
        """
        return answer(query, *self._tables_of_sql(), self.tensor)

    def sql_parts(self, query: str) -> Iterator[pa.Table]:
        """Yield what `sql` returns in parts, one at least, as they are found: more than fits into memory."""
        return answer_parts(query, *self._tables_of_sql(), self.tensor)

    def _tables_of_sql(self) -> tuple[list[Part], dict[str, tuple[pa.Schema, Callable[[], pa.Table]]]]:
        parts = [rank.part(number, rank.datasets(None, None, None)) for number, rank in sorted(self._ranks.items())]
        modules = {rank: self.modules(rank) for rank in self.ranks}
        return parts, {"scalars": (_SCALARS, self.scalars), "modules": (MODULES, lambda: modules_of(modules))}

    def select(
        self, layers: Names = None, kinds: Names = None, steps: Steps = None, where: str | None = None
    ) -> Selection:
        """Return a selection of records; arguments and errors are those of `records`."""
        self._search(layers, kinds, steps)  # says what there is not
        return Selection(self, layers, kinds, steps, where)

    def first(self, where: str) -> dict[str, Any] | None:
        """Return the first record, in the order of execution, for which a SQL condition holds."""
        rows: list[dict[str, Any]] = self.records(where=where, limit=1).to_pylist()
        return rows[0] if rows else None


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
