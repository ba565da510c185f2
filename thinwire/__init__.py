"""Thinwire: elastic training over thin wires.

The packages stand at the top of the repository (comm/, optim/, workers/, service/) and are imported as
``thinwire.comm`` and so on through the four links beside this file: a top-level module named ``comm`` would
shadow the package that every Jupyter kernel imports.
"""

__version__ = "0.1.0"
