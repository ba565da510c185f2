"""Rules of the house that import-linter cannot state."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.law

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["comm", "optim", "workers", "service"])
def test_packages_are_links_to_the_top_level_folders(package):
    link = ROOT / "thinwire" / package
    assert link.is_symlink()
    assert link.readlink() == Path("..") / package


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_optimizers_do_not_know_how_bytes_move():
    for path in (ROOT / "optim").rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith("torch.distributed")}, path.name


def test_comm_stands_on_torch_alone():
    allowed = {"torch", "thinwire.comm", "numpy", "numba", "cupy"}
    for path in (ROOT / "comm").rglob("*.py"):
        foreign = {
            name
            for name in imports(path)
            if name.split(".")[0] in {"ray", "fastapi", "pydantic", "httpx", "thinwire"}
            and not any(name == a or name.startswith(a + ".") for a in allowed)
        }
        assert not foreign, f"{path.name}: {foreign}"


def test_code_imports_thinwire_never_the_folders_by_their_bare_names():
    suspicious = re.compile(r"^\s*(?:from|import)\b[^#\n]*(?<![.\w])(?:comm|optim|workers|service)\b", re.MULTILINE)
    for folder in ("comm", "optim", "workers", "service", "thinwire", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if not suspicious.search(path.read_text()):  # to parse all of them takes seven seconds
                continue
            bare = {name.split(".")[0] for name in imports(path)} & {"comm", "optim", "workers", "service"}
            assert not bare, f"{path}: {bare}"


def test_files_stay_short_enough_to_read():
    """600 lines are where a file is looked at: does it still answer one question? None has passed."""
    for folder in ("comm", "optim", "workers", "service", "thinwire"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 600, path


OF_VALUES = {"tensor", "scalar_tensor", "zeros", "ones", "full", "empty", "empty_strided", "eye", "Tensor", "arange"}
OF_NUMBERS = {"linspace", "logspace", "rand", "randn", "normal"}
OF_INTEGERS = {"randint", "randperm"}
OF_OTHERS = {"as_tensor", "asarray"}
"""Functions of torch that make tensors: by default in the dtype or on the device of the process, or in both."""


def test_no_tensor_takes_the_default_dtype_or_device_of_its_process():
    """torch.set_default_dtype and set_default_device are the user's; so is a model of ours, in workers/recipes."""
    named = {"dtype": OF_VALUES | OF_NUMBERS | OF_OTHERS, "device": OF_VALUES | OF_NUMBERS | OF_INTEGERS}
    makes = re.compile(rf"\btorch\.(?:{'|'.join(set().union(*named.values()))})\(")
    for folder in ("comm", "optim", "workers", "thinwire"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            if "recipes" in path.parts or not makes.search(source):  # a fifth of the files has to be parsed
                continue
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
                    continue
                made, given = node.func.attr, {one.arg for one in node.keywords}
                missing = [name for name, makers in named.items() if made in makers and name not in given]
                assert not missing, f"{path}:{node.lineno}: {ast.unparse(node)} without {missing}"
