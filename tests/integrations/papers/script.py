"""A script of examples/papers as a module: its functions, and main() where it stands."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "examples" / "papers"


def script(name):
    """The module; it is run no second time."""
    known = f"papers_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, FOLDER / f"{name}.py")
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]
