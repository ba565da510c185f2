"""What two workers of one run have alike, and what tells a stranger: field by field."""

import os

import pytest
import torch

from tests.workers.by_hand import build
from tests.workers.small_job import small_spec
from thinwire.comm import SoloGroup
from thinwire.workers import signature as module
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Training
from thinwire.workers.signature import LONGEST, code_digest, signature, spec_fields

TEXT = {"source": "text-file", "path": os.path.abspath("tests/data/tinyshakespeare.txt")}


def trained(spec):
    made = build(spec, SoloGroup(), torch.device("cpu"))
    registered = Registered(made.optimizer)
    registered.add("model", made.model)
    return Training(made.group, made.device, made.optimizer, registered, made.feed)


def signed(**changes):
    spec = small_spec(**{"data": TEXT, **changes})
    return signature(spec, trained(spec))


def differing(a, b):
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


def test_workers_of_one_run_have_the_same_whatever_may_differ_between_them():
    here = signed()
    there = signed(name="another", workers={"min": 2, "max": 5, "grace_s": 5.0, "max_restarts": 0})
    assert differing(here, there) == set()
    assert all(isinstance(value, str) and len(value) <= LONGEST + 8 for value in here.values())


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"steps": 25}, {"spec.steps", "steps"}),
        ({"seed": 1}, {"spec.seed", "steps"}),
        ({"recipe": {"layers": 1, "width": 64, "heads": 2, "context": 32}}, {"spec.recipe.width", "model"}),
        ({"precision": "bfloat16"}, {"spec.precision", "model"}),
        ({"workers": {"min": 1, "max": 3, "shadow": "replica"}}, {"spec.workers.shadow"}),
        ({"data": {**TEXT, "validation_fraction": 0.2}}, {"spec.data.validation_fraction", "data"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_whoever_trains_something_else_is_told_by_the_fields(changes, fields):
    assert differing(signed(), signed(**changes)) == fields


def test_the_same_path_with_another_content_is_other_data(tmp_path):
    found = []
    for content in (b"a" * 2000, b"b" * 2000):
        (tmp_path / "text").write_bytes(content)
        found.append(signed(data={**TEXT, "path": str(tmp_path / "text")}))
    assert differing(*found) == {"data"}


def test_another_version_or_another_source_is_another_worker(monkeypatch, tmp_path):
    here = signed()
    monkeypatch.setattr(module.thinwire, "__version__", "0.0.9")
    assert differing(here, signed()) == {"thinwire"}

    for package in ("comm", "optim"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "a.py").write_text("x = 1\n")
    before = code_digest(tmp_path)
    (tmp_path / "comm" / "notes.txt").write_text("no source")
    code_digest.cache_clear()
    assert code_digest(tmp_path) == before
    (tmp_path / "comm" / "deep" / "a.py").write_text("x = 2\n")
    code_digest.cache_clear()
    assert code_digest(tmp_path) != before


def test_every_field_of_the_job_file_is_in_it_or_is_known_to_be_free():
    """A new field must be thought about."""
    spec = small_spec()
    told = {name.split(".")[1] for name in spec_fields(spec)}
    assert told | {"name", "priority", "tracking", "labels"} == set(type(spec).model_fields)
    free = set(type(spec.workers).model_fields) - {
        name.split(".")[2] for name in spec_fields(spec) if "workers" in name
    }
    assert free == {"min", "max", "device", "max_restarts", "elastic", "grace_s"}


def test_a_long_value_is_shortened_and_still_told_apart():
    stores = [spec_fields(small_spec(checkpoint={"store": "/" + "a" * 200 + end})) for end in "xy"]
    assert differing(*stores) == {"spec.checkpoint.store"}
    assert max(map(len, stores[0].values())) < 2 * LONGEST


def test_the_model_is_known_by_names_shapes_and_dtypes_not_by_its_values():
    spec = small_spec(data=TEXT)
    training = trained(spec)
    before = signature(spec, training)
    with torch.no_grad():
        training.optimizer.param_groups[0]["params"][0].add_(1.0)
    assert signature(spec, training) == before
