"""A call of the command line in the test's own process."""

from __future__ import annotations

import pytest

from thinwire.cli import main as cli


class Run:
    """One call of the command line, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        self.code = left.value.code
        self.out, self.err = capsys.readouterr()
        assert "Traceback" not in self.err
