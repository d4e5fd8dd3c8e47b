"""A writer that is no process: it takes what was sent when it is asked to end. For many small recordings in a row.

Ring, messages and writer are those of every recording; what is missing is the process, whose start takes longer than a
small training. What such a training sends must fit into the socket's buffer and the ring.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from hookrec import writer
from hookrec.messages import ROW_DTYPE, Message
from hookrec.ring import MESSAGE, ROW_BYTES, Ring
from replay import format as trace_format


class WriterInProcess:
    """Has the face of `hookrec.writer_process.WriterProcess`."""

    def __init__(self, config: dict[str, Any], ring_bytes: int, restarts: int = 0) -> None:
        self._config = config
        self.directory = Path(config["directory"])
        self.goes_on = False
        self.first_step = 0
        self.ring = Ring(ring_bytes, self.is_alive, self._succeed)

    def is_alive(self) -> bool:
        return True

    def last_words(self) -> str:
        return ""

    def _succeed(self) -> None:
        raise AssertionError("what never dies has no successor")

    def forget(self) -> None:
        self.ring.close()

    def wait(self) -> None:
        directory = Path(self._config["directory"])
        identity = {"format": trace_format.FORMAT, "version": trace_format.VERSION, "created": "now"}
        identity |= {"plan": self._config["plan"], "provenance": {}}
        (directory.parent / trace_format.TRACE_FILE).write_text(json.dumps(identity))
        (directory / trace_format.MODEL_FILE).write_text(json.dumps(self._config["model"]))
        write = writer.Writer(directory, self._config["plan"], memoryview(self.ring.map))
        for message in self._messages():
            write.take([message])
        write.finish()
        del write
        self.ring.close()

    def _messages(self) -> list[Message]:
        data = b""
        connection = self.ring.writer_socket
        connection.setblocking(False)
        try:
            while part := connection.recv(1 << 20):
                data += part
        except BlockingIOError:
            pass
        messages, begin = [], 0
        while begin < len(data):
            position, count, text_bytes = MESSAGE.unpack_from(data, begin)
            rows_begin = begin + MESSAGE.size
            text_begin = rows_begin + count * ROW_BYTES
            begin = text_begin + text_bytes
            rows = np.frombuffer(data[rows_begin:text_begin], ROW_DTYPE).copy()
            messages.append((position, rows, json.loads(data[text_begin:begin]) if text_bytes else {}))
        return messages
