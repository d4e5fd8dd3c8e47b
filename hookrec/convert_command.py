"""The command `hookrec convert`: a trace in another store, and how far it is while it is written."""

import sys
from pathlib import Path

import click

from replay.command_line import json_option, print_json, progress, say
from replay.convert import convert
from replay.format import CODECS
from replay.stores import STORES

_EXIT = """\b
Exit status:
  0  the copy has all that the original has
  1  it was interrupted, or could not be written; the same command goes on
  2  there can be no copy: wrong use, a trace or what is there of a copy is damaged
  3  there is a copy, and tensors of the original were damaged: the copy has a note of each"""


@click.command("convert", epilog=_EXIT)
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--store", type=click.Choice(STORES), default="zarr", show_default=True, help="The store of the copy.")
@click.option(
    "--compression",
    type=click.Choice([*CODECS, "none"]),
    default="none",
    show_default=True,
    help="How each tensor is compressed, without loss.",
)
@json_option
def convert_trace(trace: Path, target: Path, store: str, compression: str, as_json: bool) -> None:
    """Write TRACE anew as TARGET, in another store or compression. TRACE stays as it is.

    Until it is finished and verified the copy is TARGET.partial. After an interruption the same command goes on. With
    --json an object of path, trace, store, compression, damaged (how many tensors) and left_out (which files).
    """
    try:
        with progress("records") as tell:
            damaged, left_out = convert(trace, target, store, None if compression == "none" else compression, tell)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error}.") from None
    if as_json:
        facts = {"path": str(target), "trace": str(trace), "store": store, "compression": compression}
        print_json({**facts, "damaged": damaged, "left_out": [str(path) for path in left_out]})
        sys.exit(3 if damaged else 0)
    say(f"{target} is {trace} in the store {store}, compression {compression}; each tensor was read back", err=True)
    for path in left_out:
        say(f"{trace / path} is a link, or no file of a trace, and is not in it", err=True)
    if damaged:
        say(f"{damaged:,} tensors of {trace} were damaged and are not in it; `replay info` has a note", err=True)
        sys.exit(3)
