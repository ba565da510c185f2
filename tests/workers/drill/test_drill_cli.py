"""What `thinwire drill` refuses, before anything is started."""

import pytest
from typer.testing import CliRunner

from thinwire.workers.drill_cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1"], "2<=x<=64"),
        (["--kill-every", "-1"], "x>=1.0"),
        (["--minutes", "0"], "0.2<=x<=600.0"),
        (["--optimizer", "foo"], "onebit_adam"),
        (["--kill-every", "60", "--minutes", "1"], "nobody would be killed"),
        (["--out", "/proc/no/such"], "/proc/no/such"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(arguments, words):
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert words in told.output
    assert "Traceback" not in told.output
