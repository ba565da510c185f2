"""The processes of a worker that is a box: the first starts the others, and a box lives and dies as one.

A worker of a job with workers.per_box = k is one process of Ray's, which has started k - 1 more on its machine. So Ray
places, replaces and ends a box as it does any worker. The first is a member of the job in the name of all
(forming/box.py).

    one of the others ends    the first says so to the membership at once, and ends
    the first ends            the others do: the system kills them with it, and their standard input comes to its end

    python -m thinwire.workers.companions    one of them; what it is to do comes as JSON by standard input
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.contract import logs

if TYPE_CHECKING:
    import torch

    from thinwire.contract.reports import Failure
    from thinwire.workers.forming.box import Processes
    from thinwire.workers.session.training import Run

logger = logging.getLogger(__name__)

FAILED = 3
"""The status of one that has failed, and has said how."""
ENDS_S = 10.0
"""How long the others may take to end when the first has come to its end; and the first, when another has failed."""
NOTICED_S = 1.0
"""How soon the first knows of another's end. Its own collective with that one may fail a moment earlier."""
MEET_S = 300.0
"""How long the processes of a box may take to start: they import torch, and may all read it from one slow disk."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Order:
    """What one of them is to do. rank: in the box, of `size`. port: of the box's store. device: as torch names it.

    address: by which other boxes reach this one. timeout_s: of a collective with them. run_dir, created_at, attempt,
    shared: as of Run.
    """

    rank: int
    size: int
    port: int
    device: str
    address: str
    timeout_s: float
    run_dir: str
    created_at: float
    attempt: int
    shared: bool
    parent: int


class Companions:
    """The other processes of the box of this one, its first. on_end: hears in words how one of them has ended."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._processes: list[subprocess.Popen[str]] = []
        self._stopping, self._broken, self._told = threading.Event(), threading.Event(), threading.Event()
        self.failure: Failure | None = None
        """What one of them has failed with."""

    def start(
        self,
        size: int,
        devices: list[torch.device],
        address: str,
        run: Run,
        timeout_s: float,
    ) -> Processes:
        """Start them, and form the box. devices: of each process, this one's first. timeout_s: of a collective with
        other boxes. Raises: BoxBroken."""
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, None, True, _seconds(MEET_S), wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            for rank in range(1, size):
                order = Order(
                    rank,
                    size,
                    store.port,
                    str(devices[rank]),
                    address,
                    timeout_s,
                    str(run.directory),
                    run.created_at,
                    run.attempt,
                    run.shared,
                    os.getpid(),
                )
                self._start(order, store)
            logger.info("box_started pids=%s", [os.getpid(), *self.pids])
            return _formed(store, 0, size, devices[0])
        except BaseException:
            self.settle()
            self.stop(0.0)
            raise

    def _start(self, order: Order, store: Any) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire.workers.companions"], stdin=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(process, order.rank, store), name="companion", daemon=True).start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(order)) + "\n")
        process.stdin.flush()  # and stays open for as long as this process lives

    @property
    def pids(self) -> list[int]:
        """Of the others."""
        return [process.pid for process in self._processes]

    def settle(self) -> None:
        """The first has an error of its own. Where it follows from the end of another, that one's is told before it.

        It does not return where the other was ended and has failed with nothing: then this process ends.
        """
        if self._broken.wait(NOTICED_S):
            self._told.wait(ENDS_S)

    def stop(self, patience_s: float = ENDS_S) -> None:
        """This process has come to its end: so do they, at the latest after so long."""
        self._stopping.set()
        until = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, process: subprocess.Popen[str], rank: int, store: Any) -> None:
        from thinwire.contract.reports import Failure

        status = process.wait()
        key = _failure_key(rank)
        if self._stopping.is_set():
            if status > 0:
                logger.warning("companion_failed rank=%d pid=%d status=%d", rank, process.pid, status)
            return
        if status == 0 and store.check([_end_key(rank)]):
            return
        self._broken.set()
        if status == FAILED and store.check([key]):
            self.failure = Failure.model_validate_json(store.get(key))
            how = f"failed: {self.failure.kind}: {self.failure.message}"
        else:
            how = f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status} before the run did"
        words = f"process {rank} of its box (pid {process.pid}) {how}"[:500]
        logger.warning("box_broken %s", words)
        self._on_end(words)
        if self.failure is not None:  # what waits for it raises, and then the worker ends with that
            self._told.set()
            time.sleep(ENDS_S)
        if not self._stopping.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # what waits for it may wait for ever


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _failure_key(rank: int) -> str:
    return f"failed-{rank}"


def _end_key(rank: int) -> str:
    return f"ended-{rank}"


def _formed(store: Any, rank: int, size: int, device: torch.device) -> Processes:
    """The box as torch.distributed's default group. Collective."""
    import torch
    import torch.distributed as dist

    from thinwire.comm import prepare_nccl
    from thinwire.workers.forming.box import Processes

    if device.type == "cuda":
        torch.cuda.set_device(device)
        prepare_nccl()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return Processes(store)


def main() -> None:
    """One of the others, from its start to its end."""
    order = Order(**json.loads(sys.stdin.readline()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != order.parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a notice is the first's, which hands over with all of them
    threading.Thread(target=_end_with_first, name="box", daemon=True).start()
    fields = {"job_id": Path(order.run_dir).name, "attempt": order.attempt, "rank_of_box": order.rank}
    text = f"%(asctime)s %(levelname)s [{order.rank}] %(name)s %(message)s"
    logs.set_up(text=text, fields=fields, force=True)
    status = _work(order)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_first() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _work(order: Order) -> int:
    import torch
    import torch.distributed as dist

    from thinwire.contract.run_folder import RunFolder
    from thinwire.contract.spec import ScriptSpec, read_accepted
    from thinwire.workers.error_words import let_stderr_take_any_text
    from thinwire.workers.forming.box import BoxRanks
    from thinwire.workers.membership.state import MembershipError
    from thinwire.workers.nodes import use_interface_of
    from thinwire.workers.ranks import RunEnded
    from thinwire.workers.session.job import failure_of_script, run_job
    from thinwire.workers.session.training import Run
    from thinwire.workers.telemetry.reporter import Reporter

    let_stderr_take_any_text()
    use_interface_of(order.address)
    run_dir, device = Path(order.run_dir), torch.device(order.device)
    spec = read_accepted(json.loads(RunFolder(run_dir).job.read_text())["spec"])
    assert isinstance(spec, ScriptSpec)
    store = dist.TCPStore("127.0.0.1", order.port, None, False, _seconds(MEET_S))  # type: ignore[attr-defined]
    ranks = BoxRanks(_formed(store, order.rank, order.size, device), None, order.address, device, order.timeout_s)
    run = Run(run_dir, order.created_at, order.attempt, shared=order.shared)
    try:
        run_job(spec, run, ranks, device, Reporter())
    except (MembershipError, RunEnded) as reason:
        logger.info("run_ended reason=%r", str(reason))
    except Exception as error:
        logger.exception("training_failed step=%d", ranks.step)
        store.set(_failure_key(order.rank), failure_of_script(error, spec.recipe, ranks.step).model_dump_json())
        return FAILED
    store.set(_end_key(order.rank), "")
    return 0


if __name__ == "__main__":
    main()
