"""What tests/conftest.py leaves unmade for want of being asked for changes no selection by marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest

WRITTEN = """
import pytest
from tests.covering import every_value, parametrize
mark = pytest.mark

@pytest.fixture(params=["left", pytest.param("right", marks=pytest.mark.slow)])
def side(request):
    return request.param

def test_plain(): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.slow
@pytest.mark.parametrize("k", range(3))
def test_slow_cases(k): ...

@every_value({"size": (1, 2, 3), "dtype": ("float32", "float64")})
def test_covered(size, dtype): ...

@mark.law
@parametrize("value", [object(), object(), object()], usual=[1])
@pytest.mark.parametrize("other", [pytest.param(0, marks=mark.ray), 1])
def test_named_by_its_place(value, other): ...

@pytest.mark.few(2)
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3, 4])
def test_few(k): ...

@pytest.mark.parametrize("k", [pytest.param(k, marks=pytest.mark.slow) for k in range(3)])
def test_all_slow(k): ...

class TestOfAFixture:
    def test_sides(self, side): ...
"""
SLOW_FILE = "import pytest\npytestmark = [\n    pytest.mark.timeout(9),\n    pytest.mark.slow,\n]\ndef test_it(): ...\n"
CASES = 1 + 1 + 3 + 6 + 6 + 5 + 3 + 2 + 1


class _Kept:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def _selected(folder: Path, expression: str, *options: str) -> dict[str, set[str]]:
    """By the id of each test that `-m expression` selects its marks."""
    kept = _Kept()
    arguments = ["--collect-only", "-qq", "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", "-m", expression]
    arguments += options
    assert pytest.main([*arguments, str(folder)], plugins=[conftest, kept]) in (0, 5)
    return {item.nodeid: {mark.name for mark in item.iter_markers()} for item in kept.items}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("selection")
    (made / "pytest.ini").write_text("[pytest]\nmarkers =\n    law:\n    slow:\n    few(k):\n    ray:\n    gpu:\n")
    (made / "test_written.py").write_text(WRITTEN)
    (made / "test_wholly_slow.py").write_text(SLOW_FILE)
    return made


@pytest.fixture(scope="module")
def every(folder: Path) -> dict[str, set[str]]:
    return _selected(folder, "")


def test_without_an_expression_all_cases_are_there(every: dict[str, set[str]]) -> None:
    assert len(every) == CASES
    usual = sorted(name.partition("::")[2] for name, marks in every.items() if "slow" not in marks)
    assert usual == [
        "TestOfAFixture::test_sides[left]",
        "test_covered[1-float32]",
        "test_covered[2-float64]",
        "test_covered[3-float32]",
        "test_few[0]",
        "test_few[4]",
        "test_named_by_its_place[0-value1]",
        "test_named_by_its_place[1-value1]",
        "test_plain",
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "not slow",
        "not ray and not slow and not gpu",
        "law and not ray and not slow and not gpu",
        "ray and not slow and not gpu",
        "slow",
        "slow and not ray",
        "not ray and not gpu",
        "law or not slow",
        "not (slow and ray)",
        "not slow or ray",
    ],
)
def test_what_is_selected_is_what_the_expression_says_of_all(
    folder: Path, every: dict[str, set[str]], expression: str
) -> None:
    names = ("law", "slow", "ray", "gpu")
    said = {
        test
        for test, marks in every.items()
        if eval(expression, {"__builtins__": {}}, {name: name in marks for name in names})  # of the list above
    }
    assert set(_selected(folder, expression)) == said


def test_what_is_ruled_out_is_not_imported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text((folder / "pytest.ini").read_text())
    (tmp_path / "test_it.py").write_text(SLOW_FILE + "raise ImportError\n")
    assert not _selected(tmp_path, "not slow")


def test_of_the_cases_of_each_test_no_more_are_made_than_are_asked_for(folder: Path) -> None:
    one = _selected(folder, "not slow", "--most-cases", "1")
    assert sorted(name.partition("::")[2] for name in one) == [
        "TestOfAFixture::test_sides[left]",
        "test_covered[2-float64]",
        "test_few[4]",
        "test_named_by_its_place[1-value1]",
        "test_plain",
    ]
    assert len(one) < len(_selected(folder, "not slow", "--most-cases", "2")) < len(_selected(folder, "not slow"))
