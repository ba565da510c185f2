"""The documents name what exists: links, paths, tests, commands, variables, metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from thinwire.boxes import FOLDER_VARIABLE
from thinwire.cli.commands import OWN_COMMANDS, other_commands
from thinwire.contract.job_names import PROJECT_VARIABLE
from thinwire.contract.metric_names import METRICS
from thinwire.service.config import Settings
from thinwire.service.metrics import HELP, ServiceMetrics
from thinwire.workers.telemetry.ledger import WIRE_INTERFACE_VARIABLE

pytestmark = pytest.mark.law

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "comm",
    "optim",
    "workers",
    "service",
    "tests",
    "docs",
    "deploy",
    "benchmarks",
    "examples",
    "thinwire",
    ".ci",
)
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(found for folder in FOLDERS for found in (ROOT / folder).rglob("*.md"))})


def of_every_document(claim: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all documents, which names each that fails: one for each would be 600, of milliseconds each."""

    def test() -> None:
        failed = []
        for document in DOCUMENTS:
            try:
                claim(document)
            except AssertionError as error:
                failed.append(f"{document.relative_to(ROOT)}: {error}")
        assert not failed, "\n".join(failed)

    return test


def spoken(document: Path) -> str:
    """The text without code blocks, where brackets and slashes mean other things."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", spoken(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_every_document
def test_every_relative_link_leads_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", spoken(document))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@of_every_document
def test_every_path_of_the_tree_that_is_named_exists(document):
    start = "|".join(re.escape(folder) for folder in FOLDERS)
    for path in re.findall(rf"(?<![\w./-])((?:{start})/[\w./-]*)", document.read_text().replace("\\_", "_")):
        named = path.rstrip(".")
        assert (ROOT / named).exists(), named


@cache
def sources_of_tests() -> str:
    """All of them: read once, not for each document."""
    return "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


@cache
def names_of_tests() -> set[str]:
    return set(re.findall(r"def (test_\w+)\(", sources_of_tests()))


@of_every_document
def test_every_test_that_is_named_exists(document):
    for name in re.findall(r"`(test_\w+)`", document.read_text()):
        assert name in names_of_tests(), name


def test_each_numbered_law_has_a_test_that_make_test_fast_runs():
    sources = sources_of_tests()
    numbers = set(
        re.findall(r"\bT(\d+)\b", (ROOT / "docs/algorithms.md").read_text().split("## Laws and their tests")[1])
    )
    assert {"1", "13"} <= numbers
    for number in numbers:
        assert f"@pytest.mark.law\ndef test_t{number}_" in sources, number


@pytest.mark.parametrize(("mark", "variable"), [("law", "LAWS"), ("ray", "RAYS")])
def test_every_test_with_a_mark_is_where_make_looks_for_it(mark, variable):
    places = re.findall(rf"^{variable} := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[0].split()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if f"pytest.mark.{mark}" in path.read_text():
            assert any(path.is_relative_to(ROOT / place) for place in places), path.name


@cache
def commands_and_variables() -> tuple[set[str], set[str]]:
    commands = {*OWN_COMMANDS, *(point.name for point in other_commands())}
    variables = {f"THINWIRE_{name.upper()}" for name in Settings.model_fields} | {"THINWIRE_URL", "THINWIRE_TOKEN"}
    variables |= {WIRE_INTERFACE_VARIABLE, FOLDER_VARIABLE, PROJECT_VARIABLE}
    units = "".join(unit.read_text() for unit in (ROOT / "deploy/systemd").glob("*.service"))
    variables |= set(re.findall(r"\$\{(THINWIRE_[A-Z_]+)\}", units))  # of their environment files
    return commands, variables


@of_every_document
def test_every_command_target_and_variable_that_is_named_exists(document):
    text = document.read_text()
    commands, variables = commands_and_variables()
    for command in re.findall(r"(?:^|`|bin/)thinwire ([a-z]+(?:-[a-z]+)*)", text, flags=re.MULTILINE):
        assert command in commands, f"thinwire {command}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE):
        assert target in targets, f"make {target}"
    assert set(re.findall(r"THINWIRE_[A-Z_]+", text)) <= variables


@of_every_document
def test_documents_are_ascii(document):
    assert document.read_text().isascii()


def test_the_readme_opens_with_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    first_block = lines.index("```")
    assert first_block < 12
    assert [line.split("#")[0].strip() for line in lines[first_block + 1 : first_block + 3]] == [
        "make run",
        "make test",
    ]


def test_the_readme_is_short_and_has_what_a_first_reader_looks_for():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).read_text().startswith("<svg")
    for part in (
        "\n## Speed\n",
        "\n## Who it is for\n",
        "**Do not compress**",
        "\n## Install\n",
        "docs/claims.md#limits",
    ):
        assert part in text


def test_the_picture_can_be_read_on_light_and_on_dark_pages():
    picture = (ROOT / "docs/overview.svg").read_text()
    assert "prefers-color-scheme: dark" in picture
    first = re.findall(r"<rect [^>]*>", picture)[0]
    assert 'class="page"' in first, "what is drawn has a background of its own"


def test_the_readme_shows_the_change_that_the_example_makes():
    shown = re.findall(r"^([-+] (?:model|optimizer) = .*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    example = (ROOT / "examples/two_line_change.py").read_text()
    assert shown
    for line in shown:
        assert line in example
    assert shown[-1].removeprefix("+ ") in example.splitlines()


def rows(document: Path) -> dict[str, list[str]]:
    """The table rows whose first cell is a name in backquotes, by that name; the cells."""
    found = {}
    for line in document.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found[cells[0].strip("`")] = cells
    return found


def test_the_table_of_metrics_is_the_declaration_of_the_metrics():
    table = rows(ROOT / "docs/operations.md")
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        expected = [f"`{metric.name}`", metric.kind, metric.unit or "-", labels, metric.scope.value, metric.help]
        assert table.get(metric.name) == expected, metric.name
    worker = {name for name in table if name.startswith("thinwire_") and not name.startswith("thinwire_service_")}
    assert worker == set(METRICS)


def test_the_table_has_the_metrics_of_the_service():
    metrics = ServiceMetrics()
    metrics.watch(
        lambda project: {},
        "local",
        lambda: None,
        lambda: 0.0,
        lambda project: CollectorRegistry(),
        lambda project: (),
        lambda project: (),
    )
    exported = re.findall(r"^# (?:HELP|TYPE) (\w+)", metrics.text().decode(), flags=re.MULTILINE)
    of_each_job = {f"thinwire_service_job_{name}" for name in HELP}
    names = {name for name in exported if not name.endswith("_created")} | of_each_job
    named = {name for name in rows(ROOT / "docs/operations.md") if name.startswith("thinwire_service_")}
    assert named == names


def walks() -> dict[str, tuple[int, list[str]]]:
    """By title: how many files the walk says that it opens, and those that its lists name, each once."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text[text.index("## Five walks") : text.index("## The run folder")]
    found = {}
    for title, said, walk in re.findall(
        r"^\*\*(.*?)\*\* \((\d+) files(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL
    ):
        lists = re.findall(r"^\* (.*(?:\n  .*)*)", walk, flags=re.MULTILINE)
        found[title] = int(said), list(dict.fromkeys(path for one in lists for path in named_in(one)))
    return found


def named_in(words: str) -> Iterator[str]:
    """The files that a list names, where they are: folders end in a slash, and hold those that come after them."""
    folders = [""]
    for name in re.findall(r"`([\w/]+(?:/|\.py|\.yml))`", words):
        if name.endswith("/"):
            folders += [name, *(folder + name for folder in folders)]
        else:
            yield next((folder + name for folder in reversed(folders) if (ROOT / folder / name).is_file()), name)


def test_every_walk_says_how_many_files_it_opens_and_every_one_exists():
    found = walks()
    assert len(found) == 5
    for title, (said, named) in found.items():
        assert [name for name in named if not (ROOT / name).is_file()] == [], title
        assert len(named) == said, title
