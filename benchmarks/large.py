"""Whether each command answers on a trace larger than memory: `python -m benchmarks.large [--only ls --only check]`.

A sealed trace is written by the classes of the writer process, without a training: 10,000 steps, in each a record of
each of two kinds of 500 layers, ten million in all, and 5,000 tensors of 4 MB, of 25 layers every 50th step. The
tensors of one layer are random bytes; of the others the first and the last are written, zeros, and the rest are holes
in a file of the right size: 20 GB to a reader, and 1 GB on the disk.

Each command runs in a process of its own. Measured are the seconds until it first says something, until it ends, and
its peak of memory. The bars: it ends, or says how far it is, within 5 s, and needs less than 1 GB. Commands that take
longer than --seconds are ended then, which the table says; their peak is what they had reached. Last, one layer is
read over 200 steps, its files not in memory, and held against `dd` of the same file.
"""

import argparse
import dataclasses
import json
import mmap
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

MOST_S, MOST_MB, LEAST_OF_DD = 5.0, 1000.0, 0.8
STEPS, LAYERS, EVERY, COMMIT_STEPS = 10_000, 500, 50, 20
WITH_TENSORS = 25
SHAPE = (1024, 1024)
REAL = "blocks.0.linear"
"""The layer whose tensors are no holes."""

COMMANDS = {
    "info": ["info", "{trace}"],
    "info --json": ["info", "{trace}", "--json"],
    "ls": ["ls", "{trace}"],
    "stats": ["stats", "{trace}"],
    "stats, a layer": ["stats", "{trace}", "--layers", "blocks.7.*"],
    "stats, where": ["stats", "{trace}", "--where", "n_nan > 0"],
    "stats, a step": ["stats", "{trace}", "--step", "5000"],
    "show": ["show", "{trace}", REAL, "--step", "5000"],
    "first": ["first", "{trace}", "n_nan > 0"],
    "first, all": ["first", "{trace}", "numel > 0"],
    "sql": ["sql", "{trace}", "select layer, max(absmax) from records group by 1 order by 2 desc"],
    "sql, all": ["sql", "{trace}", "from records"],
    "sql, streams": ["sql", "{trace}", "from streams"],
    "sql, tensors": ["sql", "{trace}", "select max(list_max(tensor(r))) from records r where step = 5000 and kept"],
    "trend": ["trend", "{trace}"],
    "trend, a layer": ["trend", "{trace}", "--layers", "blocks.7.*"],
    "check": ["check", "{trace}"],
    "diff": ["diff", "{trace}", "{trace}"],
    "diff, a layer": ["diff", "{trace}", "{trace}", "--layers", "blocks.400.*"],
    "plot": ["plot", "{trace}", "{out}.png"],
    "plot --heatmap": ["plot", "{trace}", "{out}.svg", "--heatmap"],
    "plot, html": ["plot", "{trace}", "{out}.html"],
    "plot --histogram": ["plot", "{trace}", "{out}.png", "--histogram", REAL],
    "plot --exponents": ["plot", "{trace}", "{out}.png", "--exponents", REAL, "--step", "5000"],
    "plot --tensor": ["plot", "{trace}", "{out}.png", "--tensor", REAL, "--step", "5000"],
    "tail": ["tail", "{trace}"],
    "tail --records": ["tail", "{trace}", "--records", "--where", "n_nan > 0"],
    "alerts": ["alerts", "{trace}"],
    "list": ["list", "{folder}"],
    "export": ["export", "{trace}", "{out}.parquet"],
    "export, where": ["export", "{trace}", "{out}.parquet", "--where", "absmax > 0"],
    "export --partition layer": ["export", "{trace}", "{out}", "--partition", "layer"],
    "export --partition step": ["export", "{trace}", "{out}", "--partition", "step:1000"],
    "export --tensors": ["export", "{trace}", "{out}.parquet", "--tensors", "--layers", "blocks.1.*"],
    "export, arrow": ["export", "{trace}", "{out}.arrow"],
    "export, npz": ["export", "{trace}", "{out}.npz", "--layers", "blocks.1.*"],
    "export, safetensors": ["export", "{trace}", "{out}.safetensors", "--layers", "blocks.1.*"],
    "export --follow": ["export", "{trace}", "{out}", "--follow"],
    "verify": ["verify", "{trace}"],
    "hookrec convert": ["convert", "{trace}", "{out}", "--compression", "zstd"],
}


def write(path: Path) -> None:
    """Write the trace."""
    import numpy as np

    from replay.format import FORMAT, KEPT, RECORD_SCHEMA, VERSION, Stream, write_whole
    from replay.log import LogWriter
    from replay.seal import locked, seal

    directory = path / "rank-00000"
    directory.mkdir(parents=True)
    layers = [f"blocks.{n}.linear" for n in range(LAYERS)]
    identity = {"format": FORMAT, "version": VERSION, "id": "0" * 32, "created": "2026-01-01T00:00:00Z"}
    write_whole(path / "trace.json", json.dumps({**identity, "plan": {"store": "zarr"}, "provenance": {}}))
    write_whole(directory / "model.json", json.dumps({"modules": [_module(layer) for layer in layers]}))
    scalars = ({"loss": 1 / (step + 1), "hookrec/step_s": 0.1, "hookrec/hook_s": 0.001} for step in range(STEPS))
    lines = (json.dumps({"step": n, "time": 1.0 * n, "values": values}) + "\n" for n, values in enumerate(scalars))
    write_whole(directory / "scalars.jsonl", "".join(lines))
    kinds = ("output", "grad_output")
    names = [*((layer, kinds[0]) for layer in layers), *((layer, kinds[1]) for layer in reversed(layers))]
    streams = [
        Stream(n, layer, kind, "", "float32", SHAPE, f"{layer}/{kind}" if _has_tensors(layer, kind) else None)
        for n, (layer, kind) in enumerate(names)
    ]
    write_whole(directory / "streams.jsonl", "".join(stream.to_json() + "\n" for stream in streams))
    with locked(directory):
        placed = {stream.id: _write_tensors(directory, stream) for stream in streams if stream.location is not None}
        count, numel = len(streams), SHAPE[0] * SHAPE[1]
        rows = COMMIT_STEPS * count
        rng = np.random.default_rng(0)
        scale = np.exp(rng.normal(size=count))
        log = LogWriter(directory)
        for step in range(0, STEPS, COMMIT_STEPS):
            scale = scale * np.exp(rng.normal(0, 0.02, count))
            std = (scale * np.exp(rng.normal(0, 0.02, (COMMIT_STEPS, count)))).ravel()
            columns = {field.name: np.zeros(rows, field.type.to_pandas_dtype()) for field in RECORD_SCHEMA}
            columns["step"][:] = np.repeat(np.arange(step, step + COMMIT_STEPS), count)
            columns["stream"][:], columns["numel"][:] = np.tile(np.arange(count), COMMIT_STEPS), numel
            columns["kept"][:], columns["row"][:], columns["offset"][:] = 1, -1, -1
            columns["min"][:], columns["max"][:], columns["absmax"][:] = -4 * std, 3.6 * std, 4 * std
            columns["mean"][:], columns["std"][:], columns["l2"][:] = 0, std, std * numel**0.5
            columns["n_nan"][0] = step == STEPS - STEPS // 10
            for row in range(-(-step // EVERY), -(-(step + COMMIT_STEPS) // EVERY)):
                for stream, places in placed.items():
                    at = (row * EVERY - step) * count + stream
                    columns["kept"][at] = KEPT
                    for name, value in places[row].items():
                        columns[name][at] = value
            log.append(columns)
        log.close()
        seal(directory, "detached", None, {})


def _module(name: str) -> dict[str, Any]:
    parameters = [{"name": "weight", "shape": list(SHAPE), "dtype": "float32", "requires_grad": True}]
    facts = {"name": name, "class": "torch.nn.modules.linear.Linear", "leaf": True, "recorded": True, "aliases": []}
    return {**facts, "parameters": parameters}


def _has_tensors(layer: str, kind: str) -> bool:
    return kind == "output" and int(layer.split(".")[1]) < WITH_TENSORS


def _write_tensors(directory: Path, stream: Any) -> list[dict[str, int]]:
    """Write the tensors of a stream; return what the log says of each."""
    import google_crc32c
    import numpy as np

    from replay.files import stride_of
    from replay.stores import open_writer

    count, real = STEPS // EVERY, stream.layer == REAL
    rng = np.random.default_rng(stream.id)
    found = []
    with closing(open_writer("zarr", directory)) as writer, mmap.mmap(-1, stream.nbytes) as memory:
        writer.add(stream)
        for row in range(count):
            if real:
                memory[:] = rng.bytes(stream.nbytes)
            if real or not found:
                crc32c = google_crc32c.value(bytes(memory))
            if real or row in (0, count - 1):
                writer.rewind(stream.id, row)  # forward: the rows before are taken for written
                with memoryview(memory) as view:
                    writer.append(stream.id, view, [0])
            found.append(
                {"row": row, "offset": row * stride_of(stream.nbytes), "nbytes": stream.nbytes, "crc32c": crc32c}
            )
    return found


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command did: seconds to its first word and to its end, megabytes, how it ended."""

    first_s: float
    s: float
    mb: float
    ended: str

    @property
    def missed(self) -> str:
        """Which bars were missed, in words."""
        late = self.first_s > MOST_S and f"says nothing for {self.first_s:.1f} s"
        wide = self.mb > MOST_MB and f"{self.mb:,.0f} MB"
        return ", ".join(text for text in (late, wide) if text)


def run(arguments: list[str], seconds: float) -> Ran:
    """Run a command, for so many seconds at most."""
    begin = time.monotonic()
    first_s = None
    ended = ""
    last = b""
    peak_mb = 0.0
    with (
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        selectors.DefaultSelector() as selector,
    ):
        for pipe in (process.stdout, process.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = begin + seconds - time.monotonic()
            if left <= 0 and not ended:
                process.send_signal(signal.SIGKILL)
                ended = "stopped"
            # The system's own count begins with the memory of the process that has started this one.
            peak_mb = max(peak_mb, _peak_mb(process.pid))
            for key, _ in selector.select(min(max(left, 0), 0.05)):
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fileobj)
                elif first_s is None:
                    first_s = time.monotonic() - begin
                if key.fileobj is process.stderr:
                    last = (last + data)[-400:]
        _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    s = time.monotonic() - begin
    if not ended:
        ended = f"{process.returncode}"
        if process.returncode > 1:
            ended += " " + last.decode(errors="replace").strip().replace("\n", " ")
    return Ran(s if first_s is None else first_s, s, peak_mb, ended)


def _peak_mb(pid: int) -> float:
    """Return the most memory that a process has had; 0 of one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return max((int(line.split()[1]) * 1024 / 1e6 for line in lines), default=0.0)


def layer_and_dd(trace: Path) -> Iterator[tuple[float, float]]:
    """Yield bytes a second of one layer's tensors over all steps, and of `dd` of its file; both begin on the disk."""
    file = next((trace / "rank-00000/tensors.zarr" / REAL / "output/data/c").rglob("0/0/0"))
    code = (
        "import sys, time, replay\n"
        "trace = replay.open(sys.argv[1])\n"
        "begin = time.perf_counter()\n"
        "read = sum(tensor.nbytes for _, tensor in trace.select(sys.argv[2], 'output').tensors())\n"
        "print(read / (time.perf_counter() - begin))"
    )
    for _ in range(3):
        _forget(file)
        ours = subprocess.run([sys.executable, "-c", code, trace, REAL], capture_output=True, text=True, check=True)
        _forget(file)
        begin = time.perf_counter()
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=4M"], check=True, stderr=subprocess.DEVNULL)
        yield float(ours.stdout), file.stat().st_size / (time.perf_counter() - begin)


def _forget(file: Path) -> None:
    """Let the system's memory have nothing of a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Print a line a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "hookrec-large", help="of the trace; kept"
    )
    parser.add_argument("--only", action="append", choices=[*COMMANDS, "layer"], help="this command; may be repeated")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each command")
    chosen = parser.parse_args()
    trace, out = chosen.folder / "traces" / "a", chosen.folder / "out"
    if not (trace / "rank-00000/end.json").exists():
        shutil.rmtree(trace, ignore_errors=True)
        begin = time.monotonic()
        # In a process of its own, as everything here: a child's peak begins with what its parent has.
        code = "import sys; from pathlib import Path; from benchmarks.large import write; write(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, trace], check=True)
        print(f"written in {time.monotonic() - begin:.0f} s")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'command':26} {'first s':>8} {'all s':>8} {'peak MB':>8}  ended   missed")
    for name in chosen.only or [*COMMANDS, "layer"]:
        if name == "layer":
            for ours, dd in layer_and_dd(trace):
                missed = "" if ours >= LEAST_OF_DD * dd else "  missed"
                speeds = f"{ours / 1e6:,.0f} MB/s, dd {dd / 1e6:,.0f}, {ours / dd:.2f}"
                print(f"one layer over {STEPS // EVERY} steps: {speeds}{missed}")
            continue
        program = "hookrec.cli" if name.startswith("hookrec") else "replay.cli"
        words = {"trace": trace, "folder": trace.parent, "out": out}
        ran = run([sys.executable, "-m", program, *(word.format(**words) for word in COMMANDS[name])], chosen.seconds)
        print(f"{name:26} {ran.first_s:8.1f} {ran.s:8.1f} {ran.mb:8,.0f}  {ran.ended:7} {ran.missed}", flush=True)
        for left in out.parent.glob("out*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main()
