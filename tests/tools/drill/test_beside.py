"""Which undisturbed run of an earlier drill is compared with: the longest of the same job."""

import json

import pytest

from thinwire.contract.reports import Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.tools.drill.asked import DrillFailed
from thinwire.tools.drill.chaos import undisturbed_in
from thinwire.tools.drill.job import small_gpt
from thinwire.workers.telemetry.trace import FOLDER


def left(folder, name, spec, steps):
    run_dir = folder / f"undisturbed-{name}"
    (run_dir / FOLDER).mkdir(parents=True)
    RunFolder(run_dir).job.write_text(json.dumps({"job_id": name, "spec": spec}))
    samples = [Sample(step=step, phase="warmup", time=1000.0 + step) for step in range(steps + 1)]
    RunFolder(run_dir).history.write_text("".join(one.model_dump_json() + "\n" for one in samples))
    return run_dir


def test_the_longest_of_the_same_job_is_taken_with_or_without_replicas(tmp_path):
    mine = small_gpt(4, "onebit_adam", shadow="replica")
    left(tmp_path, "short", mine, 3)
    longest = left(tmp_path, "long", small_gpt(4, "onebit_adam", shadow="nothing"), 5)
    left(tmp_path, "of-others", small_gpt(4, "adam", shadow="replica"), 9)
    left(tmp_path, "of-more", small_gpt(5, "onebit_adam", shadow="replica"), 9)
    assert undisturbed_in(tmp_path, mine).run_dir == longest


def test_where_there_is_none_it_says_what_to_name(tmp_path):
    left(tmp_path, "of-others", small_gpt(4, "adam", shadow="replica"), 9)
    (left(tmp_path, "damaged", {}, 0) / "job.json").write_text("[]")
    with pytest.raises(DrillFailed, match=r"holds no undisturbed run of this job \(2 of others\): name the --out"):
        undisturbed_in(tmp_path, small_gpt(4, "onebit_adam", shadow="replica"))
