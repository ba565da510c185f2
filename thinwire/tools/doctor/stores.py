"""Whether this box can write to a store at a URL, tried with the libraries that a job opens it with."""

from __future__ import annotations

import importlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from typing import Any

from thinwire.contract.stores import SUPPORTED, nobody_opens

LIMIT_S = 20.0


def unwritable(url: str, limit_s: float = LIMIT_S) -> str | None:
    """Why a small file cannot be written there and removed again; None where it can. It takes at most `limit_s`."""
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        pool.submit(_write, url).result(timeout=limit_s)
    except OutOfTime:
        return f"no answer within {limit_s:.0f} s"
    except Exception as error:  # noqa: BLE001 - every client of a store raises what it likes, and that is the finding
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        pool.shutdown(wait=False)  # a client that hangs is left behind
    return None


def _write(url: str) -> None:
    name = f"thinwire-doctor-{secrets.token_hex(6)}"
    try:
        filesystem, root = importlib.import_module("fsspec").core.url_to_fs(url)
    except (ImportError, ValueError) as no_fsspec:
        _write_with_pyarrow(url, name, no_fsspec)
        return
    path = f"{root.rstrip('/')}/{name}"
    if not filesystem.exists(root):
        filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(path, b"thinwire")
    filesystem.rm_file(path)


def _write_with_pyarrow(url: str, name: str, no_fsspec: Exception) -> None:
    """As a job does, where fsspec does not open the URL."""
    try:
        opener: Any = importlib.import_module("pyarrow.fs").FileSystem
    except ImportError as error:
        raise ImportError(f"neither fsspec ({no_fsspec}) nor pyarrow ({error}) opens it. {SUPPORTED}") from error
    try:
        filesystem, root = opener.from_uri(url)
    except ValueError as error:
        raise ValueError(f"{error}. {SUPPORTED}" if nobody_opens(error) else str(error)) from error
    path = f"{root.rstrip('/')}/{name}"
    with filesystem.open_output_stream(path) as file:
        file.write(b"thinwire")
    filesystem.delete_file(path)
