"""What is computed: communication-compressed optimizers for any PyTorch model, and the dense baselines beside them.

    optimizer = OneBitAdam(model.parameters(), model=model, lr=1e-3)     # instead of torch.optim.AdamW and DDP

Gradients are local: do not wrap the model in DistributedDataParallel. Under torchrun call
torch.distributed.init_process_group first; without it the optimizer runs on one rank, and refuses to where a launcher
has started several.
"""

from thinwire.optim.cada import CADA
from thinwire.optim.compressed import compressed
from thinwire.optim.dense import SGD, Adam, Lamb
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.schedule import ZeroOneSchedule
from thinwire.optim.lamb_math import LambBounds
from thinwire.optim.local_steps import LocalSteps
from thinwire.optim.muon import Muon, OneBitMuon
from thinwire.optim.named import OPTIMIZERS, named
from thinwire.optim.onebit_adam import OneBitAdam
from thinwire.optim.onebit_lamb import OneBitLamb
from thinwire.optim.onebit_sgd import OneBitSGD
from thinwire.optim.outer import OuterSGD
from thinwire.optim.sketched_sgd import SketchedSGD
from thinwire.optim.sparse_adam import SparseAdam
from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "CADA",
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "FlatOptimizer",
    "Lamb",
    "LambBounds",
    "LocalSteps",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitMuon",
    "OneBitSGD",
    "OuterSGD",
    "SketchedSGD",
    "SparseAdam",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "compressed",
    "named",
]
