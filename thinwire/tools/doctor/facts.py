"""What one box says of itself. Standard library, and on Linux the files in which the kernel tells it.

Whether it can write to a store at a URL is tried with the libraries that a job opens it with.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from thinwire.contract.interfaces import interfaces as ipv4_addresses
from thinwire.contract.stores import SUPPORTED, nobody_opens

PACKAGES = ("thinwire", "torch", "ray", "numpy", "torchvision")
ENVIRONMENT = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HTTP_PROXY", "http_proxy")
_NVIDIA_SMI_S = 20.0


class Frozen(BaseModel):
    """Sent from box to box as JSON; what another version adds is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Questions(Frozen):
    """What is asked of every box beside what it always tells.

    folders: that a job writes to. stores: the same, at URLs. files: that it reads.
    """

    folders: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class Interface(Frozen):
    """speed_mbit: what card and switch have agreed on; None where there is no card, or it does not say."""

    name: str
    up: bool
    mtu: int | None
    speed_mbit: int | None
    addresses: tuple[str, ...]


class Folder(Frozen):
    """A place for files. problem: why it cannot be written to, None where it can. free_files: None where unlimited."""

    path: str
    free_bytes: int | None
    total_bytes: int | None
    free_files: int | None
    problem: str | None


class Gpu(Frozen):
    """As nvidia-smi tells it, memory in MiB."""

    name: str
    driver: str
    memory_mib: int
    used_mib: int


class Facts(Frozen):
    """A box. versions: of packages, without those that are not installed. memory_bytes: what processes may have.

    files, stores: each, and why it cannot be read, or written to; None where it can. gpu_problem: why nvidia-smi, which
    is there, does not work. hostname_address: what the box's own name means there; None where it means nothing.
    ports: first and last of those that the kernel chooses from.
    """

    hostname: str
    system: str
    python: str
    versions: dict[str, str]
    cpus: int
    memory_bytes: int | None
    available_bytes: int | None
    interfaces: tuple[Interface, ...]
    folders: tuple[Folder, ...]
    files: dict[str, str | None]
    stores: dict[str, str | None] = Field(default_factory=dict)
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None
    environment: dict[str, str]
    hostname_address: str | None
    ports: tuple[int, int] | None

    def interface_of(self, address: str) -> Interface | None:
        """The one that has this address."""
        return next((one for one in self.interfaces if address in one.addresses), None)


def look(questions: Questions) -> Facts:
    """Look at this box. It writes an empty file into each folder, and removes it."""
    total, available = _memory()
    folders = dict.fromkeys([tempfile.gettempdir(), str(Path.home()), *questions.folders])
    gpus, gpu_problem = _gpus()
    return Facts(
        hostname=socket.gethostname(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=_versions(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total,
        available_bytes=available,
        interfaces=interfaces(),
        folders=tuple(map(_folder, folders)),
        files={path: _unreadable(path) for path in questions.files},
        stores={url: unwritable(url) for url in questions.stores},
        gpus=gpus,
        gpu_problem=gpu_problem,
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        hostname_address=_address_of_own_name(),
        ports=_port_range(),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _memory() -> tuple[int | None, int | None]:
    """All that processes of this box may have, and what of it is free. A container's limit counts."""
    said = _text("/proc/meminfo")
    if said is None:
        return None, None
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", said, re.MULTILINE)}
    total, available = kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit < total:
        return limit, min(available, max(0, limit - used))
    return total, available


def interfaces() -> tuple[Interface, ...]:
    """All of this box, in order of name."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return ()
    four, six = ipv4_addresses(), _ipv6_addresses()
    found = []
    for name in sorted(names):
        folder = f"/sys/class/net/{name}"
        # Only where there is a card: a virtual interface tells a speed that means nothing.
        speed = _number(f"{folder}/speed") if os.path.exists(f"{folder}/device") else None
        flags = _text(f"{folder}/flags")
        found.append(
            Interface(
                name=name,
                up=flags is None or bool(int(flags, 16) & 1),
                mtu=_number(f"{folder}/mtu"),
                speed_mbit=speed if speed is not None and speed > 0 else None,
                addresses=(*([four[name]] if name in four else []), *six.get(name, [])),
            )
        )
    return tuple(found)


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (_text("/proc/net/if_inet6") or "").splitlines():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def _folder(path: str) -> Folder:
    """What is free where the folder is, or would be made."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = total = files = None
    try:
        usage, counts = shutil.disk_usage(place), os.statvfs(place)
        free, total = usage.free, usage.total
        files = counts.f_favail if counts.f_files else None
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return Folder(path=path, free_bytes=free, total_bytes=total, free_files=files, problem=error.strerror)
    return Folder(path=path, free_bytes=free, total_bytes=total, free_files=files, problem=None)


def _unreadable(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), None
    asked = "--query-gpu=name,driver_version,memory.total,memory.used"
    try:
        said = subprocess.run(
            [program, asked, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi has not ended after {_NVIDIA_SMI_S:.0f} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be run: {error.strerror}"
    if said.returncode != 0:
        return (), " ".join((said.stdout + said.stderr).split())[:300] or f"nvidia-smi ended with {said.returncode}"
    return tuple(_gpu(line) for line in said.stdout.splitlines() if line.strip()), None


def _gpu(line: str) -> Gpu:
    name, driver, memory, used = (word.strip() for word in line.rsplit(",", 3))
    # A card whose memory is not known, or that shares the machine's, says [N/A].
    return Gpu(name=name, driver=driver, memory_mib=_whole(memory), used_mib=_whole(used))


def _whole(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def _address_of_own_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _port_range() -> tuple[int, int] | None:
    words = (_text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _number(path: str) -> int | None:
    text = _text(path)
    try:
        return None if text is None else int(text)
    except ValueError:  # "max"
        return None


def _text(path: str) -> str | None:
    """What the kernel says there; None where it says nothing, as `speed` of an interface that is down."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


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
