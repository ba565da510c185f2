"""The control plane as a process: one per home folder, on a port that it finds and says.

The running server is found by $THINWIRE_HOME/server.json, {"url", "pid"}, which is there while it answers. A lock
file makes it the only one: the lock is the kernel's and ends with the process, however that ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import json
import logging
import os
import platform
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from types import FrameType
from urllib.parse import urlsplit

import uvicorn

from thinwire.contract.files import private_folder, unusable_home, write_private
from thinwire.contract.tls import WrongCa
from thinwire.contract.traces import TracesMissing
from thinwire.service.config import LOOPBACK, Settings
from thinwire.service.connections import ACCEPTED_AT_ONCE, MOST, Bounds, bounded, within_tls
from thinwire.service.db import DatabaseUnusable
from thinwire.service.launch.fake import FakeLauncher, Timeline
from thinwire.service.launch.protocol import Launcher
from thinwire.service.main import ControlPlane, DatabaseOwned, create_app
from thinwire.service.people.oidc_people import SignOnMissing
from thinwire.service.people.tokens import TokenFileError

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CERTIFICATE_TICKS = 100
"""Between two looks whether the certificate was renewed, in tenths of a second."""
M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
OPEN_REQUESTS_S = 3
"""How long requests that are under way at the end may still take; all else ends after them."""


class ServeRefused(Exception):
    """The server cannot run; the message says why and what to do."""


def serve(
    settings: Settings, *, launcher: Launcher | None = None, on_started: Callable[[str], None] | None = None
) -> None:
    """Run the control plane until SIGINT, SIGTERM or SIGHUP; then end it with everything it started.

    launcher: default, the one that the settings name. on_started: called with the url once requests are answered.
    Must be called in the main thread: it handles signals. Raises: ServeRefused, also where another service has taken
    the database over; LauncherError where something that the launcher had started could not be ended.
    """
    _share_heaps()
    with _signals() as asked_to_end, _only_server(settings):
        listener = _bind(settings.host, settings.port)
        try:
            tls = _tls(settings)
            here = _url(listener, "http" if tls is None else "https")
            url = settings.public_url or here
            launcher = launcher or make_launcher(settings)
            try:
                peer = None if settings.peer_host is None else _at(settings.peer_host, here)
                app = create_app(settings, launcher, service_url=url, peer_url=peer)
                plane: ControlPlane = app.state.plane
                plane.own()
            except (DatabaseUnusable, DatabaseOwned, WrongCa, TracesMissing, SignOnMissing) as error:
                raise ServeRefused(str(error)) from error
            except TokenFileError as error:
                raise ServeRefused(f"the home folder {settings.home} cannot be used: {error}") from error
            except OSError as error:
                raise ServeRefused(unusable_home(settings.home, error)) from error
            most = raise_file_limit()
            config = uvicorn.Config(
                app,
                http=bounded(Bounds(most=most)),
                ws="none",
                backlog=min(ACCEPTED_AT_ONCE, most // 4),
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=OPEN_REQUESTS_S,
                proxy_headers=False,  # the application's own are behind the one that sees the peer (main.py)
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
            # What is on this machine checks the certificate too: it is of the name in the public URL.
            server = _Server(config, settings, here if tls is None else url, on_started, plane.hub.end)
            asked_to_end.append(server)
            plane.on_lost = server.end
            try:
                asyncio.run(server.serve(sockets=[listener]))
            finally:
                settings.server_file.unlink(missing_ok=True)
                # A second Ctrl-C makes uvicorn skip the end of the lifespan; nothing may stay behind.
                plane.close()
            if plane.ownership.over is not None:
                raise ServeRefused(plane.ownership.over)
            if not server.started:
                raise ServeRefused("the service could not start; the log above says why")
        finally:
            listener.close()
    logger.info("server_ended home=%s", settings.home)


def _share_heaps() -> None:
    """Let the threads that answer requests share two heaps.

    glibc would give 16 of them one each, and each keeps what its largest answers took. Python's own lock leaves
    little to gain by more. MALLOC_ARENA_MAX in the environment says otherwise; other C libraries have no such heaps.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


class _Server(uvicorn.Server):
    """uvicorn's server that writes server.json when it answers, and ends streams when it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        url: str,
        on_started: Callable[[str], None] | None,
        end_streams: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._end_streams = end_streams
        self._url = url
        self._on_started = on_started

        self._certificate = _seen(settings)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. New connections get a certificate that was renewed; who has one keeps it."""
        if counter % CERTIFICATE_TICKS == 0 and (now := _seen(self._settings)) != self._certificate:
            self._certificate = now
            try:
                assert self.config.ssl is not None, "only with TLS is there anything to see"
                _load(self.config.ssl, self._settings)
                logger.info("certificate_renewed path=%s", self._settings.tls_certificate)
            except ServeRefused as error:  # half written: it changes once more
                logger.error("certificate_not_renewed reason=%s", error)
        return await super().on_tick(counter)

    def end(self) -> None:
        """Answer what is under way, then end. From any thread."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, which would go on for ever; answer what is under way, and end."""
        self._end_streams("this service ends: ask again in a moment, and go on from the last id")
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then say so."""
        if self.config.ssl is not None:
            within_tls(asyncio.get_running_loop())
        await super().startup(sockets)
        if not self.started or self.should_exit:
            return
        write_private(self._settings.server_file, json.dumps({"url": self._url, "pid": os.getpid()}) + "\n")
        logger.info("server_started url=%s home=%s pid=%d", self._url, self._settings.home, os.getpid())
        if self._on_started is not None:
            self._on_started(self._url)


@contextmanager
def _signals() -> Iterator[list[_Server]]:
    """Let the signals end the servers in the list, and nothing else, until everything is closed.

    uvicorn takes SIGINT and SIGTERM over while it runs and raises them again at its end; these handlers are what
    they then meet. They also cover the time before and after.
    """
    servers: list[_Server] = []
    early = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal early
        early = True
        for server in servers:
            server.should_exit = True
        if not servers:
            raise KeyboardInterrupt  # nothing has been started yet

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield servers
    except KeyboardInterrupt:
        if not early:
            raise
        logger.info("server_ended before=start")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_server(settings: Settings) -> Iterator[None]:
    """Hold the home folder's lock. Raises ServeRefused where another server holds it."""
    try:
        private_folder(settings.home)
        descriptor = os.open(settings.home / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ServeRefused(unusable_home(settings.home, error)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeRefused(
                f"another server already serves {settings.home}: {_other(settings)}. Use that one, end it, or set "
                "THINWIRE_HOME to another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _other(settings: Settings) -> str:
    try:
        known = json.loads(settings.server_file.read_text(encoding="utf-8"))
        return f"{known['url']}, process {known['pid']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it is starting or ending and has not said its address"


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServeRefused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(ACCEPTED_AT_ONCE)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = "port 0 finds a free one"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            hint = "name an address of this machine, such as 127.0.0.1"
        raise ServeRefused(f"cannot listen on {host} port {port}: {error.strerror or error}; {hint}") from error
    return listener


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """The context of the service's certificate; None where it speaks plain HTTP. Raises ServeRefused."""
    if settings.tls_certificate is None:
        if settings.host not in LOOPBACK:
            logger.warning(
                "tokens_in_clear host=%s: set THINWIRE_TLS_CERTIFICATE and THINWIRE_TLS_KEY, or put a TLS proxy before "
                "the service and let it listen on loopback",
                settings.host,
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, settings)
    return context


def _load(context: ssl.SSLContext, settings: Settings) -> None:
    certificate, key = settings.tls_certificate, settings.tls_key
    assert certificate is not None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ServeRefused(
            f"THINWIRE_TLS_CERTIFICATE = {certificate} and THINWIRE_TLS_KEY = {key} cannot be used ({error}): name a "
            "certificate and its own key, both as PEM, that the service's user can read; the key without a password"
        ) from error


def _no_password() -> str:
    """Or OpenSSL would ask the terminal."""
    raise ValueError("the key has a password")


def _seen(settings: Settings) -> tuple[tuple[int, int], ...]:
    """What tells a file of the certificate from another one in its place."""
    found = []
    for path in filter(None, (settings.tls_certificate, settings.tls_key)):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_ino))
    return tuple(found)


def _url(listener: socket.socket, scheme: str = "http") -> str:
    """How a process of this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    address = ip_address(host)
    if address.is_unspecified:  # 0.0.0.0 and :: are not addresses that one can connect to
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


def _at(host: str, here: str) -> str:
    """The URL of the listener for those who reach it at this name or address."""
    parts = urlsplit(here)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def _local(settings: Settings) -> Launcher:
    from thinwire.service.launch.local import LocalLauncher

    return LocalLauncher(settings.home)


def _ray(settings: Settings) -> Launcher:
    from thinwire.service.launch.ray import RayLauncher

    assert settings.ray_address is not None, "the settings ask for it"
    return RayLauncher(settings.ray_address, settings.ray_token_file, grows=settings.ray_autoscales)


def _kuberay(settings: Settings) -> Launcher:
    try:
        from thinwire.service.launch.kuberay.by_project import ByProject
        from thinwire.service.launch.kuberay.kube import own_namespace
        from thinwire.service.launch.kuberay.launcher import KubeRayLauncher
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kubernetes":
            raise
        raise ServeRefused(
            "launcher = kuberay needs the Kubernetes client, which is not installed: pip install 'thinwire[kubernetes]'"
        ) from error
    own = None if settings.kuberay_shared_namespace else own_namespace()
    projects = [name for name, at in settings.kuberay_namespaces.items() if own is not None and at == own]
    if projects:
        raise ServeRefused(
            f"THINWIRE_KUBERAY_NAMESPACES gives the project {projects[0]} the namespace of the service's own pod, {own}"
            ": name another, or set THINWIRE_KUBERAY_SHARED_NAMESPACE=true"
        )
    if own is not None and settings.kuberay_namespace in (None, own):
        raise ServeRefused(
            f"THINWIRE_KUBERAY_NAMESPACE is {settings.kuberay_namespace or 'not set'}, and the service's own pod is in "
            f"{own}: KubeRay lets the autoscaler of each job change all pods of the jobs' namespace. Name another "
            "namespace, or set THINWIRE_KUBERAY_SHARED_NAMESPACE=true"
        )
    default = settings.kuberay_namespace
    launchers = {
        namespace: KubeRayLauncher(
            namespace,
            settings.kuberay_template,
            settings.kuberay_image,
            pods=settings.kuberay_pods,
            apart=settings.kuberay_jobs_apart,
        )
        for namespace in (default, *settings.kuberay_namespaces.values())
    }
    if len(launchers) == 1:
        return launchers[default]
    return ByProject(launchers[default], {name: launchers[at] for name, at in settings.kuberay_namespaces.items()})


def _fake(settings: Settings) -> Launcher:
    return FakeLauncher(timeline=Timeline())


LAUNCHERS: dict[str, Callable[[Settings], Launcher]] = {
    "local": _local,
    "ray": _ray,
    "kuberay": _kuberay,
    "fake": _fake,
}


def make_launcher(settings: Settings) -> Launcher:
    """The launcher that the settings name, not started. Raises KeyError."""
    return LAUNCHERS[settings.launcher](settings)


WANTED_FILES = 65_536
KEPT_FILES = 256
"""Of the process's limit: not for connections, but for the database, logs, and what it starts."""


def raise_file_limit() -> int:
    """Let this process open as many files as it may, up to WANTED_FILES. Returns how many connections fit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(MOST, soft - KEPT_FILES))
