"""An attempt to make the process group of a generation, which the membership ends at any moment; the end of a group.

Rank 0 opens a store, every pair is proved (pairs.py), and only then a transport connects: what it would wait for is
known to be there, but for a death in just that moment, which the membership tells.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm import PeerLost, TorchGroup, prepare_nccl
from thinwire.comm.groups.distributed import abort_nccl
from thinwire.workers.forming import transport
from thinwire.workers.forming.detector import MembershipDetector
from thinwire.workers.forming.door import Door
from thinwire.workers.forming.pairs import Pairs, Patience
from thinwire.workers.forming.reach import Reach
from thinwire.workers.membership import GenerationOver, Member, Seat

logger = logging.getLogger(__name__)

LINGER_S = 30.0
"""Beyond its time-out, for a collective that has been given up."""
_CONNECT = timedelta(seconds=transport.CONNECT_S)


def form_group(
    seat: Seat,
    door: Door,
    member: Member,
    device: torch.device,
    timeout_s: float,
    patience: Patience | None = None,
    reach: Reach | None = None,
) -> TorchGroup:
    """The group of this generation, of two members or more, as torch.distributed's default one. Collective.

    Waits for as long as the membership does. timeout_s: of its collectives. reach: who asks for the peers that one of
    them waits for; None: nobody. Raises: PeerLost, and then nothing of the
    attempt is left but threads that sleep until a time-out (transport.CONNECT_S).
    """
    attempt = transport.Attempt(seat.generation, door.host, lambda: member.over)
    began = time.perf_counter()
    try:
        store = _serve_store(door.host) if seat.rank == 0 else None
        tell = partial(member.unreachable, seat.generation)
        port = Pairs(seat, door, attempt.over, tell, patience).prove(store.port if store else 0)
        proved = time.perf_counter()
        if store is None:
            host = seat.members[0].identity.host
            store = attempt.wait_for("connects to the store", lambda: _reach_store(host, port))
        _init(attempt, PrefixStore(f"generation-{seat.generation}", store), seat, device, timeout_s)
    except (RuntimeError, OSError) as error:  # the membership's word, the store's and the transport's errors
        raise PeerLost(f"generation {seat.generation} did not come together: {error}") from error
    logger.info(
        "formed generation=%d size=%d pairs_ms=%.1f connect_ms=%.1f",
        seat.generation,
        seat.size,
        1e3 * (proved - began),
        1e3 * (time.perf_counter() - proved),
    )
    return TorchGroup(detector=MembershipDetector(member, seat, reach))


def _init(attempt: transport.Attempt, store: Store, seat: Seat, device: torch.device, timeout_s: float) -> None:
    transport.begin(attempt)
    # torch numbers its groups, and names the keys of the store by that. An attempt that failed has counted: a rank that
    # was in one, and a rank that was not, would look for each other under two names.
    dist.distributed_c10d._world.group_count = 0
    cuda = device.type == "cuda"
    if cuda:
        prepare_nccl()
    dist.init_process_group(
        "nccl" if cuda else transport.GLOO,
        store=store,
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if cuda:
        try:
            transport.connect_nccl(attempt, device)
        except (RuntimeError, GenerationOver):
            close_group(None, 0.0)
            raise


def _serve_store(host: str) -> dist.TCPStore:  # type: ignore[name-defined]
    return dist.TCPStore(host, 0, None, True, _CONNECT, wait_for_workers=False)  # type: ignore[attr-defined]


def _reach_store(host: str, port: int) -> Store:
    return dist.TCPStore(host, port, None, False, _CONNECT, wait_for_workers=False)  # type: ignore[attr-defined]


def close_group(group: TorchGroup | None, timeout_s: float) -> None:
    """Forget torch.distributed's groups. What still runs in them ends by itself, at its time-out of `timeout_s`."""
    if not dist.is_initialized():
        return
    if dist.group.WORLD is not None:
        abort_nccl(dist.group.WORLD)
    # A gloo group that goes waits for its collectives, holding the interpreter's lock; with a peer that hangs that
    # takes the whole time-out. So it stays until they are over, and nobody waits. Not longer: its threads take time.
    last = list(dist.distributed_c10d._world.pg_map)
    running = [] if group is None else group.abandoned
    dist.destroy_process_group()
    if all(work.is_completed() for work in running):
        return
    threading.Thread(
        target=_linger, args=(last, running, timeout_s + LINGER_S), name="thinwire-linger", daemon=True
    ).start()


def _linger(last: list[dist.ProcessGroup], running: list[dist.Work], most_s: float) -> None:
    until = time.monotonic() + most_s
    while time.monotonic() < until and not all(work.is_completed() for work in running):
        time.sleep(0.05)
    last.clear()
