"""A lane whose device is a thread that takes its time, so that what holds on a GPU is tested without one.

The training's tensors are on the CPU, so its own work is done at once; what it is held for, it waits for.
"""

import queue
import threading
import time

import torch


class SlowMark:
    def __init__(self, lane: "SlowLane") -> None:
        self._lane = lane
        self._event = threading.Event()
        self.set = self._event.set

    def query(self) -> bool:
        if self._lane.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._event.is_set()


class SlowLane:
    """Does nothing before `delay_s` have passed; nothing at all while `stopped`."""

    def __init__(self, delay_s: float = 0.002) -> None:
        self.delay_s = delay_s
        self.broken = False
        self.going = threading.Event()
        self.going.set()
        self.holds = self.under_way = self.most_under_way = 0
        self.pinned: list[torch.Tensor] = []
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self.delay_s)
            self.going.wait()
            work()
            del work

    def follow(self) -> None:
        pass

    def copy(self, target, source) -> None:
        self.under_way += source.nbytes
        self.most_under_way = max(self.most_under_way, self.under_way)

        def work() -> None:
            with torch.no_grad():
                target.copy_(source)
            self.under_way -= source.nbytes

        self._work.put(work)

    def gather(self, target, rows) -> None:
        rows = list(rows)
        self._work.put(lambda: target.copy_(torch.stack(rows)))

    def mark(self) -> SlowMark:
        mark = SlowMark(self)
        self._work.put(mark.set)
        return mark

    def hold_training(self, mark) -> None:
        self.holds += not mark.query()
        while not mark.query():
            time.sleep(0.0005)

    def busy(self) -> bool:
        return False

    def device_memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_memory(self, rows):
        return torch.empty((rows, 11), dtype=torch.int64)

    def pin(self, memory) -> bool:
        self.pinned.append(memory)
        return True

    def unpin(self, memory) -> None:
        self.pinned.clear()

    def end(self) -> None:
        self.going.set()
        self._work.put(None)
