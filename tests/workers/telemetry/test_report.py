import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from thinwire.contract.figures import NATS, ring_bytes, so_far, summarise
from thinwire.contract.reports import Health, Sample
from thinwire.contract.summary import Summary
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import HistoryError, RunFiles, write_report

PARAMETERS = 1_000_000


def run(
    num_steps: int = 20, frozen_at: int | None = 5, world_sizes: tuple[int, ...] = (2,), factor: float = 32.0
) -> list[Sample]:
    """A history with an exact fp32 warm-up and a compression by `factor`; the world sizes take turns."""
    samples = [Sample(step=0, phase="warmup", validation_loss=5.55, time=0.0, world_size=world_sizes[0])]
    for step in range(1, num_steps + 1):
        compressed = frozen_at is not None and step > frozen_at
        n = world_sizes[(step - 1) * len(world_sizes) // num_steps]
        samples.append(
            Sample(
                step=step,
                phase="compressed" if compressed else "warmup" if frozen_at else "dense",
                loss=5.5 / step,
                validation_loss=5.0 / step if step % 5 == 0 else None,
                payload_bytes=round(ring_bytes(PARAMETERS, n, 4) / (factor if compressed else 1)),
                world_size=n,
                time=float(step),
            )
        )
    return samples


def summary_of(samples: list[Sample], frozen_at: int | None = 5) -> dict[str, Any]:
    return made(samples, frozen_at).as_json()


def made(samples: list[Sample], frozen_at: int | None = 5) -> Summary:
    return summarise(
        samples,
        parameters=PARAMETERS,
        frozen_at=frozen_at,
        replicas_bit_equal=True,
        checkpoint_bytes=123,
        control_bytes=45,
        seconds={"total": 100.0, "startup": 10.0, "forward_backward": 50.0, "optimizer": 20.0, "evaluation": 5.0},
        attempts=2,
    )


def write(folder: Path, samples: list[Sample], frozen_at: int | None = 5) -> dict[str, Any]:
    RunFiles(folder).samples(samples)
    summary = made(samples, frozen_at)
    write_report(folder, summary)
    return summary.as_json()


@pytest.mark.parametrize(("n", "values"), [(1, 0.0), (2, 1.0), (4, 1.5), (8, 1.75)])
def test_ring_all_reduce_sends_two_n_minus_one_over_n_values(n: int, values: float) -> None:
    assert ring_bytes(100, n, 4) == 400 * values
    assert ring_bytes(100, n, 2) == 200 * values


def test_summary_adds_up() -> None:
    summary = summary_of(run())
    num_bytes = summary["payload_bytes"]
    assert num_bytes["sent"] == num_bytes["warmup_phase"] + num_bytes["compressed_phase"]
    assert num_bytes["warmup_phase"] == 5 * 4_000_000
    assert num_bytes["compressed_phase"] == 15 * 125_000
    assert num_bytes["compressed_phase_fp32"] == 15 * 4_000_000
    assert num_bytes["fp32"] == 20 * 4_000_000 == 2 * num_bytes["bf16"]
    assert (num_bytes["checkpoints"], num_bytes["control"]) == (123, 45)
    assert summary["compression_ratio"] == {"compressed_phase": 32.0, "overall": 80 / 21.875}
    assert summary["seconds"]["other"] == 15.0
    assert summary["seconds"]["total"] == sum(summary["seconds"].values()) - 100.0
    assert summary["loss"] == {
        "train_first": 5.5,
        "train_last": 5.5 / 20,
        "validation_first": 5.55,
        "validation_last": 0.25,
    }
    assert (summary["steps"], summary["frozen_at"], summary["world_size"], summary["attempts"]) == (20, 5, 2, 2)


def test_the_worker_that_was_the_last_most_of_the_time_is_in_the_summary() -> None:
    def with_last(count: int) -> list[Sample]:
        late = {"last_worker": 3, "waited_seconds": 0.5}
        return [one.model_copy(update=late if 0 < one.step <= count else {}) for one in run()]

    waited_for = made(with_last(16)).waited_for
    assert waited_for is not None
    assert (waited_for.worker, waited_for.share, waited_for.seconds) == (3, 0.8, 8.0)
    assert made(with_last(13)).waited_for is None
    assert made(run()).waited_for is None


def test_the_figures_so_far_are_the_summarys_but_for_what_only_rank_0_knows() -> None:
    """Parameters and the end of warm-up are found in samples; skipped rounds have no ratio and stand in the sums."""
    samples = [
        one.model_copy(update={"compression_ratio": ring_bytes(PARAMETERS, one.world_size, 4) / one.payload_bytes})
        if one.payload_bytes
        else one
        for one in run(world_sizes=(4, 3, 2))
    ]
    samples[17] = samples[17].model_copy(update={"payload_bytes": 0, "compression_ratio": None})
    for at in range(1, len(samples)):
        begun, known = so_far(samples[: at + 1]), made(samples[: at + 1], 5 if at > 5 else None)
        assert begun is not None
        unknown = {"state": None, "replicas_bit_equal": None, "seconds": None, "attempts": 1}
        sent = known.payload_bytes.model_copy(update={"checkpoints": None, "control": None})
        assert begun == known.model_copy(update={**unknown, "payload_bytes": sent})
    assert so_far([]) is so_far(samples[:1]) is None
    alone = so_far(run(world_sizes=(1,)))
    assert alone is not None
    assert (alone.parameters, alone.payload_bytes.fp32) == (None, 0)
    for ratio in (1e308, -1e308):  # a job may say anything, and `thinwire show` shows the rest
        said = {"compression_ratio": ratio, "payload_bytes": 2**63 - 1}
        impossible = so_far([one.model_copy(update=said) for one in run()])
        assert impossible is not None
        assert impossible.parameters is None


def test_a_run_without_a_summary_has_its_picture() -> None:
    for samples in (run(), run(world_sizes=(1,)), run(num_steps=1)):
        summary = so_far(samples)
        assert summary is not None
        assert history.picture(samples, summary, "loss").startswith(b"\x89PNG")
    title = history._title(made(run()).model_copy(update={"state": None}))
    assert "20 steps so far" in title


def test_a_resized_run_is_compared_step_by_step() -> None:
    summary = summary_of(run(world_sizes=(4, 2, 8)))
    assert summary["compression_ratio"]["compressed_phase"] == pytest.approx(32.0)
    assert summary["world_size"] == 8


def test_one_worker_sends_nothing_and_has_no_ratio() -> None:
    summary = summary_of(run(world_sizes=(1,)))
    assert summary["compression_ratio"] == {"compressed_phase": None, "overall": None}
    assert summary["payload_bytes"]["fp32"] == 0
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_an_optimizer_that_never_compresses_has_no_phase_ratio() -> None:
    summary = summary_of(run(frozen_at=None), frozen_at=None)
    assert summary["compression_ratio"] == {"compressed_phase": None, "overall": 1.0}
    assert summary["payload_bytes"]["compressed_phase"] == 0
    assert summary["frozen_at"] is None


def test_empty_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no samples to summarise"):
        summary_of([])
    summary = made(run())
    (tmp_path / "history.jsonl").touch()
    with pytest.raises(ValueError, match="no samples to draw"):
        write_report(tmp_path, summary)


@pytest.mark.few(1)
@parametrize(
    ("world_sizes", "frozen_at", "num_steps"),
    [((2,), 5, 20), ((1,), 5, 20), ((4,), None, 20), ((2,), 19, 20), ((4, 2), 5, 20), ((2,), None, 1)],
    usual=[0, 4],
)
def test_report_writes_the_summary_and_a_picture(
    tmp_path: Path, world_sizes: tuple[int, ...], frozen_at: int | None, num_steps: int
) -> None:
    summary = write(tmp_path, run(num_steps, frozen_at, world_sizes), frozen_at)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1350, 1050)
    assert {file.name for file in tmp_path.iterdir()} == {"history.jsonl", "summary.json", "loss.png"}


def test_picture_shows_losses_bytes_and_the_warmup() -> None:
    samples = run()
    upper, lower = history._draw(samples, made(samples), NATS).axes
    train, validation, *_ = upper.lines
    assert list(train.get_xdata()) == list(range(1, 21))
    assert list(validation.get_xdata()) == [0, 5, 10, 15, 20]
    assert "nats" in upper.get_ylabel()
    assert lower.get_yscale() == "log"
    ends = {line.get_label(): line.get_ydata()[-1] for line in lower.lines if not line.get_label().startswith("_")}
    assert ends == {
        "fp32 all-reduce would send 80 MB": 80.0,
        "bf16 all-reduce would send 40 MB": 40.0,
        "sent 21.9 MB": 21.875,
    }
    for axes in (upper, lower):
        (shade,) = axes.patches
        assert (shade.get_x(), shade.get_width()) == (0, 5)
    assert validation.get_label() == "validation, last 0.25"
    assert [text.get_text() for text in upper.texts] == ["warm-up ends, freeze at step 5"]
    assert "32.0x" in upper.figure.get_suptitle()


def test_a_value_that_is_not_a_number_never_reaches_the_summary_file(tmp_path: Path) -> None:
    summary = made(run())
    loss = summary.loss.model_copy(update={"train_last": math.nan})  # a copy is not validated
    with pytest.raises(ValueError, match="finite number"):
        summary.loss.model_validate(loss.model_dump())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(tmp_path, summary.model_copy(update={"loss": loss}))
    assert list(tmp_path.iterdir()) == []


def test_damaged_history_is_an_error_and_the_summary_stands(tmp_path: Path) -> None:
    summary = write(tmp_path, run())
    (tmp_path / "summary.json").unlink()
    (tmp_path / "history.jsonl").write_text("{}\n" + run()[0].model_dump_json() + "\n")
    with pytest.raises(HistoryError):
        write_report(tmp_path, Summary.model_validate(summary))
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_drawing_uses_no_pyplot(tmp_path: Path) -> None:
    """pyplot keeps every figure of the process and picks a window system; and matplotlib is loaded to draw only."""
    write(tmp_path, run())
    program = (
        "import sys, pathlib; from thinwire.workers.telemetry.history import write_report; "
        "from thinwire.contract.summary import Summary; "
        "assert 'matplotlib' not in sys.modules; folder = pathlib.Path(sys.argv[1]); "
        "write_report(folder, Summary.model_validate_json((folder / 'summary.json').read_text())); "
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_the_file_has_the_text_that_it_always_had() -> None:
    samples = run()
    samples[10] = samples[10].model_copy(update={"health": Health(error_to_momentum=1.5, rounds_skipped=3)})
    assert made(samples).as_text() == TEXT


TEXT = """{
  "state": "SUCCEEDED",
  "steps": 20,
  "frozen_at": 5,
  "world_size": 2,
  "parameters": 1000000,
  "replicas_bit_equal": true,
  "loss": {
    "train_first": 5.5,
    "train_last": 0.275,
    "validation_first": 5.55,
    "validation_last": 0.25
  },
  "payload_bytes": {
    "sent": 21875000,
    "warmup_phase": 20000000,
    "compressed_phase": 1875000,
    "compressed_phase_fp32": 60000000,
    "fp32": 80000000,
    "bf16": 40000000,
    "checkpoints": 123,
    "control": 45
  },
  "rounds": {
    "total": 20,
    "skipped": 0
  },
  "compression_ratio": {
    "compressed_phase": 32.0,
    "overall": 3.657142857142857
  },
  "seconds": {
    "total": 100.0,
    "startup": 10.0,
    "forward_backward": 50.0,
    "optimizer": 20.0,
    "evaluation": 5.0,
    "checkpoint": 0.0,
    "other": 15.0
  },
  "predicted_step_seconds": null,
  "measured_step_seconds": null,
  "prediction_error": null,
  "waited_for": null,
  "health": {
    "error_to_momentum": {
      "first": 1.5,
      "last": 1.5,
      "max": 1.5
    },
    "rounds_skipped": {
      "first": 3,
      "last": 3,
      "max": 3
    }
  },
  "attempts": 2
}
"""
