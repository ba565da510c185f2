"""Checkpoints of DeepSpeed's engine: weights and moments, taken over. DeepSpeed need not be installed.

    model = ...                                        # the same model
    optimizer = OneBitAdam(model.parameters(), model=model, lr=..., warmup=...)   # with the same parameter groups
    taken = load_checkpoint("checkpoints/global_step4000", model, optimizer)      # on every rank
    print(taken)

What is read: the files of an engine without ZeRO, in fp32, fp16 or bf16, and the partitions of ZeRO-1 and ZeRO-2.
Their layouts: deepspeed/runtime/engine.py (_save_checkpoint), runtime/fp16/fused_optimizer.py and
unfused_optimizer.py, runtime/zero/stage_1_and_2.py, utils/zero_to_fp32.py of DeepSpeed 0.19.6, and the files that it
wrote in tests/data. A file of torch is a pickle, and may run anything: here it is read with weights_only, which makes
tensors, numbers and texts alone. Of DeepSpeed's own classes two are in such files, and come as what they hold.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from thinwire.optim import OneBitAdam
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.moments import Moments, take_over

LATEST = "latest"
MODEL = "mp_rank_00_model_states.pt"
PARTITION = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
INNER = "optimizer_state_dict"
SCALER = 16
"""DeepSpeed's default of var_update_scaler."""


class _Inert:
    """In the place of an object of DeepSpeed's: nothing is asked of it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


_INERT: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(slots=True)
class Taken:
    """What was taken over. optimizer: DeepSpeed's, by its state. steps: updates that were made, without its hidden one.

    frozen_at: the update after which its variance was frozen, where it goes on so. ranks: of the run that saved.
    released: the norm of what rank 0's error memory held, which is not taken over. scheduler: the state of DeepSpeed's
    scheduler, None without one. client: what else was given to save_checkpoint.
    """

    optimizer: str
    steps: int
    frozen_at: int | None
    ranks: int
    zero_stage: int
    released: float
    scheduler: dict[str, Any] | None
    client: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"{self.optimizer} of {self.ranks} ranks, ZeRO stage {self.zero_stage}: {self.steps} updates taken over"
        ]
        if self.frozen_at is not None:
            lines.append(f"the variance stays that of update {self.frozen_at}; the next step is a compressed one")
        if self.released:
            lines.append(
                f"error memory begins empty: a checkpoint of DeepSpeed has that of rank 0 alone (norm "
                f"{self.released:.3g}), and DeepSpeed leaves it out when it loads, too"
            )
        return "\n".join(lines)


class CheckpointRefused(ValueError):
    """The files are no checkpoint that can be read here; the message says which file, and what to do."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """By parameter group, in DeepSpeed's order: names of parameters where they are saved, and the state of each."""

    states: list[list[dict[str, Any]]]
    masters: list[list[Tensor]] | None
    names: list[list[str]] | None


def load_checkpoint(
    folder: str | Path, model: torch.nn.Module, optimizer: FlatOptimizer[Any], tag: str | None = None
) -> Taken:
    """Weights into the model, moments into the optimizer, from a folder of engine.save_checkpoint(). Local.

    Call it on every rank, after the optimizer is made and before its first step. folder: the one with the file `latest`
    or that of one tag. model: without DDP, with the names that it had in the engine; modified. optimizer: with the
    parameter groups that the engine had, in that order; modified, and its own settings say what follows. Moments of
    1-bit Adam after its freeze go into OneBitAdam, which goes on compressing; all others into any optimizer of Adam's
    kind (thinwire.optim.moments), whose warm-up goes on from them. Where the run that saved was in low precision,
    its fp32 masters are what the parameters become.
    Raises: CheckpointRefused, ValueError; then the model may have the weights, and the optimizer is as it was.
    """
    found = _folder(Path(folder), tag)
    try:
        state = _read(found / MODEL)
        if not isinstance(state.get("module"), Mapping):
            raise CheckpointRefused(
                f"{found / MODEL} has no weights under 'module': it is no file of DeepSpeed's engine"
            )
        partitions = _partitions(found)
        saved = _of_zero(found, partitions, state) if partitions else _of_one_file(found / MODEL, state, optimizer)
        groups = _matched(saved, model, optimizer)
        weights = _weights(state["module"], groups, model)
        params = _params(state.get("ds_config"))
        kind, moments = _moments(groups, params)
        steps = max(one.steps for one in moments.values())
        frozen_at = _frozen_at(kind, groups, steps, params, optimizer)
        ranks = int(state.get("dp_world_size") or 1)
    except (CheckpointRefused, MemoryError):
        raise
    except Exception as error:  # whatever a value of another kind than DeepSpeed's, somewhere in the files, runs into
        raise CheckpointRefused(f"{found} is not laid out as DeepSpeed 0.19.6 lays it out ({error!r})") from error
    model.load_state_dict(weights)
    take_over(optimizer, moments, frozen_at=frozen_at)
    own = ("module", "optimizer", "ds_config", "lr_scheduler", "param_shapes", "buffer_names", "shared_params")
    scheduler = state.get("lr_scheduler")
    return Taken(
        optimizer=kind,
        steps=steps,
        frozen_at=frozen_at,
        ranks=ranks,
        zero_stage=_stage(partitions),
        released=_released(groups),
        scheduler=scheduler if isinstance(scheduler, dict) else None,
        client={key: value for key, value in state.items() if key not in own},
    )


def _folder(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        raise CheckpointRefused(f"{folder} is no folder: give that which engine.save_checkpoint() was given")
    if tag is None and not (folder / MODEL).is_file() and (folder / LATEST).is_file():
        tag = (folder / LATEST).read_text(errors="replace").strip()
    if tag is not None:
        if not tag or "/" in tag or "\\" in tag or tag in (".", ".."):
            raise CheckpointRefused(f"tag = {tag!r}: must be the name of a folder in {folder}")
        folder = folder / tag
    if (folder / MODEL).is_file():
        return folder
    if list(folder.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointRefused(
            f"{folder} is of ZeRO-3, whose parameters are in parts: DeepSpeed's zero_to_fp32.py, which lies beside it, "
            "makes a file of the weights; load that into the model, and begin the optimizer anew"
        )
    more = sorted(one.name for one in folder.glob("mp_rank_*_model_states.pt")) if folder.is_dir() else []
    raise CheckpointRefused(
        f"{folder} has no {MODEL}: give a folder of engine.save_checkpoint(), or that of one of its tags"
        + (f"; with {more} it is of a model in parts, which cannot be read here" if more else "")
    )


def _read(path: Path) -> dict[str, Any]:
    """What is in a file, on the CPU, without running anything of it. Raises: CheckpointRefused."""
    try:
        with safe_globals(_INERT):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.findall(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object of {named[0]}" if named else "an object that is no tensor, number or text"
        raise CheckpointRefused(
            f"{path} holds {what}, and to make it code of that file would run here. If you trust who made the file, "
            "read it where DeepSpeed is, remove the object (such things come from client_state of save_checkpoint()), "
            "and save it again"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointRefused(f"{path} cannot be read as a file of torch.save(): {why}") from error
    if not isinstance(found, dict):
        raise CheckpointRefused(f"{path} holds {type(found).__name__}: must be the dict of DeepSpeed's engine")
    return found


def _partitions(folder: Path) -> list[dict[str, Any]]:
    """The optimizer states of all ranks, in order; empty without ZeRO. Raises: CheckpointRefused."""
    paths = {int(match[1]): path for path in folder.iterdir() if (match := PARTITION.match(path.name))}
    found = []
    for rank in sorted(paths):
        state = _read(paths[rank]).get(INNER)
        if not isinstance(state, dict):
            raise CheckpointRefused(f"{paths[rank]} has no {INNER!r}: it is no partition of DeepSpeed's")
        found.append(state)
    if not found:
        return found
    count = found[0].get("partition_count", len(found))
    ranks = max(count) if isinstance(count, list | tuple) else int(count)
    if sorted(paths) != list(range(ranks)):
        missing = next((rank for rank in range(ranks) if rank not in paths), None)
        what = f"that of rank {missing} is missing" if missing is not None else "there are too many"
        raise CheckpointRefused(f"{folder} has partitions of {len(paths)} ranks, saved by {ranks}: {what}")
    if _stage(found) > 2:
        raise CheckpointRefused(f"{folder} is of ZeRO-{_stage(found)}: stages 1 and 2 can be read")
    return found


def _stage(partitions: Sequence[dict[str, Any]]) -> int:
    return int(partitions[0].get("zero_stage", 1)) if partitions else 0


def _of_one_file(path: Path, state: Mapping[str, Any], optimizer: FlatOptimizer[Any]) -> _Saved:
    """Of an engine without ZeRO: states by parameter, or of each group in one vector, as its 16-bit wrapper has."""
    outer = state.get("optimizer")
    if not isinstance(outer, dict):
        raise CheckpointRefused(f"{path} has no state of an optimizer: load its weights, state['module'], alone")
    inner = outer.get(INNER, outer)
    groups, states = inner.get("param_groups"), inner.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        raise CheckpointRefused(f"{path} has no 'param_groups' and 'state' of an optimizer")
    rows = [[_with_step(states.get(index, {}), group) for index in group["params"]] for group in groups]
    if "fp32_groups_flat" not in outer:
        return _Saved(rows, outer.get("fp32_groups"), None)
    flat = [row[0] for row in rows]
    shapes = [[p.shape for p in _trained(group["params"])] for group in optimizer.param_groups]
    if len(shapes) != len(flat):
        raise CheckpointRefused(
            f"{path} has {len(flat)} parameter groups, and the optimizer {len(shapes)}: make the same"
        )
    parts = [_cut(path, one, shape) for one, shape in zip(flat, shapes, strict=True)]
    masters = [_cut_one(path, master, shape) for master, shape in zip(outer["fp32_groups_flat"], shapes, strict=True)]
    return _Saved(parts, masters, None)


def _of_zero(folder: Path, partitions: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> _Saved:
    """Of ZeRO-1 and 2: each group is one vector, in parts by rank; the model's file names its parameters."""
    named = state.get("param_shapes")
    if not isinstance(named, list):
        raise CheckpointRefused(f"{folder / MODEL} has no 'param_shapes', which say what the partitions are of")
    bases = [one.get("base_optimizer_state") for one in partitions]
    states, masters = [], []
    for index, shapes in enumerate(named):
        parts = [_with_step(*_of_partition(folder, base, index)) for base in bases]
        merged = dict(parts[0])
        for name, value in parts[0].items():
            if isinstance(value, Tensor) and value.dim() == 1 and name != "step":
                merged[name] = torch.cat([part[name] for part in parts])
        states.append(_cut(folder, merged, list(shapes.values())))
        whole = torch.cat([one["single_partition_of_fp32_groups"][index] for one in partitions])
        masters.append(_cut_one(folder, whole, list(shapes.values())))
    return _Saved(states, masters, [list(shapes) for shapes in named])


def _of_partition(folder: Path, base: Any, group: int) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The state of a group's part on one rank, and the group. An elastic checkpoint has a list of states."""
    if isinstance(base, list):
        return base[group], {}
    if not isinstance(base, dict) or "state" not in base:
        raise CheckpointRefused(f"{folder} has partitions without 'base_optimizer_state': saved without the optimizer")
    index = base["param_groups"][group]["params"][0]
    return base["state"].get(index, {}), base["param_groups"][group]


def _with_step(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """A state with its step count, which DeepSpeed's FusedAdam keeps in the group."""
    found = dict(state)
    if found and "step" not in found and "step" in group:
        found["step"] = group["step"]
    return found


def _cut(path: Path, state: Mapping[str, Any], shapes: Sequence[Any]) -> list[dict[str, Any]]:
    """A state of one vector, as those of the parameters that lie in it end to end."""
    vectors = {name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}
    cut = {name: _cut_one(path, x, shapes) for name, x in vectors.items()}
    return [{**state, **{name: parts[i] for name, parts in cut.items()}} for i in range(len(shapes))]


def _cut_one(path: Path, x: Tensor, shapes: Sequence[Any]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if len(x) < sum(sizes):
        raise CheckpointRefused(f"{path} has a group of {len(x)} elements, where its parameters have {sum(sizes)}")
    parts = torch.split(x[: sum(sizes)], sizes)  # the rest is padding
    return [part.view(torch.Size(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _trained(params: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in params if p.requires_grad]


_Row = tuple[Tensor, dict[str, Any], Tensor | None]
"""A parameter, DeepSpeed's state of it, and its master."""


def _matched(saved: _Saved, model: torch.nn.Module, optimizer: FlatOptimizer[Any]) -> list[_Row]:
    """By name where names are saved, else by place: in the same group, at the same place. Raises: CheckpointRefused."""
    masters: Sequence[Sequence[Tensor | None]] = saved.masters or [[None] * len(group) for group in saved.states]
    rows: list[_Row] = []
    if saved.names is not None:
        by_name = {_plain(name): p for name, p in model.named_parameters()}
        for names, states, values in zip(saved.names, saved.states, masters, strict=True):
            for name, state, value in zip(names, states, values, strict=True):
                if (param := by_name.get(_plain(name))) is None:
                    raise CheckpointRefused(
                        f"the model has no parameter {name!r}, which the checkpoint has: build the same"
                    )
                rows.append((param, state, value))
        return rows
    ours: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    if len(ours) != len(saved.states):
        raise CheckpointRefused(
            f"the checkpoint has {len(saved.states)} parameter groups, and the optimizer {len(ours)}: make the same"
        )
    for at, (params, states, values) in enumerate(zip(ours, saved.states, masters, strict=True)):
        here = params if len(params) == len(states) else _trained(params)
        if len(here) != len(states):
            raise CheckpointRefused(
                f"parameter group {at} of the checkpoint has {len(states)} parameters, and that of the optimizer "
                f"{len(params)}, {len(here)} of them trained: make the same groups"
            )
        rows += zip(here, states, values, strict=True)
    return [row for row in rows if row[1]]


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _weights(module: Mapping[str, Any], rows: Sequence[_Row], model: torch.nn.Module) -> dict[str, Any]:
    """The state_dict of the model, with masters where there are any. Raises: CheckpointRefused."""
    weights = {_plain(name): value for name, value in module.items()}
    own = model.state_dict()
    other = sorted(set(own) ^ set(weights))
    if other:
        raise CheckpointRefused(
            f"the checkpoint and the model differ in {other[:5]}: build the same model, without DDP"
        )
    named = {id(p): name for name, p in model.named_parameters()}
    if any(id(param) not in named for param, _, _ in rows):
        raise CheckpointRefused(
            "the optimizer has parameters that the model has not: give the model that it was made of"
        )
    weights |= {named[id(param)]: master for param, _, master in rows if master is not None}
    for name, here in own.items():
        if isinstance(here, Tensor) and weights[name].shape != here.shape:
            raise CheckpointRefused(f"{name} is {list(weights[name].shape)} there and {list(here.shape)} here")
    damaged = [name for param, _, _ in rows if not weights[name := named[id(param)]].isfinite().all()]
    if damaged:
        raise CheckpointRefused(f"the weights {damaged[:5]} have values that are not finite: load another checkpoint")
    return weights


def _moments(rows: Sequence[_Row], params: Mapping[str, Any]) -> tuple[str, dict[Tensor, Moments]]:
    """The kind of the optimizer, and the moments of each parameter. Raises: CheckpointRefused."""
    if not rows:
        raise CheckpointRefused("the checkpoint has no moments: it was saved before the first step")
    kinds = {_kind(state) for _, state, _ in rows}
    if len(kinds) > 1:
        raise CheckpointRefused(f"the checkpoint has states of {sorted(kinds)}: of one optimizer is needed")
    kind, found = kinds.pop(), {}
    hidden = 0 if kind == "Adam" else 1  # the first step() of the one-bit optimizers makes buffers, and is counted
    for param, state, master in rows:
        counted = state.get("step")
        if counted is None or not {"exp_avg", "exp_avg_sq"} <= state.keys():
            raise CheckpointRefused(
                f"the checkpoint has a state of {sorted(state)}: exp_avg, exp_avg_sq and step are needed, as the "
                "optimizers of Adam's kind have them"
            )
        steps = int(counted) - hidden
        if steps < 1:
            raise CheckpointRefused("the checkpoint has no moments: it was saved before the first step")
        if steps >= 1 << 53:
            raise CheckpointRefused(f"the checkpoint has a step count of {steps:.3g}: it is damaged, load another one")
        for name in ("exp_avg", "exp_avg_sq"):
            if not isinstance(x := state[name], Tensor) or x.layout is not torch.strided or x.device.type != "cpu":
                kind_of = f"{x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
                raise CheckpointRefused(
                    f"{name} in the checkpoint is {kind_of}: must be a dense tensor with its values"
                )
        found[param] = Moments(
            steps,
            state["exp_avg"],
            state["exp_avg_sq"],
            updates=max(1, min(steps, _updates(state, steps, params))),
            coefficient=state.get("lamb_coeff_freeze"),
            master=None if master is None else master.detach(),
        )
    return kind, found


def _kind(state: Mapping[str, Any]) -> str:
    """Of its optimizers, by what only that one keeps."""
    marks = {"exp_avg_sq_fresh": "OneBitLamb", "var_interval": "ZeroOneAdam", "tensor_size": "OneBitAdam"}
    return next((kind for mark, kind in marks.items() if mark in state), "Adam")


def _updates(state: Mapping[str, Any], steps: int, params: Mapping[str, Any]) -> int:
    """Of the variance: 0/1 Adam's come in gaps of 1, 2, 4, ... steps, and each gap is used var_update_scaler times."""
    if "var_interval" not in state:
        return steps
    doublings = int(state["var_interval"]).bit_length() - 1
    return doublings * int(params.get("var_update_scaler", SCALER)) + int(state["var_counter"])


def _params(config: object) -> Mapping[str, Any]:
    """Those of the optimizer in the configuration that the engine saved; empty where the optimizer was given to it."""
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    found = optimizer.get("params") if isinstance(optimizer, dict) else None
    return found if isinstance(found, dict) else {}


def _frozen_at(
    kind: str, rows: Sequence[_Row], steps: int, params: Mapping[str, Any], optimizer: FlatOptimizer[Any]
) -> int | None:
    """The update after which v was frozen, or None. Raises: CheckpointRefused where nothing here goes on from that."""
    state = rows[0][1]
    frozen = {
        # In its warm-up the hidden first step takes the errors away again from the last parameter of each group alone.
        "OneBitAdam": all("worker_error" in one for _, one, _ in rows),
        "OneBitLamb": "scaling_coeff" in state,
        "ZeroOneAdam": state.get("local_step_counter", 0) > 0 or state.get("local_step_interval", 1) > 1,
    }.get(kind, False)
    if not frozen:
        return None
    if kind != "OneBitAdam" or not isinstance(optimizer, OneBitAdam):
        raise CheckpointRefused(
            f"the checkpoint is of {kind} with a frozen variance, and the optimizer is {type(optimizer).__name__}: "
            "OneBitAdam alone goes on from one, from DeepSpeed's OneBitAdam. Load a checkpoint from before the freeze, "
            "or the weights alone, state['module']"
        )
    step = params.get("freeze_step")
    return min(steps, max(1, step - 1)) if isinstance(step, int) else steps


def _released(rows: Sequence[_Row]) -> float:
    """The norm of the worker errors of rank 0, which are those that the file has."""
    errors = [state["worker_error"] for _, state, _ in rows if isinstance(state.get("worker_error"), Tensor)]
    return float(torch.stack([one.double().norm() for one in errors]).norm()) if errors else 0.0
