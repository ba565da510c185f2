"""The scripts of examples/papers as modules: their functions, and main() where it stands."""

import importlib
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[3] / "examples" / "papers")


def script(name):
    """The module, as the scripts there import one another."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return importlib.import_module(name)
