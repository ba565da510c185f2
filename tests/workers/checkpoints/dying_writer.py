"""Run by a test that kills or stops it: saves step 10, then is stuck half-way in writing the file named, at step 20.

python -m tests.workers.checkpoints.dying_writer DIRECTORY HELD    goes on when a line comes; tells what became of it
"""

import sys

from tests.workers.checkpoints.states import GENERATION, save, state
from tests.workers.checkpoints.storages import Gated
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Writer

store = CheckpointStore(sys.argv[1], keep=2)
save(store, 10)
gated = store.storage = Gated(store.storage.path, sys.argv[2])
writers = [Writer(store) for _ in range(2)]
ticket, _ = [writer.save(CheckpointId(GENERATION, 20), rank, 2, state(20)) for rank, writer in enumerate(writers)]
assert gated.reached.wait(60)
print("half", flush=True)
if sys.stdin.readline():
    gated.gate.set()
    ticket.wait(60)
    print(ticket.failure, flush=True)
