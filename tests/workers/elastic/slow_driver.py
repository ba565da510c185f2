"""The driver of a job, whose workers wait a moment before each step: they leave the machine's cores to Ray."""

import sys
import time

PAUSE_S = 0.25


def train_slowly(config, credentials=None):
    """workers.worker.train_worker with a pause."""
    from thinwire.workers.session.body import Bodies
    from thinwire.workers.worker import train_worker

    opens = Bodies.open

    def slow(bodies, share):
        time.sleep(PAUSE_S)
        return opens(bodies, share)

    Bodies.open = slow
    return train_worker(config, credentials)


if __name__ == "__main__":
    from tests.workers.elastic import slow_driver  # not __main__, which no worker could import
    from thinwire.workers import main

    main.train_worker = slow_driver.train_slowly
    sys.exit(main.main())
