"""Where in a store a new stream goes: to a place of its own, or to one that it shares.

As long as a tensor has few shapes, each has a place of its own, which other programs read as one array, and which can
be compressed. Past that the number of files would grow with the number of shapes, so all further ones share a place.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from replay.codecs import MOST_BYTES
from replay.format import FIXED, RAGGED, Locations, Stream

FEW_SHAPES = 2
"""So many shapes of a tensor have places of their own.

In the Zarr store a shared place has some more files than another, so that three places, one of them shared, have just
under four times as many as one; in the HDF5 store each step with new shapes begins a segment. The two shapes that most
trainings have, whole batches and the last one, need no more.
"""


class Places:
    """Gives places to the streams of a rank.

    Args:
        streams: those that have places already.
        closed: those of the places that take no more.
    """

    def __init__(self, streams: Iterable[Stream] = (), closed: Collection[str | None] = ()) -> None:
        self._shapes: Counter[tuple[object, ...]] = Counter()
        self._shared: dict[tuple[object, ...], str] = {}
        taken = set()
        for stream in streams:
            if stream.location is None:
                continue
            taken.add(stream.location)
            if stream.location in closed:
                continue
            if stream.layout == RAGGED:
                self._shared[_alike(stream)] = stream.location
            else:
                self._shapes[_alike(stream)] += 1
        self._locations = Locations(iter(taken))

    def place(self, stream: Stream) -> Stream:
        """Return a stream with a place; without its codec, if its records are too large for any."""
        if stream.nbytes > MOST_BYTES:
            stream = replace(stream, codec=None)
        alike = _alike(stream)
        if stream.codec is None and self._shapes[alike] >= FEW_SHAPES:
            if alike not in self._shared:
                self._shared[alike] = self._locations.new(stream.layer, stream.kind, stream.path)
            return replace(stream, location=self._shared[alike], layout=RAGGED)
        self._shapes[alike] += 1
        location = self._locations.new(stream.layer, stream.kind, stream.path)
        return replace(stream, location=location, layout=FIXED)


def _alike(stream: Stream) -> tuple[object, ...]:
    """What the streams of a shared place have in common."""
    return stream.layer, stream.kind, stream.path, stream.dtype, len(stream.shape)
