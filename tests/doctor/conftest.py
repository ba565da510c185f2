from tests.lab.conftest import namespaces

__all__ = ["namespaces"]
