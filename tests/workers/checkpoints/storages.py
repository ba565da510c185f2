"""Stores that misbehave, by the name of the file that is being written: stuck, full, or raising what is no OSError."""

import errno
import threading

from thinwire.workers.checkpoints.storage import LocalStorage


class Gated(LocalStorage):
    """Files whose name contains `held` are half written until `gate` is set; `reached` says that one is."""

    def __init__(self, path, held=".safetensors"):
        super().__init__(path)
        self.held, self.gate, self.reached = held, threading.Event(), threading.Event()

    def write(self, folder, name, chunks):
        super().write(folder, name, self._slowly(chunks) if self.held in name else chunks)

    def create(self, folder, name, chunks):
        super().create(folder, name, self._slowly(chunks) if self.held in name else chunks)

    def _slowly(self, chunks):
        for chunk in chunks:
            half = len(chunk) // 2
            yield chunk[:half]
            self.reached.set()
            assert self.gate.wait(60)
            yield chunk[half:]


class Full(LocalStorage):
    """A disk that is full in the middle of every file whose name contains `refused`, while that is not empty."""

    def __init__(self, path, refused=""):
        super().__init__(path)
        self.refused = refused

    def write(self, folder, name, chunks):
        super().write(folder, name, self._half(chunks) if self.refused and self.refused in name else chunks)

    def create(self, folder, name, chunks):
        super().create(folder, name, self._half(chunks) if self.refused and self.refused in name else chunks)

    def _half(self, chunks):
        first = next(iter(chunks))
        yield first[: len(first) // 2]
        raise OSError(errno.ENOSPC, "No space left on device")


class Raising(LocalStorage):
    """A store with a defect."""

    def write(self, folder, name, chunks):
        raise ZeroDivisionError("a defect")
