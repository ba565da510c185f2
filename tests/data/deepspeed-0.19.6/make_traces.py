"""Run the one-bit optimizers of an unpacked DeepSpeed in float64 on simulated ranks, and record what they did.

    PYTHONPATH=. python tests/data/deepspeed-0.19.6/make_traces.py /path/to/deepspeed-0.19.6

DeepSpeed's files are imported as they are: runtime/fp16/onebit/{adam,lamb,zoadam}.py, runtime/comm/{nccl,utils}.py,
runtime/compression/cupy.py, utils/torch.py. Around them stand, from this file: numpy for cupy, ranks that are threads
for deepspeed.comm, a CPU for the accelerator, and an engine that has the one flag they set. `Tensor.float` gives
float64 while they run. The problem and the format: tests/optim/reference/deepspeed_traces.py.
"""

import contextlib
import io
import json
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.utils import dlpack

from tests.optim.reference import deepspeed_traces as problem

COMMON = {"betas": [0.9, 0.95], "eps": 1e-8}
SETTINGS = {
    "onebit_adam": {"freeze_step": 21},
    "onebit_lamb": {
        "freeze_step": 21,
        "max_coeff": 0.5,
        "min_coeff": 0.01,
        "coeff_beta": 0.9,
        "factor_max": 1.25,
        "factor_min": 0.8,
        "factor_threshold": 0.02,
    },
    "zero_one_adam": {
        "var_freeze_step": 20,
        "var_update_scaler": 4,
        "local_step_scaler": 8,
        "local_step_clipper": 4,
    },
}
RECORDED = {
    "onebit_adam": (1, 2, 6, 13, 19, 20, 21, 22, 23, 26, 30, 35, 41, 48),
    "onebit_lamb": (1, 2, 6, 13, 19, 20, 21, 22, 23, 26, 30, 35, 41, 48),
    "zero_one_adam": (1, 2, 5, 6, 7, 10, 15, 20, 21, 22, 28, 29, 30, 31, 36, 39, 42, 43, 48),
}
RATIOS = ("scaling_coeff", "lamb_coeff_freeze", "last_factor")


class Ranks:
    """What the optimizers call as deepspeed.comm: collectives among threads, each of which has set `local.rank`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = threading.local()
        self.barrier = threading.Barrier(size, timeout=60)
        self.shown: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Copies of what every rank shows."""
        self.shown[self.local.rank] = tensor
        self.barrier.wait()
        copies = [shown.clone() for shown in self.shown]
        self.barrier.wait()
        return copies

    def module(self) -> types.ModuleType:
        def all_gather(outs: list[Tensor], tensor: Tensor, group: None = None) -> None:
            for out, theirs in zip(outs, self.exchange(tensor), strict=True):
                out.copy_(theirs.reshape(out.shape))

        def all_to_all_single(out: Tensor, rows: Tensor, group: None = None) -> None:
            out.copy_(torch.stack([theirs[self.local.rank] for theirs in self.exchange(rows)]))

        return make_module(
            "deepspeed.comm",
            is_initialized=lambda: True,
            new_group=lambda ranks: None,
            get_rank=lambda group=None: self.local.rank,
            get_world_size=lambda group=None: self.size,
            all_gather=all_gather,
            all_to_all_single=all_to_all_single,
        )


def make_module(name: str, **content: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def import_optimizers(source: Path, ranks: Ranks) -> dict[str, type]:
    """DeepSpeed's three classes, bound to these ranks. Packages are empty, so that only the files needed run."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("deepspeed", "cupy")]:
        del sys.modules[name]
    for name in ("", ".utils", ".runtime", ".runtime.comm", ".runtime.compression", ".runtime.fp16"):
        make_module("deepspeed" + name, __path__=[str(source / ("deepspeed" + name).replace(".", "/"))])
    sys.modules["deepspeed"].comm = ranks.module()
    cpu = SimpleNamespace(empty_cache=lambda: None, device_name=lambda rank=0: "cpu")
    make_module("deepspeed.accelerator", get_accelerator=lambda: cpu)
    make_module("deepspeed.runtime.utils", filter_empty_parameters=lambda params: params)  # there are no empty ones
    make_module(
        "cupy",
        from_dlpack=lambda capsule: dlpack.from_dlpack(capsule).numpy(),
        packbits=np.packbits,
        unpackbits=np.unpackbits,
        split=np.split,
        zeros=np.zeros,
        cuda=SimpleNamespace(
            Device=lambda rank: SimpleNamespace(use=lambda: None),
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        ),
    )
    from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

    return {"onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb, "zero_one_adam": ZeroOneAdam}


def run(source: Path, name: str, num_workers: int) -> list[dict[str, list[np.ndarray]]]:
    """States after every update, [rank][name][update - 1]."""
    ranks = Ranks(num_workers)
    make = import_optimizers(source, ranks)[name]
    gradients, lrs = problem.problem_gradients(num_workers), problem.problem_lrs()
    results: dict[int, dict[str, list[np.ndarray]]] = {}

    def work(rank: int) -> None:
        ranks.local.rank = rank
        params = [torch.nn.Parameter(tensor) for tensor in problem.problem_start()]
        groups = [
            {"params": params[:2], "weight_decay": problem.WEIGHT_DECAYS[0]},
            {"params": params[2:], "weight_decay": problem.WEIGHT_DECAYS[2]},
        ]
        engine = SimpleNamespace(enable_backward_allreduce=True, local_rank=rank, mpu=None)
        optimizer = make(groups, engine, **{**COMMON, "betas": tuple(COMMON["betas"])}, **SETTINGS[name])
        for p in params:  # as DeepSpeed's fp16 wrapper does before the first update
            p.grad = torch.zeros_like(p)
        optimizer.step()
        seen: dict[str, list[np.ndarray]] = {}
        for step in range(1, problem.STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = lrs[step]
            used = engine_gradients(gradients[step], rank, engine)
            for p, g in zip(params, used, strict=True):
                p.grad = g.clone()
            optimizer.step()
            for key, value in state_of(optimizer, params).items():
                seen.setdefault(key, []).append(value)
        results[rank] = seen

    in_threads(num_workers, work)
    return [results[rank] for rank in range(num_workers)]


def engine_gradients(gradients: list[list[Tensor]], rank: int, engine: SimpleNamespace) -> list[Tensor]:
    """The mean over ranks while the engine reduces, else the rank's own."""
    if not engine.enable_backward_allreduce:
        return gradients[rank]
    return [sum(tensors) / len(tensors) for tensors in zip(*gradients, strict=True)]


def state_of(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, np.ndarray]:
    states = [optimizer.state[p] for p in params]
    seen = {
        "x": problem.laid_end_to_end(params),
        "m": problem.laid_end_to_end([state["exp_avg"] for state in states]),
        "v": problem.laid_end_to_end([state["exp_avg_sq"] for state in states]),
    }
    if hasattr(optimizer, "get_lamb_coeffs"):
        seen["lamb_coeff"] = np.array(optimizer.get_lamb_coeffs())
        seen["v_fresh"] = problem.laid_end_to_end([state["exp_avg_sq_fresh"] for state in states])
        seen |= {key: np.array([state.get(key, 1.0) for state in states]) for key in RATIOS}
    return seen


def in_threads(size: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - carried to the main thread and raised there
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def save(name: str, num_workers: int, runs: list[dict[str, list[np.ndarray]]]) -> Path:
    recorded = RECORDED[name]
    arrays: dict[str, np.ndarray] = {}
    for key in ("x", "m", "v"):
        of_ranks = np.array([[run[key][step - 1] for run in runs] for step in recorded])
        agreed = all(np.array_equal(of_ranks[:, 0], of_ranks[:, rank]) for rank in range(num_workers))
        arrays[key] = of_ranks[:, :1] if agreed else of_ranks
    for key in ("lamb_coeff", *RATIOS):
        if key in runs[0]:
            arrays[key] = np.array(runs[0][key])
    if "v_fresh" in runs[0]:
        arrays["v_fresh"] = runs[0]["v_fresh"][-1]
    about = {
        "settings": COMMON | SETTINGS[name],
        "recorded": recorded,
        "digest": problem.digest(problem.problem_gradients(num_workers)),
    }
    path = Path(__file__).parent / f"{name}-n{num_workers}.npz"
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)
    return path


def main(source: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    warnings.filterwarnings("ignore", message="This overload of add")
    for name, num_workers in problem.CASES:
        with contextlib.redirect_stdout(io.StringIO()):  # the optimizers print
            runs = run(source, name, num_workers)
        path = save(name, num_workers, runs)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
