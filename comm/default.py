"""The reducer that an optimizer gets when its user names none: of all ranks of the default process group, or one alone.

It has a process group of its own: a user's all_reduce between backward and step(), where ranks may have sent different
parts of their gradients, meets none of its collectives.

Alone only where nothing says otherwise. An optimizer that is made before init_process_group would train every rank by
itself: nothing fails, nothing is logged, and the replicas drift apart. So a launcher that has started several ranks, or
a process group that comes later, is an error, unless SoloGroup() was asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.alone import Results
from thinwire.comm.exchange.reducer import Reducer, flat_reducer, lone_reducer, node_first_reducer
from thinwire.comm.groups.blocking import SoloGroup
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.groups.nodes import Nodes, Topology, nodes_of
from thinwire.comm.keeps import Keeps
from thinwire.comm.layout import DEFAULT_BUCKET, VectorLayout
from thinwire.comm.protocol import Codec, FullWire, Group, LinearCodec

logger = logging.getLogger(__name__)


GivenGroup = Group | dist.ProcessGroup
"""What people give as group=."""


def default_reducer(
    group: GivenGroup | None,
    layout: VectorLayout,
    like: Tensor,
    *,
    codec: Codec | LinearCodec | None = None,
    bucket_elements: int = DEFAULT_BUCKET,
    cuts: Iterable[int] = (),
    keeps: Keeps = Keeps.NOTHING,
    full: FullWire = "fp32",
    sums: torch.dtype | None = None,
    topology: Topology = "flat",
    results: Results = "kept",
) -> Reducer:
    """A compressed all-reduce over `group`; None: over the ranks of torch.distributed's default group, or one alone.

    codec: how vectors are written; None: signs, with a scale for each block of the default length. bucket_elements,
    cuts, keeps, full, sums: as in flat_reducer. topology: "node_first" exchanges signs by node first, which keeps
    nothing of the others, with sums as they are; "auto" does where that can be, and logs why not.
    A group of one exchanges nothing, so it does not compress, and gives out the residual that a larger group may have
    left; results: as in lone_reducer and flat_reducer.
    Collective. Raises: WireMismatch, PeerLost; ValueError where "node_first" cannot be.
    """
    group, codec = given_or_default(group), codec or SignCodec()
    if group.size == 1:
        return lone_reducer(group, layout, like, bucket_elements=bucket_elements, cuts=cuts, results=results)
    if topology != "flat":
        if sums is not None:
            raise ValueError(f'topology = "{topology}": must be "flat" where kept sums are of {sums}')
        nodes = _nodes(group, like, codec, full)
        if isinstance(nodes, Nodes):
            assert isinstance(codec, SignCodec)
            if keeps is not Keeps.NOTHING and group.rank == 0:
                logger.warning("keeps_nothing asked=%s reason=topology is node_first", keeps.value)
            return node_first_reducer(nodes, layout, codec, like, bucket_elements=bucket_elements, cuts=cuts, full=full)
        if topology == "node_first":
            raise ValueError(f'topology = "node_first": {nodes}. "auto" is "flat" where that is so')
        if group.rank == 0:
            logger.warning("topology_flat ranks=%d reason=%s", group.size, nodes)
    return flat_reducer(
        group,
        layout,
        codec,
        like,
        bucket_elements=bucket_elements,
        cuts=cuts,
        keeps=keeps,
        full=full,
        sums=sums,
        results=results,
    )


def _nodes(group: Group, like: Tensor, codec: Codec | LinearCodec, full: FullWire) -> Nodes | str:
    """The groups for node first, or why there can be none. Collective. Raises: PeerLost."""
    if not isinstance(codec, SignCodec) or codec.scale != "l2":
        return f"codec {codec.name} has no exchange by node first"
    if full == "int8":
        return "full exchanges in 8 bits keep errors of whole vectors on every rank"
    return nodes_of(group, like.device)


def given_or_default(group: GivenGroup | None) -> Group:
    """The group itself; of a process group, and of the default one for None, TorchGroup.apart().

    For None one rank alone where there is no default process group. Collective for None and a process group. Raises:
    ValueError where there is none though a launcher has started several ranks; TypeError for no group of this rank.
    """
    if group is not None:
        if isinstance(group, dist.ProcessGroup):
            return TorchGroup.apart(group)
        if not isinstance(getattr(group, "size", None), int):
            raise TypeError(
                f"group = {type(group).__name__}: must be a Group of thinwire.comm, or a process group of "
                'torch.distributed that this rank is in, such as mesh["replicate"].get_group()'
            )
        return group
    if dist.is_available() and dist.is_initialized():
        return TorchGroup.apart()
    started = ranks_started()
    if started is not None:
        variable, count = started
        raise ValueError(
            f"torch.distributed is not initialised, but {variable}={count} says that a launcher has started {count} "
            "ranks: each would train alone, and their models would drift apart. Call "
            "torch.distributed.init_process_group() before you make the optimizer, or give group=SoloGroup() "
            "(thinwire.comm) where this process is to train alone"
        )
    return AssumedAlone()


def over(process_group: dist.ProcessGroup) -> TorchGroup:
    """Its ranks, over itself."""
    return TorchGroup(process_group)


class AssumedAlone(SoloGroup):
    """One rank alone, because there was no process group and nobody said SoloGroup()."""


def refuse_late_process_group(group: Group) -> None:
    """Raises: RuntimeError where this rank was taken to be alone, and a process group of several was made since."""
    if isinstance(group, AssumedAlone) and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this optimizer was made before init_process_group, which has made a group of {dist.get_world_size()} "
            "ranks since: it trains alone, and the models would drift apart. Make the optimizer after "
            "init_process_group, or give it group=SoloGroup() (thinwire.comm) where this process is to train alone"
        )


LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers say how many ranks they have started: torchrun and those like it, Open MPI, MPICH, srun. Not
SLURM_NTASKS: sbatch sets it for a script that is one process."""


def ranks_started() -> tuple[str, int] | None:
    """The variable that says that a launcher has started several ranks, and how many; None where there is none.

    The first of LAUNCHERS that is there counts: under srun, torchrun's WORLD_SIZE is nearer than srun's.
    """
    for variable in LAUNCHERS:
        text = os.environ.get(variable, "").strip()
        if text.isdecimal():
            return (variable, int(text)) if int(text) > 1 else None
    return None
