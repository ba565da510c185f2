import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from thinwire.contract.reports import Sample
from thinwire.workers.telemetry.history import HistoryError, RunFiles, read


def sample(step: int) -> Sample:
    return Sample(step=step, phase="warmup", loss=1.0 / (step + 1), time=1000.0 + step)


def append(path: Path, samples: Sequence[Sample]) -> None:
    files = RunFiles(path.parent)
    files.samples(samples)
    files.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A history of steps 0 to 9."""
    append(tmp_path / "history.jsonl", [sample(step) for step in range(10)])
    return tmp_path / "history.jsonl"


def test_what_is_appended_is_read_back_in_order(path: Path) -> None:
    assert read(path) == [sample(step) for step in range(10)]
    assert len(path.read_text().splitlines()) == 10


def test_opening_again_appends(path: Path) -> None:
    files = RunFiles(path.parent)
    files.samples([sample(10)])
    assert read(path)[-1] == sample(10)  # readable while open
    files.close()
    assert len(read(path)) == 11


def test_resume_forgets_the_steps_that_are_done_again(path: Path) -> None:
    files = RunFiles(path.parent)
    files.forget_after(4)
    assert read(path) == [sample(step) for step in range(5)]
    files.samples([sample(5)])
    files.close()
    assert [each.step for each in read(path)] == [0, 1, 2, 3, 4, 5]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_step_that_is_done_again_replaces_the_first_time(path: Path) -> None:
    """A run that dies before its first checkpoint begins again at step 0."""
    again = sample(0).model_copy(update={"time": 5000.0})
    files = RunFiles(path.parent)
    files.forget_after(0)
    files.samples([again, sample(1)])
    assert read(path) == [again, sample(1)]


def test_forgetting_before_the_first_step_empties_it(path: Path) -> None:
    RunFiles(path.parent).forget_after(-1)
    assert read(path) == []


@pytest.mark.parametrize("step", [9, 100])
def test_forgetting_after_the_last_step_changes_nothing(path: Path, step: int) -> None:
    before = path.read_bytes()
    RunFiles(path.parent).forget_after(step)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_torn_last_line_is_dropped_and_logged(path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert [each.step for each in read(path)] == list(range(9))
    assert "history_torn" in caplog.text
    append(path, [sample(9)])
    assert read(path) == [sample(step) for step in range(10)]


def test_zeros_that_a_dead_machine_left_are_dropped(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(50) + b"\n")
    assert len(read(path)) == 10
    append(path, [sample(10)])
    assert len(read(path)) == 11


def test_damage_before_the_last_line_is_an_error_that_names_the_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"step": "x"}\n', *lines[4:]]))
    with pytest.raises(HistoryError, match=r"history.jsonl line 4 is not a sample: b'\{\"step\""):
        read(path)


def test_empty_or_wholly_torn_file_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step": 0')
    assert read(path) == []
    append(path, [sample(0)])
    assert read(path) == [sample(0)]


def test_absent_file_is_an_error_to_read_and_made_to_write(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with pytest.raises(FileNotFoundError):
        read(path)
    append(path, [])
    assert read(path) == []


def test_a_history_is_completed_with_what_others_have_reported_up_to_its_last_step(tmp_path: Path) -> None:
    mine = sample(3).model_copy(update={"loss": 9.0})
    files = RunFiles(tmp_path, lambda: [sample(1), sample(2), sample(3), sample(7)])
    files.samples([mine, sample(4)])
    files.complete()
    files.samples([sample(5)])
    assert read(tmp_path / "history.jsonl") == [sample(1), sample(2), mine, sample(4), sample(5)]
