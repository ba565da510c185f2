"""Checkpoints of a job: every rank writes a slice while training goes on; the manifest, written last, makes one whole.

    checkpoints/step-00000100-019ab3c4d5e6/shard-00000-of-00002.safetensors    rank 0's slice of every flat vector
    checkpoints/step-00000100-019ab3c4d5e6/shard-00000-of-00002.json           its receipt: size, sha256, what it holds
    checkpoints/step-00000100-019ab3c4d5e6/shard-00001-of-00002.safetensors    rank 1's
    checkpoints/step-00000100-019ab3c4d5e6/shard-00001-of-00002.json
    checkpoints/step-00000100-019ab3c4d5e6/manifest.json                       names the shards; plain values; sealed

The protocol needs no collective, so that a thread of its own can follow it:

1. Every rank writes its shard, and then its receipt.
2. Rank 0 waits for all receipts, for a bounded time, and puts the manifest. A rank that never delivers leaves a
   checkpoint that is never whole; it is named in the log and removed.
3. Rank 0 removes what is older than the newest `keep`.

The last part of a folder's name is the token of the generation that wrote it: a number that rank 0 drew when the group
was formed. Two attempts at one step have two folders, and shards of different attempts never mix.
"""

from thinwire.workers.checkpoints.manifest import CheckpointId, CheckpointRefused
from thinwire.workers.checkpoints.snapshot import Content, Snapshot
from thinwire.workers.checkpoints.store import CheckpointStore, Superseded
from thinwire.workers.checkpoints.writer import Ticket, Writer

__all__ = [
    "CheckpointId",
    "CheckpointRefused",
    "CheckpointStore",
    "Content",
    "Snapshot",
    "Superseded",
    "Ticket",
    "Writer",
]
