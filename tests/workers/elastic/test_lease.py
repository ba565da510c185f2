"""A lease that nobody renews expires, once or again and again; calls hold it."""

import threading
import time

from thinwire.workers.elastic.lease import Lease


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
