"""The file of `thinwire bench collectives`: what is kept comes back, and what is something else is refused."""

import json

import pytest

from tests.tools.collectives.made_up import kept, world
from thinwire.contract.collectives import CollectivesError, default_file, keep, read


def test_worlds_come_back_as_they_were_and_one_takes_the_place_of_its_kind(tmp_path):
    file = tmp_path / "folder" / "kept.json"
    two, three, boxed = world(2), world(3), world(4, per_machine=2)
    kept(file, three, two, boxed)
    assert read(file).link == "a lab"
    assert read(file).worlds == (two, three, boxed)
    slower = world(2, dict.fromkeys(two.algorithms, (0.001, 1000000.0)))
    keep(file, "a lab", slower)
    assert read(file).worlds == (slower, three, boxed)


def test_another_link_is_refused_and_the_file_stays(tmp_path):
    file = kept(tmp_path / "kept.json", world(2))
    before = file.read_bytes()
    with pytest.raises(CollectivesError, match="is of a lab, and this is another: give another --out"):
        keep(file, "another", world(3))
    assert file.read_bytes() == before


def test_a_world_that_is_not_there_is_told_with_those_that_are(tmp_path):
    file = kept(tmp_path / "kept.json", world(2), world(4, per_machine=2), world(3, {"chain": (1e-4, 1e7)}))
    found = read(file)
    assert found.world(2, 1, file).ranks == 2
    with pytest.raises(CollectivesError, match="has 2 ranks, 3 ranks, 4 ranks, 2 on a machine, not 4 ranks: run"):
        found.world(4, 1, file)
    with pytest.raises(CollectivesError, match="3 ranks without ring and rows"):
        found.world(3, 1, file)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b'{"link": "a lab"}',
        b'{"link": "a lab", "worlds": [{}]}',
        b'{"link": "a lab", "worlds": [7]}',
    ],
)
def test_what_is_something_else_is_refused(broken, tmp_path):
    file = tmp_path / "kept.json"
    file.write_bytes(broken)
    with pytest.raises(CollectivesError, match="is not what `thinwire bench collectives` keeps"):
        read(file)


@pytest.mark.parametrize(("field", "value"), [("bytes_per_s", 0.0), ("latency_s", -1.0), ("latency_s", "fast")])
def test_numbers_that_cannot_be_are_refused(field, value, tmp_path):
    file = kept(tmp_path / "kept.json", world(2))
    plain = json.loads(file.read_text())
    plain["worlds"][0]["algorithms"]["ring"][field] = value
    file.write_text(json.dumps(plain))
    with pytest.raises(CollectivesError, match="is not what"):
        read(file)


def test_the_default_place_is_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_file() == tmp_path / "thinwire" / "collectives.json"
