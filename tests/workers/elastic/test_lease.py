"""A lease that nobody renews expires, once or again and again; calls hold it."""

import threading
import time
from types import SimpleNamespace

import torch

from tests.workers.membership.members import SECRET, Job
from thinwire.workers import worker
from thinwire.workers.elastic import worker_side
from thinwire.workers.elastic.worker_side import Lease


def test_a_lease_expires_only_when_nobody_renews_it():
    expired = threading.Event()
    lease = Lease(0.5, expired.set)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert not expired.wait(0.05)
        lease.renew()
    renewed = time.monotonic()
    assert expired.wait(10.0)
    assert time.monotonic() - renewed > 0.4


def test_a_lease_does_not_run_while_it_is_held():
    expired = threading.Event()
    lease = Lease(0.3, expired.set)
    with lease.held():
        assert not expired.wait(1.0)
    assert expired.wait(10.0)


def test_a_lease_that_repeats_expires_again_after_it_was_renewed():
    expired = threading.Semaphore(0)
    lease = Lease(0.3, expired.release, repeats=True)
    assert expired.acquire(timeout=10.0)
    lease.renew()
    assert expired.acquire(timeout=10.0)


class Noted(Lease):
    """Says when it is renewed."""

    def __init__(self):
        self.renewals = threading.Semaphore(0)
        super().__init__(600.0, lambda: None)

    def renew(self):
        super().renew()
        self.renewals.release()


def test_a_worker_that_the_membership_answers_is_wanted_whenever_the_controller_asks_next(monkeypatch, tmp_path):
    """The way to the controller may be silent long after a cut; the last that holds the state must not end of it."""
    job, lease = Job(), Noted()
    job.serve(1, 1)
    monkeypatch.setattr(worker_side, "resolve", lambda config: job.server.address)
    worker_side.seat({"slot": 0, "secret": SECRET}, lease)
    config = worker_side.with_facts({"run_dir": str(tmp_path)})
    ranks, _, _ = worker._ranks(
        config,
        SimpleNamespace(checkpoint=None, workers=SimpleNamespace(per_box=1)),
        "127.0.0.1",
        torch.device("cpu"),
        SimpleNamespace(run_dir=tmp_path, has_failed=bool),
        SimpleNamespace(),
    )
    try:
        assert lease.renewals.acquire(timeout=60.0)
        assert lease.renewals.acquire(timeout=60.0)
    finally:
        ranks._member.close()
        ranks._door.close()
        job.close()
        worker_side.seat({})
