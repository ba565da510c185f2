"""Loops on numbers, compiled by numba: rounding as they are written, without the interpreter's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile it at its first call, or take it from the cache. Nothing is contracted or reassociated."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError as error:  # numba's, where it finds no folder that it may write
        logger.warning("kernels_not_cached function=%s reason=%r set=NUMBA_CACHE_DIR", function.__name__, str(error))
        return njit(**options)(function)  # type: ignore[no-any-return]
