"""Going on from the files that are there, and through cases that fail."""

import pytest
from typer.testing import CliRunner

from benchmarks.wire import bench
from benchmarks.wire.cases import LOADS, full_set, quick_set
from benchmarks.wire.measure import CaseFailed, sittings_of
from benchmarks.wire.methods import BASELINE, METHODS, STANDARD
from benchmarks.wire.net import NetError
from benchmarks.wire.results import ResultError, finished, path_of, read, write
from thinwire.cli import bench as bench_cli

from .wire_made_up import a_case, made_up

CASES = [a_case(rate=rate) for rate in (1000, 100)]


class Runs:
    """Stands for measuring: notes the cases, and fails where it is told to."""

    def __init__(self, **failing):
        self.names = []
        self.failing = failing

    def __call__(self, case, command, tell):
        self.names.append(case.name)
        tell("round 1")
        if case.network.link in self.failing:
            raise self.failing[case.network.link]
        return made_up(case, {"ddp_fp32": 0.2, "onebit_adam": 0.1})


def test_a_result_is_read_as_it_was_written(tmp_path):
    result = made_up(CASES[0], {"ddp_fp32": 0.2})
    path = write(tmp_path, CASES[0], result)
    assert read(path) == result
    assert result.name == CASES[0].name
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_finished_cases_are_not_run_again_unless_asked(tmp_path):
    first, second, third = Runs(), Runs(), Runs()
    assert bench.run(CASES[:1], tmp_path, measure_case=first) == 0
    assert bench.run(CASES, tmp_path, measure_case=second) == 0
    assert bench.run(CASES, tmp_path, fresh=True, measure_case=third) == 0
    assert (first.names, second.names) == ([CASES[0].name], [CASES[1].name])
    assert third.names == [case.name for case in CASES]
    assert (tmp_path / "README.md").exists()


def test_one_case_can_be_run_and_the_tables_tell_of_all(tmp_path):
    first, second = Runs(), Runs()
    assert bench.run(CASES, tmp_path, measure_case=first) == 0
    assert bench.run(CASES, tmp_path, fresh=True, only=CASES[0].name, measure_case=second) == 0
    assert second.names == [CASES[0].name]
    assert len(finished(tmp_path, CASES)) == len(CASES)


def test_results_of_other_settings_are_refused_and_named(tmp_path):
    write(tmp_path, CASES[0], made_up(CASES[0], {"ddp_fp32": 0.2}))
    other = a_case(budget_s=1.0)
    with pytest.raises(ResultError, match=r"2x1Gbit\.json: differs in budget_s(.|\n)*--fresh"):
        finished(tmp_path, [other])
    runs = Runs()
    assert bench.run([other], tmp_path, measure_case=runs) == 2
    assert runs.names == []


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = path_of(tmp_path, CASES[0])
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ResultError, match="is not a result"):
        finished(tmp_path, CASES)


def test_a_case_that_fails_does_not_end_the_set(tmp_path):
    runs = Runs(**{"1Gbit": CaseFailed("DDP fp32 failed")})
    assert bench.run(CASES, tmp_path, measure_case=runs) == 1
    assert set(finished(tmp_path, CASES)) == {CASES[1].name}


def test_without_a_lab_the_set_ends_at_once(tmp_path, capsys):
    runs = Runs(**{"1Gbit": NetError("a lab needs root")})
    assert bench.run(CASES, tmp_path, measure_case=runs) == 1
    assert len(runs.names) == 1
    assert "a lab needs root" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    assert bench.run(CASES, tmp_path, measure_case=Runs(**{"100Mbit": KeyboardInterrupt()})) == 130
    assert set(finished(tmp_path, CASES)) == {CASES[0].name}


def test_tables_can_be_written_without_a_run(tmp_path):
    runs = Runs()
    assert bench.run(CASES, tmp_path, run_missing=False, measure_case=runs) == 1
    write(tmp_path, CASES[0], made_up(CASES[0], {"ddp_fp32": 0.2}))
    assert bench.run(CASES, tmp_path, fresh=True, run_missing=False, measure_case=runs) == 0
    assert runs.names == []


@pytest.mark.slow
def test_the_sets():
    full, quick = full_set(METHODS), quick_set(METHODS)
    assert len({case.name for case in full}) == len(full) == 15
    assert {(case.network.hosts, case.network.rate_mbit) for case in full} == {
        (2, 100),
        (4, 100),
        (2, 1000),
        (4, 1000),
        (2, 2700),
    }
    assert {case.name for case in quick} <= {case.name for case in full}
    assert sum(map(bench.expected_s, quick)) < 600
    assert sum(map(bench.expected_s, full)) < 45 * 60
    assert all(case.methods == tuple(METHODS) for case in (*full, *quick))


def test_the_command_goes_on_from_the_committed_results():
    """They are of the cases, methods and settings that it would run: none is refused, none is missing."""
    assert len(finished(bench.RESULTS, full_set(STANDARD))) == 15


def test_a_load_is_wider_where_its_name_says_so():
    assert LOADS["gpt-10m"].recipe.width < LOADS["gpt-25m"].recipe.width


def test_methods_are_cut_into_sittings_where_memory_ends_and_the_baseline_is_in_each():
    case = a_case("gpt-25m", hosts=4, methods=tuple(METHODS))
    plenty, little = sittings_of(case, 1e12), sittings_of(case, 24e9)
    assert len(plenty) == 1
    assert len(little) > 1
    for sittings in (plenty, little, sittings_of(case, 1e9)):
        assert all(sitting[0].name == BASELINE for sitting in sittings)
        names = [method.name for sitting in sittings for method in sitting if method.name != BASELINE]
        assert sorted(names) == sorted(set(METHODS) - {BASELINE})
        for sitting in sittings:
            families = [method.family for method in sitting]
            assert (
                len([f for other in sittings if other is not sitting for m in other[1:] if (f := m.family) in families])
                == 0
            )


def command(*words):
    return CliRunner().invoke(bench_cli.app, list(words))


def test_the_command_names_the_methods_and_refuses_others():
    assert all(name in command("lab", "--methods", "help").output for name in METHODS)
    refused = command("lab", "--methods", "adam,adamm")
    assert refused.exit_code == 2
    assert "adamm" in refused.output


def test_a_case_that_is_not_there_is_refused_with_those_that_are():
    refused = command("lab", "--only", "gpt-25m/3x100Mbit")
    assert refused.exit_code == 2
    assert "gpt-25m/4x100Mbit" in refused.output


@pytest.mark.parametrize(
    ("words", "loads", "folder"),
    [
        (["lab"], {"exchange-25m", "gpt-25m", "gpt-10m"}, "RESULTS"),
        (["exchange", "--quick"], {"exchange-25m"}, "QUICK_RESULTS"),
        (["lab", "--loopback", "--methods", "adam"], {"tiny"}, "TRY_RESULTS"),
    ],
)
def test_the_commands_choose_cases_and_folder(monkeypatch, words, loads, folder):
    seen = []

    def run(cases, out, **options):
        seen.append((cases, out, options))
        return 7

    monkeypatch.setattr(bench, "run", run)
    assert command(*words).exit_code == 7
    ((cases, out, options),) = seen
    assert {case.load.name for case in cases} == loads
    assert out == getattr(bench, folder)
    assert options == {"fresh": False, "run_missing": True, "only": None}
    if "--methods" in words:
        assert cases[0].methods == (BASELINE, "adam")


def test_without_a_checkout_the_command_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_cli, "ROOT", tmp_path)
    refused = command("lab", "--quick")
    assert refused.exit_code == 1
    assert "Clone the repository" in refused.output
