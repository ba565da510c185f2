"""Each extra brings what its rooms import, and no more; what is missing is named with the extra that brings it.

The processes here refuse every package that the extra does not bring, so that it is as if it were not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib

import pytest

from tests.extras import ROOT, STEPS, asked, closure, only
from thinwire.cli.commands import OWN_COMMANDS
from thinwire.cli.extras import OF_COMMAND, OF_MODULE, install_line

WEB = {"fastapi", "sqlalchemy", "uvicorn", "alembic"}
TRAINING = {"torch", "numpy", "numba"}

ROOMS = {
    (): "thinwire.cli.main thinwire.cli.doctor thinwire.cli.drill thinwire.cli.lab thinwire.boxes "
    "thinwire.client thinwire.contract.spec thinwire.service.launch.kuberay.manifest",
    ("optim",): "thinwire.comm thinwire.optim thinwire.optim.saves thinwire.optim.regroup thinwire.train "
    "thinwire.workers.session.session thinwire.workers.weights thinwire.integrations.ddp_compression",
    ("worker",): "thinwire.workers.main thinwire.workers.elastic.bring_up thinwire.workers.telemetry.reporter "
    "thinwire.workers.telemetry.history thinwire.service.launch.start_hook thinwire.tools.doctor.on_ray",
    ("service",): "thinwire.service.main thinwire.service.server thinwire.service.migrations.versions",
}
"""By extra: the modules that must be there. Those below them come along."""


def run(source: str) -> subprocess.CompletedProcess[str]:
    """A process of its own; the end of what it says, where it fails."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_optimizers_bring_no_ray_and_no_web_framework_and_the_service_no_torch():
    assert {"torch", "numpy", "numba", "safetensors"} <= closure("optim")
    assert (WEB | {"ray"}).isdisjoint(closure("optim"))
    assert {"ray", "torch"} <= closure("worker")
    assert WEB.isdisjoint(closure("worker"))
    assert closure("service") >= WEB
    assert (TRAINING | {"ray"}).isdisjoint(closure("service"))
    assert closure("all") == closure("worker", "service")
    assert (WEB | TRAINING | {"ray"}).isdisjoint(closure())


@pytest.mark.few(1)
@pytest.mark.parametrize("extras", ROOMS, ids=lambda extras: "-".join(extras) or "none")
def test_an_extra_is_enough_for_its_rooms(extras):
    imports = "\n".join(f"import {module}" for module in ROOMS[extras].split())
    run(only(*extras) + imports + (STEPS if extras == ("optim",) else ""))


def test_a_missing_extra_is_one_line_that_says_which():
    source = """
    import sys
    from thinwire.cli.main import main

    for words in ("serve", "quickstart", "plan examples/quickstart.yaml", "drill", "bench kernels"):
        try:
            main(words.split())
        except SystemExit as end:
            assert end.code == 1, words
    """
    said = run(only() + textwrap.dedent(source)).stderr.splitlines()
    lines = [line for line in said if line.startswith("thinwire: ")]
    assert [line.partition(": ")[2].partition(" needs ")[0] for line in lines] == [
        "`thinwire serve`",
        "a first job on this machine",
        "`thinwire plan`",
        "`thinwire drill`",
        "`thinwire bench`",
    ]
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"pip install 'thinwire[{extra}]'" for extra in ("service", "all", "optim", "worker", "worker")
    ]


def test_the_help_lists_our_own_commands_without_any_extra():
    said = run(only() + "from thinwire.cli.main import main\nmain(['--help'])").stdout
    for name, (_, words) in OWN_COMMANDS.items():
        assert re.search(rf"{name} +{' '.join(words.split()[:3])}", said), name


def test_what_the_command_line_names_is_what_pyproject_declares():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*OF_COMMAND.values(), *OF_MODULE.values()} <= set(declared)
    for module, extra in OF_MODULE.items():
        name = {"sklearn": "scikit-learn"}.get(module, module).replace("_", "-")
        assert name in {requirement.name.lower() for requirement in asked(extra)}, module


def test_a_command_names_all_it_needs_and_a_module_of_a_special_extra_that_one():
    assert install_line("quickstart", "torch") == "pip install 'thinwire[all]'"
    assert install_line("drill", "numpy.linalg") == "pip install 'thinwire[worker]'"
    assert install_line("serve", "kubernetes") == "pip install 'thinwire[kubernetes]'"
    assert install_line(None, "ray") == "pip install 'thinwire[worker]'"
