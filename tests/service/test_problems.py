"""What is wrong with a job file, by field: the value, and in words what is allowed. Every rule of it is asked here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.service.control_plane_harness import spec
from thinwire.contract.job_names import LABEL, fitting_name
from thinwire.contract.jobs import Problem
from thinwire.contract.spec import AnySpec, ScriptSpec, TrainSpec
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.service.problems import CALLED_ELSEWHERE, describe_problems, resolve

ONEBIT = {"name": "onebit_adam"}
ZERO_ONE = {"name": "zero_one_adam"}
ADAM = {"name": "adam"}
Told = Callable[[Any], list[Problem]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The problems of a body of POST /v1/jobs, without sending it."""
    app = create_app(Settings(home=tmp_path_factory.mktemp("home"), launcher="fake"), FakeLauncher())
    document = app.openapi()
    schema = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]

    def problems(body: Any) -> list[Problem]:
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(AnySpec).validate_python(body)
        errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
        return describe_problems(errors, schema, document)

    return problems


CASES: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("unknown field", {"stepz": 1}, "stepz", 1, "no such field; did you mean steps? Allowed here: name, seed, steps"),
    ("near to a field", {"globalbatch": 8}, "globalbatch", 8, "did you mean global_batch?"),
    (
        "near in a tagged union",
        {"optimizer": {**ONEBIT, "weightdecay": 1}},
        "optimizer.weightdecay",
        1,
        "weight_decay?",
    ),
    ("of other tools", {"batch_size": 8}, "batch_size", 8, "no such field; did you mean global_batch? Allowed here: "),
    ("with dashes", {"batch-size": 8}, "batch-size", 8, "did you mean global_batch?"),
    ("of another place", {"learning_rate": 8}, "learning_rate", 8, "did you mean optimizer.lr? Allowed here: "),
    ("in its place", {"optimizer": {**ONEBIT, "learning_rate": 1}}, "optimizer.learning_rate", 1, "did you mean lr?"),
    ("a script's", {"recipe": {"script": "a.py"}}, "recipe.script", "a.py", "recipe.entry, with recipe.name = script?"),
    ("a field of scripts", {"recipe": {"args": []}}, "recipe.args", [], "recipe.args, with recipe.name = script?"),
    ("capitals", {"name": "My_Model"}, "name", "My_Model", "letter or digit; such as my-model"),
    ("unknown nested", {"workers": {"count": 2}}, "workers.count", 2, "allowed here: min, max, per_box, device"),
    ("unknown in a tagged union", {"optimizer": {**ONEBIT, "foo": 1}}, "optimizer.foo", 1, "warmup"),
    *(
        (f"{steps!r} steps", {"steps": steps}, "steps", steps, "must be a whole number at least 1")
        for steps in (True, "10", 1.0, "1e3", None, [10])
    ),
    (
        "below",
        {"workers": {"min": 0, "max": 1}},
        "workers.min",
        0,
        "must be a whole number at least 1 and at most 4096",
    ),
    (
        "in a tuple",
        {"optimizer": {**ONEBIT, "betas": [0.9, 2]}},
        "optimizer.betas.1",
        2,
        "must be a number above 0 and below 1",
    ),
    (
        "a union that has no tag",
        {"optimizer": {**ONEBIT, "warmup": 1.5}},
        "optimizer.warmup",
        1.5,
        "must be one of auto, or a whole number at least 1, or a number above 0 and below 1",
    ),
    ("the same, by text", {"lr_schedule": {"warmup": "x"}}, "lr_schedule.warmup", "x", "must be a whole number"),
    ("no tag", {"optimizer": {}}, "optimizer.name", None, "one of adam, cada, lamb, local_steps, muon, onebit_adam"),
    ("unknown source", {"data": {"source": "s3"}}, "data.source", "s3", "one of digits, python-stdlib, text-file"),
    ("missing in a union", {"data": {"source": "text-file"}}, "data.path", None, "required: text that is not empty"),
    ("min above max", {"workers": {"min": 3, "max": 2}}, "workers.min", 3, "at most workers.max = 2"),
    ("warm-up past the end", {"optimizer": {**ONEBIT, "warmup": 100}}, "optimizer.warmup", 100, "fewer than steps"),
    ("batch too small", {"workers": {"max": 9}}, "global_batch", 8, "at least one sample a worker"),
    ("width and heads", {"recipe": {"width": 100, "heads": 6}}, "recipe.width", 100, "a multiple of recipe.heads"),
    (
        "bad name",
        {"name": "../x"},
        "name",
        "../x",
        "lower-case letters, digits, dots and dashes, beginning and ending with",
    ),
    ("no mapping", {"workers": 3}, "workers", 3, "must be a mapping of fields, such as {min: 1, max: 1}"),
    ("no tagged mapping", {"optimizer": "adam"}, "optimizer", "adam", "must be a mapping of fields whose name is one"),
    ("unknown recipe", {"recipe": {"name": "t5"}}, "recipe.name", "t5", "must be one of bert, gpt, resnet"),
    ("unknown without a tag", {"recipe": {"depth": 3}}, "recipe.depth", 3, "Allowed here: name, layers, width, heads"),
    ("no recipe", {"recipe": "gpt"}, "recipe", "gpt", "must be a mapping of fields whose name is one of bert, gpt"),
    (
        "text for images",
        {"recipe": {"name": "resnet"}},
        "data.source",
        "python-stdlib",
        "must be digits with recipe.name = resnet; python-stdlib is the default",
    ),
    (
        "images for text",
        {"data": {"source": "digits"}},
        "data.source",
        "digits",
        "must be python-stdlib or text-file with recipe.name = gpt (the default)",
    ),
    ("one literal", {"precision": "float16"}, "precision", "float16", "must be one of float32, bfloat16"),
    ("literals", {"lr_schedule": {"decay": "x"}}, "lr_schedule.decay", "x", "must be one of cosine, constant"),
    ("elasticity", {"workers": {"elastic": "no"}}, "workers.elastic", "no", "must be one of in_place, restart"),
    ("no time to stop", {"workers": {"grace_s": 0}}, "workers.grace_s", 0, "must be a number above 0"),
    ("a short list", {"optimizer": {**ONEBIT, "betas": [0.9]}}, "optimizer.betas.1", None, "required: a number above"),
    (
        "no list",
        {"optimizer": {**ONEBIT, "betas": 3}},
        "optimizer.betas",
        3,
        "must be a list of 2: a number at least 0",
    ),
    ("against a default", {"workers": {"min": 2}}, "workers.min", 2, "must be at most workers.max = 1 (the default)"),
    ("a default against a field", {"recipe": {"heads": 5}}, "recipe.width", 192, "heads = 5; 192 is the default"),
    ("a relative store", {"checkpoint": {"store": "a/b"}}, "checkpoint.store", "a/b", "an absolute path, or a URL"),
    (
        "bfloat16 and boxes",
        {"optimizer": {**ONEBIT, "variance": "bf16"}, "topology": "node_first"},
        "topology",
        "node_first",
        "must be flat with optimizer.variance = bf16",
    ),
    (
        "8 bits and boxes",
        {"optimizer": {**ONEBIT, "full_exchange": "int8"}, "topology": "node_first"},
        "topology",
        "node_first",
        "must be flat or auto with optimizer.full_exchange = int8",
    ),
    (
        "a norm of before",
        {"optimizer": {**ONEBIT, "scale": "l1"}},
        "optimizer.scale",
        "l1",
        "must be l2, or left out: scales of another norm are gone",
    ),
    (
        "bfloat16 of another optimizer",
        {"optimizer": {"name": "onebit_lamb", "error_memory": "bf16"}},
        "optimizer.error_memory",
        "bf16",
        "there is no such field; allowed here: ",
    ),
    ("unknown in bert", {"recipe": {"name": "bert", "mask": 0.2}}, "recipe.mask", 0.2, "allowed here: name"),
    ("unknown of data", {"data": {"source": "text-file", "path": "/x", "url": "y"}}, "data.url", "y", "allowed here"),
    ("no step", {"steps": 0}, "steps", 0, "at least 1 and at most 1000000000"),
    ("no sample", {"global_batch": 0}, "global_batch", 0, "at least 1"),
    ("a beta of 1", {"optimizer": ADAM | {"betas": [0.9, 1.0]}}, "optimizer.betas.1", 1.0, "below 1"),
    ("true for a number", {"workers": {"max": True}}, "workers.max", True, "must be a whole number"),
    ("of another optimizer", {"optimizer": ADAM | {"warmup": 3}}, "optimizer.warmup", 3, "allowed here: "),
    ("a seed below", {"seed": -1}, "seed", -1, "at least 0"),
    ("a seed above", {"seed": 2**31}, "seed", 2**31, "below 2147483648"),
    ("a negative rate", {"optimizer": ADAM | {"lr": -1}}, "optimizer.lr", -1, "must be a number above 0"),
    ("no number", {"optimizer": ADAM | {"lr": float("nan")}}, "optimizer.lr", "nan", "must be a finite number"),
    ("no end", {"optimizer": ADAM | {"lr": float("inf")}}, "optimizer.lr", "inf", "must be a finite number"),
    (
        "all is validation",
        {"data": {"source": "python-stdlib", "validation_fraction": 1.0}},
        "data.validation_fraction",
        1.0,
        "below 1",
    ),
    ("no context", {"recipe": {"name": "gpt", "context": 1}}, "recipe.context", 1, "at least 2"),
    ("too few widths", {"recipe": {"name": "resnet", "widths": [16, 32]}}, "recipe.widths.2", None, "is required"),
    ("a device", {"workers": {"device": "tpu"}}, "workers.device", "tpu", "must be one of auto, cpu, gpu"),
    ("heads of bert", {"recipe": {"name": "bert", "width": 100, "heads": 6}}, "recipe.width", 100, "recipe.heads"),
    ("images for bert", {"recipe": {"name": "bert"}, "data": {"source": "digits"}}, "data.source", "digits", "bert"),
    ("a fraction of all", {"optimizer": ONEBIT | {"warmup": 0.999}}, "optimizer.warmup", 100, "fewer than steps"),
    ("never frozen", {"optimizer": ZERO_ONE | {"var_freeze": 100}}, "optimizer.var_freeze", 100, "fewer than steps"),
    ("nothing to compress", {"steps": 1, "optimizer": ONEBIT}, "steps", 1, "at least 2"),
    ("a rise past the end", {"lr_schedule": {"warmup": 101}}, "lr_schedule.warmup", 101, "at most steps"),
]


@pytest.mark.parametrize(("changes", "path", "value", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_wrong_spec_is_told_by_field(told: Told, changes: dict[str, Any], path: str, value: Any, words: str) -> None:
    (problem,) = told(spec(**changes))
    assert (problem.path, problem.value) == (path, value)
    assert words in problem.message


MANY = ["a"] * 1001
SCRIPT = {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}


@pytest.mark.parametrize(
    ("body", "path", "value", "words"),
    [
        ({"recipe": SCRIPT | {"env_vars": {"1A": "x"}}}, "recipe.env_vars.1A", "1A", "must have a name of letters"),
        ({"recipe": SCRIPT | {"args": [1]}}, "recipe.args.0", 1, "must be text of 0 to 32768 characters"),
        (
            {"recipe": SCRIPT | {"entry": "../x"}},
            "recipe.entry",
            "../x",
            "must be a path inside of the script's folder",
        ),
        ({"recipe": SCRIPT | {"secrets": {"A": {"value": "y"}}}}, "recipe.secrets.A.value", "y", "here: env, file"),
        ({"recipe": SCRIPT | {"pip": ["-r x"]}}, "recipe.pip.0", "-r x", "not an option of pip"),
        (
            {"recipe": SCRIPT | {"pip": ["a", "git+https://me:hidden@host/x"]}},
            "recipe.pip.1",
            "git+https://***@host/x",
            "in ~/.netrc or pip.conf",
        ),
        ({"recipe": SCRIPT | {"package": "A" * 64}}, "recipe.package", "A" * 64, "the sha256 of a package"),
        ({"recipe": SCRIPT | {"working_dir": "code"}}, "recipe.working_dir", "code", "an absolute path"),
        ({"recipe": SCRIPT | {"args": ["a\0"]}}, "recipe.args", ["a\0"], "without the character NUL"),
        ({"recipe": SCRIPT | {"args": MANY}}, "recipe.args", json.dumps(MANY)[:200] + "...", "a list of at most 1000"),
        ({"recipe": SCRIPT | {"env_vars": {"A": 1}}}, "recipe.env_vars.A", 1, "must be text"),
        ({"recipe": SCRIPT | {"secrets": {"A": {"file": "a"}}}}, "recipe.secrets.A.file", "a", "an absolute path"),
        ({"recipe": SCRIPT | {"layers": 3}}, "recipe.layers", 3, "there is no such field"),
        ({"recipe": SCRIPT | {"script": "a.py"}}, "recipe.script", "a.py", "did you mean entry? Allowed here: name"),
        ({"recipe": SCRIPT, "batch_size": 8}, "batch_size", 8, "did you mean global_batch?"),
        ({"recipe": SCRIPT, "learning_rate": 8}, "learning_rate", 8, "there is no such field; allowed here: name"),
        *(
            ({"recipe": SCRIPT | {"pip": [wrong]}}, "recipe.pip.0", wrong, "not an option of pip")
            for wrong in ("--index-url=https://x", "a\nb", "  ", "einops ", " -r more.txt", "# einops", "einops \\")
        ),
        ({"recipe": SCRIPT | {"package": "x"}}, "recipe.package", "x", "the sha256 of a package"),
        ({"recipe": {"name": "script"}}, "recipe.entry", None, "this field is required"),
        ({"recipe": SCRIPT, "optimizer": {}}, "optimizer", {}, "the script makes its own optimizer"),
        ({"recipe": SCRIPT, "stepz": 1}, "stepz", 1, "Allowed here: name, seed, steps, global_batch, bucket_elements"),
        ({"recipe": SCRIPT, "steps": 0}, "steps", 0, "must be a whole number at least 1"),
    ],
)
def test_a_wrong_job_of_a_script_is_told_by_field(
    told: Told, body: dict[str, Any], path: str, value: Any, words: str
) -> None:
    (problem,) = told(body)
    assert (problem.path, problem.value) == (path, value)
    assert words in problem.message
    assert "is the default" not in problem.message  # all that is refused here was written


def test_a_recipe_of_another_name_is_told_all_names(told: Told) -> None:
    (problem,) = told(spec(recipe={"name": "t5"}))
    assert problem.message == "must be one of bert, gpt, resnet, script"


def test_all_problems_are_told_at_once(told: Told) -> None:
    wrong = spec(steps=0, workers={"min": 0, "max": 0}, optimizer={**ONEBIT, "lr": -1, "x": 1})
    paths = {problem.path for problem in told(wrong)}
    assert paths == {"steps", "workers.min", "workers.max", "optimizer.lr", "optimizer.x"}


def test_all_impossible_combinations_are_told_at_once(told: Told) -> None:
    wrong = spec(workers={"min": 3, "max": 2}, optimizer={**ONEBIT, "warmup": 100})
    paths = {problem.path for problem in told(wrong)}
    assert paths == {"workers.min", "optimizer.warmup"}


def test_a_missing_required_field_says_what_it_wants(told: Told) -> None:
    body = spec()
    del body["steps"]
    (problem,) = told(body)
    assert problem.path == "steps"
    assert problem.value is None
    assert problem.message == "this field is required: a whole number at least 1 and at most 1000000000"


def test_every_name_of_other_tools_is_answered_with_a_field_that_there_is() -> None:
    schemas = [TypeAdapter(kind).json_schema() for kind in (TrainSpec, ScriptSpec)]

    def has(node: Any, document: Any, names: list[str]) -> bool:
        node = resolve(node, document)
        options = [node, *node.get("oneOf", ())]
        if not names:
            return True
        return any(
            has(found["properties"][names[0]], document, names[1:])
            for option in options
            if names[0] in (found := resolve(option, document)).get("properties", {})
        )

    for name, path in CALLED_ELSEWHERE.items():
        assert any(has(schema, schema, path.split(".")) for schema in schemas), (name, path)
        assert not any(has(schema, schema, [name]) for schema in schemas), name


@pytest.mark.parametrize(
    ("text", "name"),
    [("My_Model", "my-model"), ("a" * 70, "a" * 63), ("--x.", "x"), ("Modèle 1", "mod-le-1"), ("___", "")],
)
def test_the_name_that_is_suggested_can_be_taken(text: str, name: str) -> None:
    assert fitting_name(text) == name
    assert not name or re.fullmatch(LABEL, name)
