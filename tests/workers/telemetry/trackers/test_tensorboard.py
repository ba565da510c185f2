"""Event files, read with TensorBoard's own reader."""

from __future__ import annotations

import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.workers.telemetry.trackers.made_up import event, sample, steps
from thinwire.contract.reports import EventKind, Health
from thinwire.workers.telemetry.trackers import tensorboard
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Void
from thinwire.workers.telemetry.trackers.tensorboard import TensorBoard

pytestmark = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def read(folder: Path) -> Any:
    """As TensorBoard shows it."""
    from tensorboard.backend.event_processing import event_accumulator as reader

    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def losses(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read(folder).Scalars(tag)]


def files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_file())


def test_what_is_written_is_what_tensorboard_reads(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "a" / "b")
    health = Health(error_to_momentum=1.5)
    last = sample(3, validation_loss=2.75, health=health, reported={"acc uracy\u00e9": 0.5, "bad": "nan"})
    board.write([sample(0, validation_loss=5.5, loss=None), *steps(1, 2), last])
    board.write([event(3, lost=[1], reason="a\nb"), event(3, EventKind.CHECKPOINT_SAVED)])
    board.close("succeeded")
    found = read(tmp_path / "a" / "b")
    assert losses(tmp_path / "a" / "b") == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert losses(tmp_path / "a" / "b", "validation_loss") == [(0, 5.5), (3, 2.75)]
    assert [one.value for one in found.Scalars("run/phase")] == [0.0, 0.0, 1.0]
    assert found.Scalars("run/world_size")[0].value == 2
    assert found.Scalars("lr")[0].value == pytest.approx(1e-3)
    assert found.Scalars("wire/compression_ratio")[0].value == 31.5
    assert found.Scalars("speed/samples_per_second")[0].wall_time == 1_800_000_001.0
    assert found.Scalars("health/error_to_momentum")[0].step == 3
    assert found.Scalars("reported/acc uracy\u00e9")[0].value == 0.5
    assert str(found.Scalars("reported/bad")[0].value) == "nan"
    texts = read(tmp_path / "a" / "b" / "events")
    assert set(texts.Tags()["tensors"]) == {"regrouped", "checkpoint_saved"}
    (text,) = texts.Tensors("regrouped")[0].tensor_proto.string_val
    assert b"reason: a" in text
    assert texts.SummaryMetadata("regrouped").plugin_data.plugin_name == "text"


def test_another_rank_0_a_resume_and_steps_that_come_again_leave_no_step_twice(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    first.write([*steps(1, 10), event(9)])
    # It dies. The next one knows from step 6 on; the one after a resume begins at a checkpoint.
    second = TensorBoard(tmp_path)
    second.write([Void(5), *(sample(step, loss=100.0 + step) for step in range(6, 13))])
    second.write([Void(11), sample(12, loss=-12.0)])
    third = TensorBoard(tmp_path)
    third.write([Void(8)])
    third.write([sample(9, loss=-9.0)])
    assert losses(tmp_path) == [(step, 5.0 - step) for step in range(1, 6)] + [
        (6, 106.0),
        (7, 107.0),
        (8, 108.0),
        (9, -9.0),
    ]
    assert len(files(tmp_path)) == 3
    assert len(read(tmp_path / "events").Tensors("regrouped")) == 1, "what has happened has happened"


def test_a_torn_file_is_followed_by_another_one_that_has_all_of_it(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write(steps(1, 4))
    (path,) = files(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 11)
    again = TensorBoard(tmp_path)
    again.write(steps(3, 6))
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_refuses_in_the_middle_of_a_record_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = tensorboard.FileIO, [100]

    class Full(real):  # type: ignore[valid-type, misc]
        def write(self, data: memoryview) -> int:
            if room[0] == 0:
                raise OSError(28, "No space left on device")
            taken = min(len(data), room[0])
            room[0] -= taken
            return int(super().write(data[:taken]))

    monkeypatch.setattr(tensorboard, "FileIO", Full)
    board = TensorBoard(tmp_path)
    batch = steps(1, 4)
    with pytest.raises(OSError, match="No space"):
        board.write(batch)
    room[0] = 350
    with pytest.raises(OSError, match="No space"):
        board.write(batch)
    room[0] = 1 << 20
    board.write([*batch, sample(5)])
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]
    assert len(files(tmp_path)) == 3


def test_files_of_a_machine_whose_clock_is_ahead_come_before_the_new_one(tmp_path: Path) -> None:
    ahead = tmp_path / "events.out.tfevents.9000000000.far.1"
    board = TensorBoard(tmp_path)
    board.write(steps(1, 3))
    files(tmp_path)[0].rename(ahead)
    other = TensorBoard(tmp_path)
    other.write(steps(3, 4))
    assert files(tmp_path)[0] == ahead
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    """Two processes of one second, of machines that are called alike."""
    one, two = TensorBoard(tmp_path), TensorBoard(tmp_path)
    one.write(steps(1, 2))
    two.write(steps(3, 4))
    assert len(files(tmp_path)) == 2
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        TensorBoard(tmp_path / "b").write(steps(1, 1))


def test_a_folder_in_whose_place_is_a_file_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    with pytest.raises(OSError, match="exists"):
        TensorBoard(tmp_path / "b").write(steps(1, 1))


def test_without_its_library_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorboardX.proto", None)
    with pytest.raises(CannotTrack, match="pip install"):
        TensorBoard(tmp_path).write(steps(1, 1))


def test_a_record_is_a_tfrecord(tmp_path: Path) -> None:
    """Length and check sums, by their definition: CRC-32C, rotated by 15 bits, with a constant added."""

    def crc(data: bytes) -> int:
        value = 0xFFFFFFFF
        for byte in data:
            value ^= byte
            for _ in range(8):
                value = (value >> 1) ^ (0x82F63B78 & -(value & 1))
        value ^= 0xFFFFFFFF
        return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    board = TensorBoard(tmp_path)
    board.write(steps(1, 2))
    content, at, records = files(tmp_path)[0].read_bytes(), 0, 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        data = content[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", content, at + 8)[0] == crc(content[at : at + 8])
        assert struct.unpack_from("<I", content, at + 12 + length)[0] == crc(data)
        at, records = at + 16 + length, records + 1
    assert records == 4
