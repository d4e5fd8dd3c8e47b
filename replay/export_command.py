"""The command `replay export`: records and tensors as files of other programs."""

import json
import sys
from pathlib import Path

import click

import replay
from replay.command_line import (
    attempt_option,
    filter_options,
    json_option,
    print_json,
    progress,
    say,
    trace_argument,
)
from replay.errors import BadQuery

_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "npz": (".npz",),
    "safetensors": (".safetensors",),
}
_OF_OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".npy", ".h5", ".zarr", ".xlsx")

_HELP = """\b
Examples:
  replay export runs/a out.parquet --kinds grad_output
  replay export runs/a out.parquet --tensors --layers 'blocks.0.*'
  replay export runs/a out.npz --layers fc1 --where "step between 100 and 199"
  replay export runs/a out --partition step:1000
  replay export runs/a out --follow                 goes on until the training ends, or Ctrl-C
  replay export runs/a out.parquet --json           path, format, records, files and bytes of what was written

\b
Exit status:
  0    what was asked for is there, whole
  1    with --follow: the writer of the trace died; the files that were said are there. Else: interrupted
  2    it is not, and nothing of it: the command is wrong, the trace cannot be read, the file not be written
  130  --follow was interrupted; the same command goes on behind the last file

With --follow, --json prints a line a file: path, format, records, taken_back (records that it had and that do not count
any more, since the training was resumed), bytes. docs/questions/tables.md shows how other programs read these files."""


@click.command(epilog=_HELP)
@trace_argument
@click.argument("out", type=click.Path(path_type=Path))
@filter_options
@click.option(
    "--format",
    "format_",
    type=click.Choice(list(_SUFFIXES)),
    help="Records with statistics: parquet, arrow. Tensors: npz, safetensors. If not given, by the ending of OUT.",
)
@click.option("--tensors", is_flag=True, help="Add a column with the values of each tensor.")
@click.option("--partition", metavar="layer|step:N", help="OUT is a folder, with a file a layer or N steps (parquet).")
@click.option(
    "--follow", is_flag=True, help="OUT is a folder that gets a file a look while the training runs (parquet)."
)
@click.option(
    "--poll",
    "poll_s",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.01),
    help="With --follow, seconds between two looks.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@attempt_option
@json_option
def export(
    trace: Path,
    out: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    format_: str | None,
    tensors: bool,
    partition: str | None,
    follow: bool,
    poll_s: float,
    overwrite: bool,
    attempt: int | None,
    as_json: bool,
) -> None:
    """Write records to a file, one row a record, for pandas, polars, DuckDB, Spark; or tensors, for numpy and torch."""
    into_folder = partition is not None or follow
    chosen = _format_of(out, format_, into_folder=into_folder)
    if follow and partition is not None:
        raise click.UsageError("--follow has a file a look; it takes no --partition.")
    if into_folder and overwrite:
        raise click.UsageError("--overwrite replaces a file, no folder. Remove the folder first.")
    if into_folder and chosen != "parquet":
        raise click.UsageError(f"A folder of files is of Parquet, not {chosen}.")
    if follow and attempt is not None:
        raise click.UsageError("--follow goes with the latest attempt; it takes no --attempt.")
    opened = replay.open(trace, attempt)
    if follow:
        _follow(opened, out, layers, kinds, where, tensors=tensors, poll_s=poll_s, as_json=as_json)
        return
    selection = opened.select(layers or None, kinds or None, where=where)
    with progress("records") as tell:
        if chosen == "parquet":
            count = selection.to_parquet(out, tensors=tensors, overwrite=overwrite, partition=partition, progress=tell)
        elif chosen == "arrow":
            count = selection.to_arrow(out, tensors=tensors, overwrite=overwrite, progress=tell)
        elif chosen == "npz":
            count = selection.to_npz(out, overwrite=overwrite, progress=tell)
        else:
            count = selection.to_safetensors(out, overwrite=overwrite, progress=tell)
    if as_json:
        files = [path for path in out.rglob("*") if path.is_file()] if out.is_dir() else [out]
        nbytes = sum(path.stat().st_size for path in files)
        print_json({"path": str(out), "format": chosen, "records": count, "files": len(files), "bytes": nbytes})
    else:
        say(f"wrote {out}: {count:,} records", err=True)


def _format_of(out: Path, given: str | None, *, into_folder: bool) -> str:
    suffix = out.suffix.lower()
    by_name = next((name for name, endings in _SUFFIXES.items() if suffix in endings), None)
    if given is not None and by_name not in (None, given):
        raise BadQuery(f"{out} is named as {by_name} and would hold {given}. Name it {out.with_suffix('.' + given)}.")
    if not into_folder and given is None and suffix in _OF_OTHERS:
        raise BadQuery(f"{out} would hold Parquet. Name it so: {out.with_suffix('.parquet')}.")
    return given or by_name or "parquet"


def _follow(
    trace: replay.Trace,
    out: Path,
    layers: tuple[str, ...],
    kinds: tuple[str, ...],
    where: str | None,
    *,
    tensors: bool,
    poll_s: float,
    as_json: bool,
) -> None:
    from replay.growing import grow

    parts = grow(trace, out, layers=layers or None, kinds=kinds or None, where=where, tensors=tensors, poll_s=poll_s)
    try:
        for grown in parts:
            if as_json:
                facts = {"path": str(grown.path), "format": "parquet", "records": grown.records}
                facts |= {"taken_back": grown.taken_back, "bytes": grown.path.stat().st_size}
                click.echo(json.dumps(facts))
                continue
            taken_back = f", {grown.taken_back:,} were taken back" if grown.taken_back else ""
            say(f"{grown.path}: {grown.records:,} records{taken_back}", err=True)
    except KeyboardInterrupt:
        sys.exit(130)
    if trace.status == "torn":
        say(f"{trace.path} is torn: its writer is gone. Run `hookrec recover {trace.path}` to seal it.", err=True)
        sys.exit(1)
