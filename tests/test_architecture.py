"""Rules of the house that import-linter cannot state."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.law

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["comm", "optim", "workers", "service"])
def test_packages_are_links_to_the_top_level_folders(package):
    link = ROOT / "thinwire" / package
    assert link.is_symlink()
    assert link.readlink() == Path("..") / package


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
    for folder in ("comm", "optim", "workers", "service", "thinwire", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            bare = {name.split(".")[0] for name in imports(path)} & {"comm", "optim", "workers", "service"}
            assert not bare, f"{path}: {bare}"


def test_files_stay_short_enough_to_read():
    """600 lines are where a file is looked at: does it still answer one question? None has passed."""
    for folder in ("comm", "optim", "workers", "service", "thinwire"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 600, path


MAKES_TENSORS = {
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "full", "empty", "empty_strided", "eye"),
    *("arange", "linspace", "logspace", "rand", "randn", "normal", "Tensor"),
}


def test_no_tensor_takes_the_default_dtype_of_its_process():
    """torch.set_default_dtype is its user's. A model of ours, in workers/recipes, is one of the user's process."""
    for folder in ("comm", "optim", "workers", "thinwire"):
        for path in (ROOT / folder).rglob("*.py"):
            if "recipes" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in MAKES_TENSORS:
                    called = ast.unparse(node)
                    if called.startswith("torch."):
                        assert any(one.arg == "dtype" for one in node.keywords), f"{path}:{node.lineno}: {called}"
