"""The kinds of events: each is told somewhere, none is read that nobody tells, and the documents list them."""

import ast
import re
from pathlib import Path

import pytest

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import EventKind

ROOT = Path(__file__).parents[2]


def told() -> set[str]:
    """The members of EventKind that stand where workers or service tell one: as an argument, or in a table."""
    found = set()
    for file in [*(ROOT / "workers").rglob("*.py"), *(ROOT / "service").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call):
                values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "kind")]
            if isinstance(node, ast.Dict):
                values = node.values
            found |= set(re.findall(r"EventKind\.([A-Z_]+)", " ".join(map(ast.unparse, values))))
    return found


def test_every_kind_is_told_by_the_workers_or_the_service():
    of_states = {EventKind(f"job_{state.value.lower()}") for state in JobState}
    assert {EventKind[name] for name in told()} | of_states == set(EventKind)


@pytest.mark.few(1)
@pytest.mark.parametrize("room", ["workers", "service", "thinwire/cli"])
def test_a_kind_is_never_written_out(room):
    kinds = {kind.value for kind in EventKind}
    for file in (ROOT / room).rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        logged = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("logger.")]
        lines = {id(argument) for call in logged for argument in call.args}
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in lines}
        assert not texts & kinds, f"{file}: use EventKind"


def test_the_documents_list_every_kind_and_no_other():
    section = (ROOT / "docs" / "operations.md").read_text().partition("### Events\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert [kind for row in rows for kind in re.findall(r"`([a-z_]+)`", row)] == [kind.value for kind in EventKind]
