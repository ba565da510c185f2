"""Event files of TensorBoard: TFRecords of protocol buffers, which TensorBoard and its kind read.

The messages and the check sums are tensorboardX's, which Ray Train brings; `torch.utils.tensorboard` would need
TensorBoard itself, a web server. tensorboardX's own writer is not used: its thread ends at the first error of the disk,
and the queue before it then holds up who writes; and it overwrites a file of the same second.

A process writes a file of its own, never one of another, and the files of a run are read in order of their names. Where
a new file begins, or steps come again, stands the mark by which TensorBoard forgets the steps from there on (a
SessionLog with START): so a resume, another rank 0 or a file that was torn leaves no step twice.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from thinwire.contract.reports import Event, Sample
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Ended, Item
from thinwire.workers.telemetry.trackers.scalars import scalars

EVENTS = "events"
_NUMBER = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoard:
    """A Tracker. folder: made where it is not there. Scalars are in it, events in its folder `events`, a run of its own
    for TensorBoard: they have happened, whatever steps come again.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._scalars, self._events = _Series(folder), _Series(folder / EVENTS)
        self._protos: _Protos | None = None

    def write(self, items: Sequence[Item]) -> None:
        """Append them. Raises: OSError, after which the next call begins another file; CannotTrack."""
        if self._protos is None:
            self._protos = _Protos()
        protos = self._protos
        opening = [protos.version()]
        if events := [protos.text(one) for one in items if isinstance(one, Event)]:
            self._events.append(events, opening)
        if steps := [one for one in items if not isinstance(one, Event)]:
            first = next((one.step for one in steps if isinstance(one, Sample)), None)
            if first is not None:
                opening.append(protos.restart(first))
            records = [
                protos.scalars(one) if isinstance(one, Sample) else protos.restart(one.after + 1) for one in steps
            ]
            self._scalars.append(records, opening)

    def close(self, ended: Ended | None) -> None:
        """The files."""
        self._scalars.drop()
        self._events.drop()


class _Series:
    """The files of a folder, of which this process writes the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None

    def append(self, records: Sequence[bytes], opening: Sequence[bytes]) -> None:
        """opening: with what a file begins. Raises: OSError."""
        try:
            if self._file is None:
                self._file = self._open()
                records = [*opening, *records]
            left = memoryview(b"".join(records))
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self.drop()
            raise

    def drop(self) -> None:
        """Write no more into this file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> FileIO:
        """The last one by its name, whatever the clocks of machines say."""
        self._folder.mkdir(parents=True, exist_ok=True)
        there = [int(found[1]) for one in os.listdir(self._folder) if (found := _NUMBER.match(one))]
        number = max([int(time.time()), *(one + 1 for one in there)])
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        return FileIO(self._folder / name, "xb")


class _Protos:
    """What is imported when the first file is written: it takes part of a second, in the thread that writes."""

    def __init__(self) -> None:
        try:
            from tensorboardX.proto import event_pb2, plugin_text_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError as error:
            raise CannotTrack(f"{error}: pip install 'thinwire[worker]'") from error
        self._event, self._crc = event_pb2, masked_crc32c
        self._summary, self._tensor, self._shape = summary_pb2, tensor_pb2, tensor_shape_pb2
        plugin = summary_pb2.SummaryMetadata.PluginData(
            plugin_name="text", content=plugin_text_pb2.TextPluginData(version=0).SerializeToString()
        )
        self._text = summary_pb2.SummaryMetadata(plugin_data=plugin)

    def version(self) -> bytes:
        """The first record of a file."""
        return self._framed(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def restart(self, step: int) -> bytes:
        """What was told of this step and later ones is void."""
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        return self._framed(self._event.Event(wall_time=time.time(), step=max(0, step), session_log=log))

    def scalars(self, sample: Sample) -> bytes:
        """A step: all of its scalars in one record."""
        of = self._summary.Summary
        values = [of.Value(tag=name, simple_value=value) for name, value in scalars(sample).items()]
        return self._framed(self._event.Event(wall_time=sample.time, step=sample.step, summary=of(value=values)))

    def text(self, event: Event) -> bytes:
        """An event, as Markdown."""
        words = "".join(f"\n\n    {name}: {value}" for name, value in event.fields.items())
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING",
            string_val=[f"**{event.kind}**{words}".encode("utf-8", "replace")],
            tensor_shape=self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)]),
        )
        value = self._summary.Summary.Value(tag=event.kind, metadata=self._text, tensor=tensor)
        summary = self._summary.Summary(value=[value])
        return self._framed(self._event.Event(wall_time=event.time, step=event.step, summary=summary))

    def _framed(self, event: Any) -> bytes:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return b"".join([length, struct.pack("<I", self._crc(length)), data, struct.pack("<I", self._crc(data))])
