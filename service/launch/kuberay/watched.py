"""All objects of a kind that are the service's, as the API server has told them: listed once, then watched.

A list gives all, and the version that they are of; a watch gives what has changed since. Where the server has forgotten
that version (410 Gone) all are listed again. Without an answer the objects go on to be as they were last seen, and
`silent_s` tells for how long: nothing is taken for gone that has not been told to be.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from thinwire.service.launch.kuberay.kube import Expired, Kube, KubeError
from thinwire.service.launch.kuberay.manifest import Object

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MOST_RETRY_S = 15.0


class Watched:
    """One kind of objects, followed in a thread. changed: called after each change, from that thread."""

    def __init__(self, kube: Kube, plural: str, selector: str, changed: Callable[[], None] = lambda: None) -> None:
        self._kube, self._plural, self._selector, self._changed = kube, plural, selector, changed
        self._objects: dict[str, Object] = {}
        self._put_at: dict[str, float] = {}
        self._version = ""
        """All changes up to this one are told; "": they must be listed."""
        self._lock = threading.Lock()
        """Of the three above."""
        self._stop = threading.Event()
        self._heard: float | None = None
        self._why = "it has not been listed yet"
        self._thread = threading.Thread(target=self._run, name=f"thinwire-{plural}", daemon=True)

    def start(self) -> None:
        """List them, then begin to follow. Raises KubeError."""
        self._list()
        self._thread.start()

    def close(self) -> None:
        """Follow no more. The thread ends with the watch that it is in."""
        self._stop.set()

    def silent_s(self) -> float | None:
        """Seconds since the server last said something of them; None before the first list."""
        heard = self._heard
        return None if heard is None else time.monotonic() - heard

    def why(self) -> str:
        """Why the server is silent, as far as is known."""
        return self._why

    def get(self, name: str) -> Object | None:
        """The object; None where there is none."""
        with self._lock:
            return self._objects.get(name)

    def all(self) -> list[Object]:
        """All of them."""
        with self._lock:
            return list(self._objects.values())

    def put(self, found: Object) -> None:
        """One that was just made or asked for, unless a newer one, or its end, has been told."""
        name = found["metadata"]["name"]
        with self._lock:
            if _is_told(found, self._version):
                return
            self._put_at[name] = time.monotonic()
            if name not in self._objects:
                self._objects[name] = found

    def _run(self) -> None:
        wait_s = RETRY_S
        while not self._stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
                wait_s = RETRY_S
            except Expired:
                logger.info("watch_expired kind=%s", self._plural)
                self._forget()
            except KubeError as error:
                if self._stop.is_set():
                    return
                if str(error) != self._why:
                    logger.warning("watch_failed kind=%s error=%s", self._plural, error)
                self._why = str(error)
                if error.status not in (None, 429):
                    # It answers, and not this: after a restore it may never come to the version that was listed.
                    self._forget()
            except Exception as error:  # what a server may send has no end; the thread must not have one for it
                logger.exception("watch_failed kind=%s", self._plural)
                self._why = f"{type(error).__name__}: {error}"
                self._forget()
            # Not all at once, when the server comes back.
            self._stop.wait(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, MOST_RETRY_S)

    def _forget(self) -> None:
        """Where the watch was: they are listed next."""
        with self._lock:
            self._version = ""

    def _list(self) -> None:
        began = time.monotonic()
        found, version = self._kube.all(self._plural, self._selector)
        with self._lock:
            told = {one["metadata"]["name"]: one for one in found}
            # What came to be while the list was made may not be in it.
            self._put_at = {name: at for name, at in self._put_at.items() if at >= began}
            put = {name: self._objects[name] for name in self._put_at if name in self._objects}
            later = {name: one for name, one in put.items() if not _is_told(one, version)}
            self._objects, self._version = later | told, version
        self._note()

    def _follow(self) -> None:
        """One watch, to its end."""
        for kind, found in self._kube.watch(self._plural, self._selector, self._version):
            with self._lock:
                self._version = found["metadata"]["resourceVersion"]
                if kind in ("ADDED", "MODIFIED"):
                    self._objects[found["metadata"]["name"]] = found
                elif kind == "DELETED":
                    self._objects.pop(found["metadata"]["name"], None)
            self._note()
            if self._stop.is_set():
                return
        self._note()

    def _note(self) -> None:
        self._heard, self._why = time.monotonic(), ""
        self._changed()


def _is_told(found: Object, version: str) -> bool:
    """Has a watch that is at this version told what became of this object since?

    Relied on: versions of one kind rise as whole numbers. Kubernetes promises that since 1.35; before, it calls them
    opaque, and they are the revisions of etcd. Where they are no numbers, nothing is known: False.
    """
    own = found["metadata"].get("resourceVersion", "")
    return own.isdecimal() and version.isdecimal() and int(own) <= int(version)
