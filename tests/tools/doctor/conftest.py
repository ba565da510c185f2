from tests.tools.lab.conftest import namespaces

__all__ = ["namespaces"]
