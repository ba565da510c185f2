"""Scripts as threads of one process whose workers die, leave and come as a plan says."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.workers.loop.threads_job import Plan, Telling, ThreadsJob
from thinwire.comm import SoloGroup
from thinwire.contract.spec import Checkpoint
from thinwire.workers.course import Run
from thinwire.workers.session.course import Left, Place
from thinwire.workers.session.place import placed


class ScriptThreads(ThreadsJob):
    """`script`, called by each worker as a job's worker runs one, with the job and the worker."""

    def __init__(self, run_dir, script: Callable, size: int, plan: Plan | None = None, checkpoint=None):
        super().__init__(run_dir, None, size, plan or Plan())
        self.script, self.checkpoint = script, checkpoint and Checkpoint(**checkpoint)

    def _work(self, worker):
        cpu, run = torch.device("cpu"), Run(self.run_dir, time.time())
        reporter = Telling(self.run_dir, self.events)
        place = Place(worker, cpu, run, reporter, self.checkpoint, SoloGroup())
        try:
            with placed(place):
                self.ended[worker] = self.script(self, worker)
        except Left:
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.errors.append(error)
            worker.die()
