"""Where a session runs that is not in a job: alone under python, or with fixed ranks under torchrun."""

from __future__ import annotations

import operator
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm import SoloGroup, TorchGroup, prepare_nccl
from thinwire.comm.protocol import Group
from thinwire.contract.reports import Sample
from thinwire.contract.spec import Checkpoint
from thinwire.workers.error_words import in_words
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.training import Run, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

LINE_EVERY_S = 1.0
"""A loop of quick steps fills no screen."""


class OnScreen(Reporter):
    """What the ranks have reported, from rank 0 for who looks on: on stderr, for stdout is the script's."""

    _due_s = 0.0

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """As Reporter.steps, and a line now and then: of each evaluation, of the last step, and every LINE_EVERY_S."""
        super().steps(samples, num_samples, sent_bytes)
        if not self._leads:
            return
        for sample in samples:
            is_due = sample is samples[-1] and time.monotonic() >= self._due_s
            if is_due or sample.validation_loss is not None or sample.step == sample.last_step:
                if (line := figures(sample)) is not None:
                    sys.stderr.write(f"{line}\n")
                self._due_s = time.monotonic() + LINE_EVERY_S


def figures(sample: Sample) -> str | None:
    """What was reported of a step, as a line; None where nothing was."""
    losses = {"loss": sample.loss, "validation": sample.validation_loss}
    found = [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
    found += [f"{name} {float(value):.4g}" for name, value in (sample.reported or {}).items()]
    if not found:
        return None
    of = "" if sample.last_step is None else f"/{sample.last_step}"
    return f"step {sample.step}{of}  " + "  ".join([*found, f"{sample.samples_per_second:.1f} samples/s"])


def outside_of_a_job(folder: str | os.PathLike[str] | None, save_every: int, keep: int) -> Surroundings:
    """As thinwire.train.session takes them. Under torchrun a process group is made, unless the script has made one.

    Raises: TypeError, ValueError for what cannot be saved so; OSError; RuntimeError where torch.distributed cannot be
    initialised.
    """
    checkpoint, directory = _kept(folder, save_every, keep)  # before a process group is made
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    made = False
    if launched and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            prepare_nccl()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        made = True
    group: Group = TorchGroup.apart() if dist.is_initialized() else SoloGroup()

    def end(error: BaseException | None) -> None:
        """Of a process group that this session has made: its peers hear why."""
        if isinstance(group, TorchGroup) and made:
            if error is not None:
                group.leave(f"its session ended with {in_words(error)}"[:500])
            dist.destroy_process_group()

    return Surroundings(
        ranks=FixedRanks(group),
        device=device,
        run=Run(directory, created_at=time.time()),
        reporter=OnScreen(),
        checkpoint=checkpoint,
        group=group,
        close=end,
    )


def _kept(folder: str | os.PathLike[str] | None, save_every: int, keep: int) -> tuple[Checkpoint | None, Path]:
    """What is saved, and the folder, which is made. Raises: TypeError, ValueError for what cannot be; OSError."""
    try:
        save_every, keep = operator.index(save_every), operator.index(keep)
    except TypeError:
        raise TypeError(f"session(save_every={save_every!r}, keep={keep!r}): give whole numbers") from None
    if save_every < 1 or keep < 1:
        raise ValueError(f"session(save_every={save_every}, keep={keep}): give numbers from 1")
    if folder is None:
        return None, Path(tempfile.gettempdir())
    where = os.fsdecode(folder)
    if "://" in where:
        raise ValueError(
            f"session(folder={where!r}): must be a folder of this machine's file system. The checkpoints of a job may "
            "be at a URL: checkpoint.store in its file"
        )
    directory = Path(where).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    return Checkpoint(every_steps=save_every, keep=keep), directory
