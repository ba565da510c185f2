"""A real PostgreSQL server on a socket of its own, for as long as a module's tests, or a benchmark, run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from tests.conftest import missing
from tests.service.control_plane_harness import wait_until

URL = "postgresql+psycopg://postgres@/{database}?host={folder}"
KEPT = """
folder=$1; shift
"$@" &
read -r _
kill -QUIT $!
wait
rm -rf "$folder"
"""
"""A shell's: run a server, until this process ends, however it ends, for then the pipe from it is closed. Then end the
server at once, for nobody needs what it holds, and remove its folder.
"""


@contextmanager
def postgresql(*, durable: bool = False) -> Iterator[Callable[[], str]]:
    """Start the server; what it yields makes an empty database and returns its URL. durable: what is committed stays
    when the power fails, as people run it.
    """
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="tw-pg-", dir="/tmp"))  # a socket's path may have 100 characters
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    if os.getuid() == 0:  # which PostgreSQL refuses to run as
        how.update(user="postgres", group="postgres", extra_groups=[])
        shutil.chown(folder, "postgres")
    data = folder / "data"
    init = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync"]
    subprocess.run(init, check=True, **how)
    engine = create_engine(URL.format(database="postgres", folder=folder), isolation_level="AUTOCOMMIT")
    names = count()
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
    options += [] if durable else ["-c", "fsync=off"]
    command = [str(programs / "postgres"), "-D", str(data), *options]
    # A session of its own: what is typed at a terminal ends this process first.
    kept = subprocess.Popen(
        ["sh", "-c", KEPT, "kept", str(folder), *command], stdin=subprocess.PIPE, start_new_session=True, **how
    )

    def make() -> str:
        name = f"test{next(names)}"
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return URL.format(database=name, folder=folder)

    try:
        wait_until(lambda: _answers(engine), "PostgreSQL", timeout_s=60)
        yield make
    finally:
        engine.dispose()
        kept.communicate()


def _answers(engine: Engine) -> bool:
    try:
        engine.connect().close()
    except OperationalError:
        return False
    return True


def _programs() -> Path:
    """The folder of initdb and postgres, which Debian leaves out of the path."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not known:
        missing("PostgreSQL is not installed: apt install postgresql")
    return known[-1].parent
