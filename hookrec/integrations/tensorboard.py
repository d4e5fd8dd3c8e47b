"""How the statistics of a trace look as charts of TensorBoard: a chart a layer, in a group a kind and statistic.

Read from the trace, while it is written or afterwards, so the training does not know of it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

import replay
from hookrec.errors import HookrecError
from replay.command_line import Unanswered, filter_options, json_option, print_json, say, trace_argument
from replay.filters import Names
from replay.format import STATISTICS
from replay.ranks import name_of

DEFAULT_STATISTICS = ("l2", "absmax", "n_nan")


def export(
    trace: replay.Trace | str | Path,
    log_dir: str | Path,
    *,
    layers: Names = None,
    kinds: Names = None,
    where: str | None = None,
    statistics: Sequence[str] = DEFAULT_STATISTICS,
    follow: bool = False,
) -> int:
    """Write statistics and scalars of a trace as events of TensorBoard; return how many numbers.

    A chart is named by kind and statistic, then by layer, with `:path` where the layer returns several tensors and `#2`
    for its third call in a step. Of several ranks each is a run of its own.

    Args:
        trace: a trace, or where it is.
        log_dir: the folder for the events, new or empty.
        layers: glob or globs over layer names.
        kinds: glob or globs over kinds.
        where: a SQL condition over the columns of records.
        statistics: which.
        follow: go on until the trace is sealed.

    Raises:
        HookrecError: TensorBoard is not installed, the folder holds something, or there is no such statistic.
        ReplayError: the trace cannot be read, or the condition not be understood.
    """
    for name in statistics:
        if name not in STATISTICS:
            raise HookrecError(f"There is no statistic {name!r}; there are {', '.join(STATISTICS)}.")
    opened = trace if isinstance(trace, replay.Trace) else replay.open(trace)
    log_dir = Path(log_dir)
    if log_dir.exists() and (not log_dir.is_dir() or any(log_dir.iterdir())):
        raise HookrecError(f"{log_dir} holds something already, and would be mixed with it. Name a new folder.")
    tables: Iterable[Any] = (
        replay.follow(opened, layers=layers, kinds=kinds, where=where)
        if follow
        else [opened.records(layers, kinds, where=where)]
    )
    with _Events(log_dir) as events:
        for records in tables:
            events.take_scalars(opened)
            for row in records.select([*_KEY, *statistics]).to_pylist():
                call = f"#{row['call']}" if row["call"] else ""
                path = f":{row['path']}" if row["path"] else ""
                for name in statistics:
                    tag = f"{row['kind']} {name}/{row['layer'] or '(root)'}{path}{call}"
                    events.add(row["rank"], tag, row[name], row["step"])
        events.take_scalars(opened.refresh())
    return events.count


_KEY = ("rank", "step", "layer", "kind", "call", "path")


class _Events:
    """Writes events, and remembers which scalars of the trace it has had."""

    def __init__(self, log_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise HookrecError(f"TensorBoard is needed ({error}). Install it: pip install tensorboard") from None
        self._make = SummaryWriter
        self._log_dir = log_dir
        self._writers: dict[int, Any] = {}
        self._times: dict[tuple[int, int], float] = {}
        self._scalars = 0
        self.count = 0

    def __enter__(self) -> "_Events":
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def take_scalars(self, trace: replay.Trace) -> None:
        """Write the scalars that are new; they also tell at which time a step was."""
        for rank in trace.ranks:
            self._writer(rank, alone=len(trace.ranks) == 1)
        rows = trace.scalars().slice(self._scalars).to_pylist()
        self._scalars += len(rows)
        for row in rows:
            self._times[row["rank"], row["step"]] = row["time"]
            self.add(row["rank"], row["name"], row["value"], row["step"])

    def add(self, rank: int, tag: str, value: float, step: int) -> None:
        """Write a number."""
        self._writer(rank, alone=False).add_scalar(tag, value, step, self._times.get((rank, step)))
        self.count += 1

    def _writer(self, rank: int, *, alone: bool) -> Any:
        if rank not in self._writers:
            self._writers[rank] = self._make(str(self._log_dir if alone else self._log_dir / name_of(rank)))
        return self._writers[rank]


@click.command("tensorboard")
@trace_argument
@click.argument("log_dir", type=click.Path(path_type=Path))
@filter_options
@click.option(
    "--stat", "statistics", multiple=True, default=DEFAULT_STATISTICS, show_default=True, help="May be repeated."
)
@click.option("--follow", is_flag=True, help="Go on until the trace is sealed.")
@json_option
def command(
    trace: Path,
    log_dir: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    statistics: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> None:
    """Write the statistics and scalars of a trace for TensorBoard, a chart a layer: tensorboard --logdir LOG_DIR.

    Needs torch and tensorboard. Ends with 2 where they are missing, there is no trace, or LOG_DIR holds something.
    """
    try:
        count = export(
            trace,
            log_dir,
            layers=layers or None,
            kinds=kinds or None,
            where=where,
            statistics=statistics,
            follow=follow,
        )
    except HookrecError as error:
        raise Unanswered(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{log_dir} cannot be written: {error.strerror}. Name another folder.") from None
    if as_json:
        print_json({"path": str(log_dir), "trace": str(trace), "numbers": count})
        return
    say(f"wrote {count:,} numbers. Next: tensorboard --logdir {log_dir}", err=True)
