"""The run folder: which file is where, in the code and in the documents."""

import re
from pathlib import Path

from thinwire.contract.run_folder import RunFolder

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_documents_list_every_file_of_a_run_folder_and_no_other(tmp_path):
    section = ARCHITECTURE.read_text().partition("## The run folder")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = {name.split("/")[0] for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    properties = [name for name, kind in vars(RunFolder).items() if isinstance(kind, property)]
    assert documented == {getattr(RunFolder(tmp_path), name).name for name in properties}
