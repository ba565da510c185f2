"""The job file of a script of one's own: what stands in it, and what may not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from thinwire.contract.spec import ScriptSpec, TrainSpec, read_accepted, read_spec

PACKAGE = "0" * 64


def script(**changes: Any) -> dict[str, Any]:
    """A job of a script, with its recipe changed."""
    return {"recipe": {"name": "script", "entry": "train.py", "package": PACKAGE} | changes}


def refused(given: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """What is wrong with it, as (path, value, words)."""
    with pytest.raises(ValidationError) as caught:
        read_spec(given)
    return [
        (problem["path"], problem["value"], problem["allowed"])
        for error in caught.value.errors()
        for problem in error["ctx"]["problems"]
    ]


def test_a_script_needs_its_recipe_alone_and_survives_json() -> None:
    made = read_spec(script(args=["--lr", "1e-3"], env_vars={"A": "1"}, secrets={"HF_TOKEN": {"env": "HF_TOKEN"}}))
    assert isinstance(made, ScriptSpec)
    assert (made.steps, made.global_batch, made.workers.max) == (None, None, 1)
    assert read_spec(made.model_dump(mode="json")) == made == read_spec(made)


def test_a_recipe_of_ours_is_read_as_before() -> None:
    made = read_spec({"steps": 2, "global_batch": 4, "optimizer": {"name": "adam"}})
    assert isinstance(made, TrainSpec)
    assert read_spec(made) == made


@pytest.mark.parametrize("field", ["optimizer", "data", "lr_schedule", "evaluation", "precision", "overlap"])
def test_what_the_script_makes_itself_is_refused(field: str) -> None:
    ((path, value, words),) = refused({**script(), field: {"name": "adam"}})
    assert (path, value) == (field, {"name": "adam"})
    assert words.startswith("left out with recipe.name = script: the script ")


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"package": None}, "recipe.package", "neither is given. `thinwire submit train.py` uploads"),
        ({"working_dir": "/srv/code"}, "recipe.package", "both are given"),
        ({"env_vars": {"HF_TOKEN": "hf_x"}}, "recipe.env_vars.HF_TOKEN", "secrets: {HF_TOKEN: {env: HF_TOKEN}}"),
        ({"env_vars": {"db_password": "x"}}, "recipe.env_vars.db_password", "it is a secret"),
        ({"env_vars": {"AWS_ACCESS_KEY_ID": "x"}}, "recipe.env_vars.AWS_ACCESS_KEY_ID", "it is a secret"),
        ({"env_vars": {"PGPASSWORD": "hf_x"}}, "recipe.env_vars.PGPASSWORD", "it is a secret"),
        ({"env_vars": {"GITHUB_PAT": "hf_x"}}, "recipe.env_vars.GITHUB_PAT", "it is a secret"),
        ({"env_vars": {"DATABASE_URL": "postgres://me:hf_x@db/a"}}, "recipe.env_vars.DATABASE_URL", "a secret in it"),
        ({"env_vars": {"WEIGHTS": "https://b/k?X-Amz-Signature=hf_x"}}, "recipe.env_vars.WEIGHTS", "a secret in it"),
        ({"env_vars": {"RAY_ADDRESS": "x"}}, "recipe.env_vars.RAY_ADDRESS", "belong to Ray"),
        ({"env_vars": {"A": "x\0y"}}, "recipe.env_vars.A", "without the character NUL"),
        ({"secrets": {"A": {}}}, "recipe.secrets.A", "one of both"),
        ({"secrets": {"A": {"env": "A", "file": "/a"}}}, "recipe.secrets.A", "one of both"),
        ({"secrets": {"THINWIRE_TOKEN": {"env": "A"}}}, "recipe.secrets.THINWIRE_TOKEN", "belong to Thinwire"),
        ({"env_vars": {"A": "1"}, "secrets": {"A": {"env": "A"}}}, "recipe.secrets.A", "recipe.env_vars has A too"),
        ({"pip": ["a @ https://b/a.whl?token=hf_x"]}, "recipe.pip.0", "pip.conf"),
        ({"pip": ["a", "git+https://me:hf_x@git.example.com/r"]}, "recipe.pip.1", "~/.netrc"),
    ],
)
def test_what_cannot_stand_together_is_refused_with_its_path(changes: dict[str, Any], path: str, words: str) -> None:
    ((where, value, said),) = refused(script(**changes))
    assert where == path
    assert words in said
    assert "hf_x" not in f"{value}{said}"


def test_a_job_that_was_accepted_is_read_though_it_holds_a_secret() -> None:
    made = read_accepted({**script(env_vars={"PGPASSWORD": "x"}), "checkpoint": {"store": "s3://K:AB/CD@bucket/m"}})
    assert isinstance(made, ScriptSpec)
    assert (made.recipe.env_vars["PGPASSWORD"], made.checkpoint.store) == ("x", "s3://K:AB/CD@bucket/m")


def test_words_that_only_look_like_a_secret_are_no_secrets() -> None:
    names = {"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1", "KEYS_DIR_NONE": "x"}
    made = read_spec(script(env_vars={name: names[name] for name in ("TOKENIZERS_PARALLELISM", "MONKEY")}))
    assert isinstance(made, ScriptSpec)
    assert refused(script(env_vars={"KEYS_DIR_NONE": "x"}))[0][0] == "recipe.env_vars.KEYS_DIR_NONE"


@pytest.mark.parametrize("entry", ["/train.py", "../train.py", "a/../b.py", "./train.py", "a//b.py", "a\n.py", "a/"])
def test_the_script_lies_inside_of_its_folder(entry: str) -> None:
    with pytest.raises(ValidationError, match=r"must be a path inside of the script's folder"):
        read_spec(script(entry=entry))


@pytest.mark.parametrize(
    "requirement",
    ["x", "einops==0.8", "torchvision >= 0.20; python_version > '3.11'", "a[b]~=1", "git+https://x.org/y@main", "./w"],
)
def test_what_pip_installs_is_taken_as_it_is(requirement: str) -> None:
    made = read_spec(script(pip=[requirement]))
    assert isinstance(made, ScriptSpec)
    assert made.recipe.pip == (requirement,)


def test_the_batch_of_a_script_holds_one_sample_a_worker_where_it_is_known() -> None:
    ((path, value, _),) = refused({**script(), "global_batch": 2, "workers": {"max": 3}})
    assert (path, value) == ("global_batch", 2)
    read_spec({**script(), "workers": {"max": 3}})
