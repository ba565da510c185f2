"""How bytes move: groups of ranks, codecs, the compressed all-reduce and its error memory; no optimizers."""

from thinwire.comm.bucketed import BucketedAllReduce
from thinwire.comm.default import default_reducer
from thinwire.comm.error_feedback import ErrorFeedback
from thinwire.comm.errors import CommError, NonFiniteInput, PeerLost, WireMismatch
from thinwire.comm.group import SoloGroup, TorchGroup
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import Group, Reducer, Stats
from thinwire.comm.reduce import CompressedAllReduce
from thinwire.comm.threads import ThreadGroup, run_threads

__all__ = [
    "BucketedAllReduce",
    "CommError",
    "CompressedAllReduce",
    "ErrorFeedback",
    "Group",
    "NonFiniteInput",
    "PeerLost",
    "Reducer",
    "SoloGroup",
    "Stats",
    "ThreadGroup",
    "TorchGroup",
    "VectorLayout",
    "WireMismatch",
    "default_reducer",
    "run_threads",
]
