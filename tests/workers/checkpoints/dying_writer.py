"""Run by a test that kills it: saves step 10, then is stuck half-way in writing the file named, at step 20.

python -m tests.workers.checkpoints.dying_writer DIRECTORY HELD
"""

import sys
import threading

from tests.workers.checkpoints.states import GENERATION, save, state
from tests.workers.checkpoints.storages import Gated
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Writer

store = CheckpointStore(sys.argv[1], keep=2)
save(store, 10)
gated = store.storage = Gated(store.storage.path, sys.argv[2])
writers = [Writer(store) for _ in range(2)]
for rank, writer in enumerate(writers):
    writer.save(CheckpointId(GENERATION, 20), rank, 2, state(20))
assert gated.reached.wait(60)
print("half", flush=True)
threading.Event().wait()
