"""The run folder: which file is where, in the code and in the documents."""

import re
from pathlib import Path

import pytest

from thinwire.contract.run_folder import RunFolder, checkpoints_in

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_documents_list_every_file_of_a_run_folder_and_no_other(tmp_path):
    section = ARCHITECTURE.read_text().partition("## The run folder")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = {name.split("/")[0] for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert documented == {path.name for path in vars(RunFolder(tmp_path)).values()} - {tmp_path.name}


@pytest.mark.parametrize(
    ("store", "place"),
    [
        ("/shared/a/", "/shared/a/job-1"),
        ("/odd?folder", "/odd?folder/job-1"),
        ("s3://bucket", "s3://bucket/job-1"),
        (
            "s3://bucket/a/?scheme=http&endpoint_override=10.0.0.9:9000",
            "s3://bucket/a/job-1?scheme=http&endpoint_override=10.0.0.9:9000",
        ),
    ],
)
def test_checkpoints_are_below_their_store_and_its_settings_stay_settings(store, place):
    assert checkpoints_in(store, "job-1") == place
