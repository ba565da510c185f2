"""Which extra of the package to install: by the command that was called, and by the module that it lacks.

The names are those of [project.optional-dependencies] in pyproject.toml; a test holds both tables against it.
"""

from __future__ import annotations

from typing import Final

OF_COMMAND: Final = {
    "serve": "service",
    "quickstart": "all",
    "drill": "worker",
    "bench": "worker",
    "plan": "optim",
    "fetch": "optim",
    "picture": "worker",
}
"""All that the command needs, so that nobody installs twice."""
OF_MODULE: Final = {
    "torch": "optim",
    "numpy": "optim",
    "numba": "optim",
    "safetensors": "optim",
    "ray": "worker",
    "fsspec": "worker",
    "matplotlib": "worker",
    "fastapi": "service",
    "fastapi_offline": "service",
    "uvicorn": "service",
    "sqlalchemy": "service",
    "alembic": "service",
    "prometheus_client": "service",
    "psycopg": "postgresql",
    "kubernetes": "kubernetes",
    "s3fs": "s3",
    "sklearn": "vision",
}
_ROOMS: Final = frozenset({"optim", "worker", "service", "all"})


def install_line(command: str | None, module: str) -> str:
    """The line of pip that brings `module`, and what else `command` needs; command: None if it is not one of ours."""
    extra = OF_MODULE.get(module.partition(".")[0], "all")
    if extra in _ROOMS:
        extra = OF_COMMAND.get(command or "", extra)
    return f"pip install 'thinwire[{extra}]'"
