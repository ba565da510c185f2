"""What `thinwire drill` refuses, before anything is started."""

import pytest
from typer.testing import CliRunner

from thinwire.cli.drill import OptimizerName, app
from thinwire.workers.build import OPTIMIZERS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1"], "--workers"),
        (["--kill-every", "-1"], "greater than or equal to 1"),
        (["--minutes", "0"], "greater than or equal to 0.2"),
        (["--optimizer", "foo"], "onebit_adam"),
        (["--kill-every", "60", "--minutes", "1"], "nobody would be killed"),
        (["--out", "/proc/no/such"], "/proc/no/such"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(arguments, words):
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert words in " ".join(told.output.replace("│", " ").split())  # wrapped, in a box
    assert "Traceback" not in told.output


def test_it_knows_each_optimizer_of_a_job_file():
    assert {name.value for name in OptimizerName} == set(OPTIMIZERS)
