"""What `hookrec daemon` takes of the machine: `python -m benchmarks.daemon [--seconds 60] [--traces 50] [--steps 20]`.

Traces are written by a process of their own, without a training, each committing so many steps a second with ten
records a step. Measured from outside, of the daemon alone: its share of one core, by its own processor time, and its
memory each minute. Every few seconds a trace commits a NaN; the time from there to the alert is measured as well.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

from tests.live_traces import WrittenTrace

RECORDS = 10
SETTLE_S = 3.0
MINUTE_S = 60.0


def write(
    root: Path, traces: int, steps_a_second: float, seconds: float, committed: "multiprocessing.Queue[float | None]"
) -> None:
    """Write traces until the time is up; report the time of each commit with a NaN in it."""
    layers = tuple(str(number) for number in range(RECORDS))
    writing = [WrittenTrace(root / f"{number:03}", layers) for number in range(traces)]
    end = time.monotonic() + seconds
    step, bad = 0, 0
    while time.monotonic() < end:
        begin = time.monotonic()
        nan = bad % traces if step % int(3 * steps_a_second) == 0 else -1
        for number, trace in enumerate(writing):
            if number == nan and bad < traces * RECORDS:  # a layer of a trace is an alert once
                trace.commit(step, n_nan={layers[bad // traces]: 1})
                committed.put(time.time())
                bad += 1
            else:
                trace.commit(step)
        step += 1
        time.sleep(max(0.0, begin + 1 / steps_a_second - time.monotonic()))
    committed.put(None)
    committed.put(step)


def main() -> None:
    """Print a line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--traces", type=int, default=50)
    parser.add_argument("--steps", type=float, default=20.0, help="a second, of each trace")
    parser.add_argument("--poll", default="1", help="of the daemon")
    parser.add_argument("--no-rules", action="store_true", help="of replay check; the condition alone")
    chosen = parser.parse_args()
    committed: multiprocessing.Queue[float | None] = multiprocessing.Queue()
    found: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hookrec-benchmark-") as folder:
        root = Path(folder)
        command = [sys.executable, "-m", "hookrec.cli", "daemon", folder, "--json"]
        command += ["--when", "n_nan > 0", "--poll", chosen.poll, *(["--no-rules"] if chosen.no_rules else [])]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
            listener = Thread(target=listen, args=(daemon, found))
            listener.start()
            seconds = chosen.seconds + 2 * SETTLE_S
            writer = multiprocessing.Process(target=write, args=(root, chosen.traces, chosen.steps, seconds, committed))
            writer.start()
            time.sleep(SETTLE_S)
            cpu_s, before = usage(daemon.pid)
            began = time.monotonic()
            memory = [before]
            while (left := began + chosen.seconds - time.monotonic()) > 0:
                time.sleep(min(MINUTE_S, left))
                memory.append(usage(daemon.pid)[1])
            after_s, _ = usage(daemon.pid)
            share = (after_s - cpu_s) / (time.monotonic() - began)
            commits = list(iter(committed.get, None))
            steps = committed.get() or 0
            writer.join()
            time.sleep(SETTLE_S)
            daemon.terminate()
            listener.join()
    delays = [alert - commit for commit, alert in zip(commits, found, strict=True)]
    processor = platform.processor() or platform.machine()
    print(f"{processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{chosen.traces} traces, {steps / seconds:.1f} steps a second, {RECORDS} records a step, {chosen.seconds:g} s"
    )
    a_step = (after_s - cpu_s) / (steps * chosen.traces * chosen.seconds / seconds)
    print(f"daemon: {share:.1%} of a core, {a_step * 1e6:.0f} us a step of a trace")
    print(f"memory, minute by minute: {', '.join(f'{each / 2**20:.0f}' for each in memory)} MiB")
    print(f"alerts: {len(delays)}, {statistics.median(delays):.2f} s after the commit, at most {max(delays):.2f} s")


def usage(pid: int) -> tuple[float, int]:
    """Return the seconds of processor time and the bytes of memory of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def listen(daemon: "subprocess.Popen[str]", found: list[float]) -> None:
    """Note when each alert about a condition is said."""
    assert daemon.stderr is not None
    for line in daemon.stderr:
        event = json.loads(line)
        if event["event"] == "alert" and event["alert"]["rule"] == "n_nan > 0":
            found.append(time.time())


if __name__ == "__main__":
    main()
