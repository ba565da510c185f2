"""Attempts that are given up, and the group that is formed after them: real processes, and a membership of the test."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from tests.workers.loop.elastic_job import FORKSERVER
from thinwire.workers.membership.state import GenerationOver


def _rank(rank, port, attempts, told):
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from thinwire.workers.forming import group
    from thinwire.workers.forming.group import Attempt, _init, close_group

    def store(of):  # a connection for each attempt: whoever waits on one holds it
        client = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        return PrefixStore(of, client)

    seat = SimpleNamespace(rank=rank, size=2)
    connect_s, group.CONNECT_S = group.CONNECT_S, 2.0  # so long does the process wait for its threads
    for number in range(attempts):  # of which the peer knows nothing
        over = threading.Event()
        threading.Timer(0.05, over.set).start()
        attempt = Attempt(number, "127.0.0.1", lambda over=over: "the peer was lost" if over.is_set() else None)
        with pytest.raises(GenerationOver, match="the peer was lost"):
            _init(attempt, store(f"{number}"), seat, torch.device("cpu"), 20.0)
    group.CONNECT_S = connect_s
    busy = time.process_time()
    time.sleep(0.5)
    busy = time.process_time() - busy
    _init(Attempt(9, "127.0.0.1", lambda: None), store("9"), seat, torch.device("cpu"), 20.0)
    x = torch.full((1,), float(rank + 1))
    dist.all_reduce(x)
    second = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(x, group=second)
    told.put((float(x), busy))
    close_group(None, 20.0)


def test_a_worker_that_gave_up_three_attempts_forms_a_group_with_one_that_gave_up_none():
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    told = FORKSERVER.Queue()
    ranks = [FORKSERVER.Process(target=_rank, args=(r, store.port, 3 * r, told), daemon=True) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    found = [told.get(timeout=120.0) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [value for value, _ in found] == [6.0, 6.0]
    assert max(busy for _, busy in found) < 0.25  # threads that were left sleep
