"""`thinwire submit train.py`: the folder of a script goes along, and the job says what the command line says."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.live_service import LiveService

LINE = ["--workers", "4", "--checkpoint-store", "s3://bucket/x", "--pip", "einops", "--env", "A=b=c"]
SECRETS = ["--secret", "HF_TOKEN=env:HF_TOKEN", "--secret", "DB=file:/run/db"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a module beside it."""
    made = tmp_path / "my code"
    (made / "src").mkdir(parents=True)
    (made / "src" / "Train_it.py").write_text("import model\n")
    (made / "model.py").write_text("x = 1\n")
    return made


def package_of(live: LiveService, job_id: str) -> list[str]:
    """The files of a job's package, as the service keeps it."""
    sha256 = live.service.job(job_id)["spec"]["recipe"]["package"]
    with zipfile.ZipFile(io.BytesIO((live.home / "packages" / f"{sha256}.zip").read_bytes())) as archive:
        return archive.namelist()


def test_one_line_sends_the_folder_and_submits_the_job(
    thinwire: Callable[..., Run], live: LiveService, folder: Path
) -> None:
    script = str(folder / "src" / "Train_it.py")
    run = thinwire("submit", script, *LINE, *SECRETS, "--", "--lr", "1e-3", "--name", "x")
    assert run.code == 0, run.err
    job = live.service.job(run.out.strip())
    recipe = job["spec"]["recipe"]
    assert package_of(live, job["id"]) == ["Train_it.py"]
    assert (job["name"], recipe["entry"], recipe["args"]) == (
        "train-it",
        "Train_it.py",
        ["--lr", "1e-3", "--name", "x"],
    )
    assert (recipe["pip"], recipe["env_vars"]) == (["einops"], {"A": "b=c"})
    assert recipe["secrets"]["HF_TOKEN"] == {"env": "HF_TOKEN", "file": None}
    assert recipe["secrets"]["DB"] == {"env": None, "file": "/run/db"}
    assert (job["spec"]["workers"]["min"], job["spec"]["workers"]["max"]) == (4, 4)
    assert job["spec"]["checkpoint"]["store"] == "s3://bucket/x"
    assert "Packed 1 file of" in run.err
    options = ("--name", "other", "--min", "2", "--priority", "3")
    again = thinwire("submit", script, "--working-dir", str(folder), *options)
    job = live.service.job(again.out.strip())
    assert package_of(live, job["id"]) == ["model.py", "src/Train_it.py"]
    assert (job["name"], job["spec"]["recipe"]["entry"]) == ("other", "src/Train_it.py")
    assert job["spec"]["priority"] == 3
    assert "The service has this package already." in thinwire("submit", script).err


def test_a_job_file_sends_the_folder_that_it_names_beside_itself(
    thinwire: Callable[..., Run], live: LiveService, folder: Path
) -> None:
    file = folder.parent / "job.yaml"
    recipe = {"name": "script", "entry": "src/Train_it.py", "working_dir": "my code"}
    file.write_text(yaml.safe_dump({"recipe": recipe}))
    run = thinwire("submit", str(file))
    assert run.code == 0, run.err
    assert package_of(live, run.out.strip()) == ["model.py", "src/Train_it.py"]
    file.write_text(yaml.safe_dump({"recipe": recipe | {"working_dir": "/srv/code"}}))
    run = thinwire("submit", str(file))
    assert "Packed" not in run.err
    assert live.service.job(run.out.strip())["spec"]["recipe"]["working_dir"] == "/srv/code"


@parametrize(
    ("options", "words"),
    [
        (("--workers", "2", "--min", "1"), "--workers sets both --min and --max"),
        (("--workers", "0"), "0 is not in the range x>=1"),
        (("--min", "3", "--max", "2"), "--min 3 is more than --max 2"),
        (("--env", "A"), "--env 'A' must be NAME=VALUE"),
        (("--secret", "A=hf_verysecret"), "--secret A=... must be NAME=env:VARIABLE or NAME=file:/a/path"),
        (("--secret", "hf_verysecret"), "must be NAME=env:VARIABLE"),
        (("--secret", "A=file:relative"), "recipe.secrets.A.file"),
        (("--env", "HF_TOKEN=x"), "secrets: {HF_TOKEN: {env: HF_TOKEN}}"),
        (("--working-dir", "/usr"), "does not lie in /usr"),
        (("--name", "No Name"), "name = "),
        (("--name", ""), 'name = ""'),
        (("--idempotency-key", ""), "--idempotency-key is empty"),
        (("--env", "A=\udce9"), r"holds '\udce9', which is no text"),
        (("--", "\udce9"), r"holds '\udce9', which is no text"),
    ],
    usual=[2, 5, 6, 9],
)
def test_a_wrong_option_is_refused_and_no_job_made(
    thinwire: Callable[..., Run], live: LiveService, folder: Path, options: tuple[str, ...], words: str
) -> None:
    run = thinwire("submit", str(folder / "src" / "Train_it.py"), *options)
    assert run.code == 2
    assert words in run.err
    assert "verysecret" not in run.err
    assert options[0] not in ("--workers", "--min") or "Packed" not in run.err  # known before the folder is read
    assert live.service.client.get("/v1/jobs").json()["jobs"] == []


def test_what_a_job_file_says_itself_is_not_said_beside_it(
    thinwire: Callable[..., Run], live: LiveService, job_file: Path
) -> None:
    run = thinwire("submit", str(job_file), "--workers", "2", "--", "--lr")
    assert run.code == 2
    assert "--workers, --lr: only for a script, whose name ends in .py, and" in run.err


def test_a_folder_in_place_of_a_script_is_told_what_to_name(thinwire: Callable[..., Run], folder: Path) -> None:
    run = thinwire("submit", str(folder / "src"), "--workers", "2")
    assert run.code == 2
    assert "src is a folder: name the script in it" in run.err


def test_a_script_that_is_ignored_or_not_there_is_told_before_anything_is_sent(
    thinwire: Callable[..., Run], live: LiveService, folder: Path
) -> None:
    (folder / ".gitignore").write_text("src/\n")
    run = thinwire("submit", str(folder / "src" / "Train_it.py"), "--working-dir", str(folder))
    assert run.code == 2
    assert "is left out by .gitignore or .rayignore, and src/Train_it.py with it" in run.err
    run = thinwire("submit", str(folder / "none.py"))
    assert run.code == 2
    assert "none.py cannot be read: No such file" in run.err
    assert not (live.home / "packages").exists()


def test_a_service_without_room_is_told(thinwire: Callable[..., Run], live: LiveService, folder: Path) -> None:
    live.service.plane.packages._total_bytes = 10
    run = thinwire("submit", str(folder / "src" / "Train_it.py"))
    assert run.code == 1
    assert "THINWIRE_PACKAGES_MAX_BYTES" in run.err


def test_a_job_is_said_to_start_from_another_one_or_from_weights(
    thinwire: Callable[..., Run], live: LiveService, folder: Path
) -> None:
    script = str(folder / "src" / "Train_it.py")
    other = live.service.submit()
    for step in (9, 20):
        made = live.service.run_dir(other) / "checkpoints" / f"step-{step:08d}-000000000007"
        made.mkdir(parents=True)
        (made / "manifest.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"x")
    for options, expected in (
        (("--from", other[:-1]), {"job": other}),
        (("--from", f"{other}@9"), {"job": other, "step": 9}),
        (("--from", other, "--weights-only"), {"job": other, "what": "weights"}),
        (("--weights", str(weights)), {"weights": str(weights)}),
        (("--weights", "s3://bucket/m.safetensors"), {"weights": "s3://bucket/m.safetensors"}),
    ):
        run = thinwire("submit", script, *options)
        assert run.code == 0, run.err
        start = live.service.job(run.out.strip())["spec"]["start"]
        assert expected.items() <= {key: value for key, value in start.items() if value is not None}.items()


@parametrize(
    ("options", "words"),
    [
        (("--weights-only",), "--weights-only goes with --from"),
        (("--from", "a-3f", "--weights", "/a"), "a job begins with one of them"),
        (("--from", "a-3f@last"), "--from a-3f@last must be ID or ID@STEP"),
        (("--weights", "/none/model.safetensors"), "start.weights"),
    ],
    usual=[0],
)
def test_a_start_that_cannot_be_is_refused(
    thinwire: Callable[..., Run], live: LiveService, folder: Path, options: tuple[str, ...], words: str
) -> None:
    run = thinwire("submit", str(folder / "src" / "Train_it.py"), *options)
    assert run.code == 2
    assert words in run.err


def test_a_manifest_of_a_job_file_is_that_of_the_package_that_submit_makes_of_its_folder(
    thinwire: Callable[..., Run],
) -> None:
    run = thinwire("manifest", str(Path(__file__).parents[2] / "examples" / "sharded-job.yaml"))
    assert run.code == 0, run.err
    made = yaml.safe_load(run.out)["spec"]
    assert made["entrypoint"].endswith(" --script-of-workers --package SHA256")
    (group,) = made["rayClusterSpec"]["workerGroupSpecs"]
    assert group["rayStartParams"]["num-cpus"] == "2"  # a box is one pod
