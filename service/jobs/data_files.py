"""Is the file of data that a job names one that it could train on? Where its processes run on the service's machine."""

from __future__ import annotations

import os
import stat

from thinwire.contract.spec import TextFile, TextRecipe, TrainSpec
from thinwire.service.errors import InvalidRequest


def check_data(spec: TrainSpec) -> None:
    """Refuse a data file that this machine cannot read, or too short a one. Raises InvalidRequest."""
    if not isinstance(spec.data, TextFile) or not isinstance(spec.recipe, TextRecipe):
        return
    path = spec.data.path
    impossible = "\0" in path or not os.path.isabs(path)
    wrong = "must be an absolute path" if impossible else _unusable(spec.data, spec.recipe.context)
    if wrong:
        raise InvalidRequest.at("data.path", path[:4096], wrong)


def _unusable(data: TextFile, context: int) -> str | None:
    """Why this machine cannot train on the file; None where it can."""
    try:
        found = os.stat(data.path)
    except FileNotFoundError:
        return "there is no such file on the service's machine"
    except OSError as error:
        return f"the service cannot reach this file: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "must be a regular file, not a folder or a device"
    if not os.access(data.path, os.R_OK):
        return "the service may not read this file; change its permissions, or name another"
    if found.st_size == 0:
        return "the file is empty; training needs text"
    training, validation = data.parts(found.st_size)
    if min(training, validation) <= context:
        return (
            f"the file has {found.st_size} bytes: {training} for training and {validation} for validation at "
            f"data.validation_fraction = {data.validation_fraction}; each part needs at least {context + 1}, one more "
            f"than recipe.context = {context}"
        )
    return None
