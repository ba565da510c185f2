"""Checkpoints of a job: every rank writes a slice while training goes on; the manifest, written last, makes one whole.

    checkpoints/generation-000000000003/begun.json            generation 3 has gone on from what was here
    checkpoints/step-00000100-000000000003/                   its checkpoint of step 100
        shard-00000-of-00002-5a0c91d2.safetensors             rank 0's slice of every flat vector
        shard-00000-of-00002-5a0c91d2.json                    its receipt: size, sha256, what it holds
        shard-00001-of-00002-5a0c91d2.safetensors             rank 1's
        shard-00001-of-00002-5a0c91d2.json
        manifest.json                                         names the shards; plain values; sealed

The protocol needs no collective, so that a thread of its own can follow it:

1. Every rank writes its shard, and then its receipt.
2. Rank 0 waits for all receipts, for a bounded time, and until it may commit, and creates the manifest. A rank that
   never delivers leaves a checkpoint that is never whole; it is named in the log and removed.
3. Rank 0 removes what is older than the newest `keep`, and what is left of saves that failed.

Checkpoints are ordered by generation, then by step. A worker of a generation that is over may wake and write: what it
writes is older than what the living have written, it removes nothing of theirs, and once a generation has gone on from
what is here it puts no manifest any more. The eight digits are the mark of one save, which rank 0 draws: parts of two
saves never mix.
"""

from thinwire.workers.checkpoints.manifest import CheckpointId, CheckpointRefused
from thinwire.workers.checkpoints.snapshot import Content, Snapshot
from thinwire.workers.checkpoints.store import AttemptSuperseded, CheckpointStore, Superseded
from thinwire.workers.checkpoints.writer import Ticket, Writer

__all__ = [
    "AttemptSuperseded",
    "CheckpointId",
    "CheckpointRefused",
    "CheckpointStore",
    "Content",
    "Snapshot",
    "Superseded",
    "Ticket",
    "Writer",
]
