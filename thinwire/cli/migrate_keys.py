"""What each key of a DeepSpeed configuration becomes here: a table of its keys, and what is made of their values.

Read from DeepSpeed 0.19.6: runtime/config.py, runtime/constants.py, runtime/lr_schedules.py, runtime/engine.py and
runtime/fp16/onebit. A key that is in no table is named as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.cli.migrate_reading import AUTO, ConfigRefused, Reader, Said, Verdict, shown
from thinwire.contract.spec import MOST_WORKERS


@dataclass(slots=True)
class Migration:
    """What a configuration says in the words of thinwire.

    optimizer: the class of thinwire.optim. options: arguments of it. bounds, schedule: of LambBounds and of
    ZeroOneSchedule. named: the optimizer's name in a job file.
    rates: of the scheduler, None where there is none. scaler: arguments of torch.amp.GradScaler, or None.
    """

    optimizer: str = "OneBitAdam"
    named: str | None = "onebit_adam"
    options: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    schedule: dict[str, int] = field(default_factory=dict)
    rates: Rates | None = None
    dtype: str | None = None
    scaler: dict[str, float] | None = None
    micro_batch: int | None = None
    micro_steps: int = 1
    global_batch: int | None = None
    workers: dict[str, int] = field(default_factory=dict)
    said: list[Said] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Is nothing lost that the configuration asks for?"""
        return all(one.verdict in (Verdict.TAKEN, Verdict.IGNORED) for one in self.said)


@dataclass(frozen=True, slots=True)
class Rates:
    """A learning rate by step, as DeepSpeed's schedulers have it. shape: of what follows the warm-up.

    lowest: the factor at the beginning, of the peak. last: the one at the end of a cosine. total: steps of the run.
    """

    shape: str
    warmup: int
    is_log: bool
    lowest: float
    last: float = 0.0
    total: int | None = None


OPTIMIZERS = {
    "onebitadam": ("OneBitAdam", "onebit_adam"),
    "onebitlamb": ("OneBitLamb", "onebit_lamb"),
    "zerooneadam": ("ZeroOneAdam", "zero_one_adam"),
    "adam": ("Adam", "adam"),
    "adamw": ("Adam", "adam"),
    "lamb": ("Lamb", "lamb"),
    "sgd": ("SGD", "sgd"),
}
OTHER_OPTIMIZERS = {
    "muon": "OneBitMuon and Muon choose their matrices themselves, with other names of arguments: docs/algorithms.md",
    "muadam": "scale the groups by mup yourself, and give them to OneBitAdam",
    "muadamw": "scale the groups by mup yourself, and give them to OneBitAdam",
    "musgd": "scale the groups by mup yourself, and give them to OneBitSGD",
    "lion": "it takes the sign of what it receives, for which error feedback does not make up: OneBitAdam, or "
    "LocalSteps around it",
    "adagrad": "it divides by squares of what it receives: OneBitAdam, or LocalSteps around it",
}

_SAME = "the same argument"
_BOUNDS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
_SCHEDULE = ("var_update_scaler", "local_step_scaler", "local_step_clipper")
_PARAMS = {
    "lr": _SAME,
    "betas": _SAME,
    "eps": _SAME,
    "weight_decay": "the same argument: decoupled there and here",
    "momentum": _SAME,
    **{name: f"bounds=LambBounds({name}=...)" for name in _BOUNDS},
    **{name: f"schedule=ZeroOneSchedule({name}=...)" for name in _SCHEDULE},
}
_OF = {
    "OneBitAdam": ("lr", "betas", "eps", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "OneBitLamb": ("lr", "betas", "eps", "weight_decay", *_BOUNDS),
    "Lamb": ("lr", "betas", "eps", "weight_decay", "max_coeff", "min_coeff"),
    "ZeroOneAdam": ("lr", "betas", "eps", "weight_decay", *_SCHEDULE),
    "SGD": ("lr", "momentum", "weight_decay"),
}
_PARAMS_OF_SGD = {
    "nesterov": "SGD and OneBitSGD have plain momentum",
    "dampening": "SGD and OneBitSGD have plain momentum",
}
_PARAMS_IGNORED = {
    "comm_backend_name": "what carries the bytes is torch's process group: NCCL or gloo",
    "cuda_aware": "what carries the bytes is torch's process group: NCCL or gloo",
    "eps_inside_sqrt": "DeepSpeed stores it and does not use it",
    "torch_adam": "it says which kernel computes",
    "fused": "it says which kernel computes",
    "foreach": "it says which kernel computes",
    "fp32_optimizer_states": "moments are in fp32",
    "set_grad_none": "zero_grad() keeps gradients in one flat vector",
}

IGNORED = {
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "log_level"),
        "what is printed: optimizer.stats(), and in a job `thinwire watch`",
    ),
    **dict.fromkeys(
        ("tensorboard", "csv_monitor", "monitor_config"),
        "where figures go: every run of a job has TensorBoard's files (docs/tracking.md)",
    ),
    **dict.fromkeys(("wandb", "comet"), "where figures go: `tracking` in a job file (docs/tracking.md)"),
    "comms_logger": "optimizer.stats() counts the bytes (docs/ledger.md)",
    "flops_profiler": "torch.profiler measures a step",
    **dict.fromkeys(
        ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather"), "it belongs to ZeRO"
    ),
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"), "the mean of the gradients is the same without it"
    ),
    "sparse_gradients": "a sparse gradient counts as the dense one that it stands for; SparseAdam sends rows alone",
    "dataloader_drop_last": "your own DataLoader says it",
    "checkpoint": "you save optimizer.state_dict() yourself (docs/own-loop.md, Saving)",
    "data_types": "gradients are accumulated as your loop does; moments are in fp32",
    "compile": "torch.compile(model) before or after the optimizer is made",
    "graph_harvesting": "a step is not captured in a CUDA graph",
    "use_data_before_expert_parallelism": "it orders DeepSpeed's groups",
    "optimizer.legacy_fusion": "it says which kernel computes",
    "seq_parallel_communication_data_type": "it belongs to Ulysses",
    "managed_gradient_accumulation": "your loop accumulates",
}
NONE = {
    "amp": "apex is gone from torch: use torch.autocast, and precision in bfloat16",
    "torch_autocast": "put `with torch.autocast(...)` around the forward pass of your loop: it works as it is",
    "activation_checkpointing": "torch.utils.checkpoint in your model works as it is",
    "compression_training": "it changes the model, not the exchange: torchao, or your own code",
    "curriculum_learning": "your own data loader orders the samples",
    "data_efficiency": "your own data loader orders the samples",
    "sparse_attention": "it is part of the model: torch.nn.attention.flex_attention",
    "eigenvalue": "it steers DeepSpeed's quantisation of weights",
    "quantize_training": "it changes the model, not the exchange: torchao, or your own code",
    "progressive_layer_drop": "it is part of the model: leave layers out in forward()",
    "autotuning": "`thinwire plan` and `thinwire bench` measure what there is to choose (docs/plan.md)",
    "aio": "nothing is swapped to disks",
    "nebula": "checkpoints go where you write them, or to checkpoint.store of a job file",
    "pipeline": "parts of a model in a pipeline: docs/sharded.md says what may stand beside each other",
    "tensor_parallel": "parallelize_module of torch, and group= of the ranks with the same shard (docs/sharded.md)",
    "sequence_parallel_size": "context parallelism of torch, and group= of the ranks with the same shard",
    "hybrid_engine": "there is no engine for generation",
    "moe": "give group= of the ranks that hold the same experts (docs/sharded.md)",
}
_FP16_IGNORED = {
    "auto_cast": "torch.autocast is in the lines",
    "master_weights_and_grads": "it belongs to ZeRO",
    "fp16_master_weights_and_grads": "it belongs to ZeRO",
}
_FP16_NONE = {
    "hysteresis": "GradScaler lowers its scale at the first gradient that is not finite",
    "consecutive_hysteresis": "GradScaler lowers its scale at the first gradient that is not finite",
    "min_loss_scale": "GradScaler has no lowest scale",
}
_BF16_IGNORED = {
    "immediate_grad_update": "gradients go where backward leaves them",
    "check_grad_overflow": "a gradient that is not finite is refused by all ranks (non_finite)",
    "bf16_master_weights_and_grads": "moments and masters are in fp32",
    "bf16_optimizer_states": "moments and masters are in fp32; narrow= halves two of the vectors",
}
ZERO_WORDS = {
    1: "moments are whole on every rank, so memory is that of stage 0; narrow=('variance', 'error_memory') halves "
    "two vectors of OneBitAdam, and FSDP2 shards a model inside of each box (docs/sharded.md)",
    2: "moments and gradients are whole on every rank, so memory is that of stage 0; FSDP2 shards a model inside of "
    "each box (docs/sharded.md)",
    3: "parameters are whole on every rank: shard the model inside of each box with fully_shard, and give group= of "
    "the ranks that hold the same shard (docs/sharded.md)",
}


def migration_of(config: Mapping[str, Any], steps: int | None = None) -> Migration:
    """What a DeepSpeed configuration becomes here. steps: of the run, where the configuration does not say.

    Raises: ConfigRefused for a value that DeepSpeed could not take either.
    """
    reader, found = Reader(config), Migration()
    found.said = reader.said
    _optimizer(reader, found)
    _scheduler(reader, found, steps)
    _precision(reader, found)
    _batches(reader, found)
    _zero(reader)
    _communication(reader, found)
    _elasticity(reader, found)
    reader.all_of(IGNORED, Verdict.IGNORED)
    for name, why in NONE.items():
        if (value := reader.take(name)) is not None:
            off = isinstance(value, dict) and value.get("enabled") is False
            reader.say(name, value, Verdict.IGNORED if off else Verdict.NONE, "it is turned off" if off else why)
    reader.rest()
    if steps is not None:
        found.options["total_steps"] = steps
    elif found.rates is not None and found.rates.total is not None:
        found.options["total_steps"] = found.rates.total
    if found.optimizer in ("Adam", "Lamb", "SGD"):
        found.options.pop("total_steps", None)
    return found


def _optimizer(reader: Reader, found: Migration) -> None:
    given = reader.block("optimizer")
    if given is None:
        words = "OneBitAdam stands in the place of the optimizer that you give to deepspeed.initialize()"
        reader.say("optimizer", "not given", Verdict.TAKEN, words)
        return
    reader.block("optimizer.params")
    kind = reader.take("optimizer.type")
    known = OPTIMIZERS.get(str(kind).lower())
    if known is None:
        found.named = None
        why = OTHER_OPTIMIZERS.get(str(kind).lower(), "no optimizer of that name: docs/own-loop.md has those there are")
        reader.say("optimizer.type", kind, Verdict.NONE, f"{why}. The lines have OneBitAdam")
        for path, value in reader.leave("optimizer.params").items():
            reader.say(path, value, Verdict.NONE, "it belongs to that optimizer")
        return
    found.optimizer, found.named = known
    words = "the class of thinwire.optim"
    if found.optimizer == "Adam":
        words += ", uncompressed and with the same numbers; OneBitAdam takes the same arguments and sends 1/32"
    elif found.optimizer in ("Lamb", "SGD"):
        words += f", uncompressed; OneBit{found.optimizer} takes the same arguments"
    reader.say("optimizer.type", kind, Verdict.TAKEN, f"{found.optimizer}, {words}")
    torch_adam = bool((given.get("params") or {}).get("torch_adam"))
    _params(reader, found, str(kind).lower(), torch_adam=torch_adam)


def _params(reader: Reader, found: Migration, kind: str, *, torch_adam: bool) -> None:
    at = "optimizer.params."
    decoupled = reader.take(at + "adam_w_mode")
    if decoupled is not None:
        reader.say(at + "adam_w_mode", decoupled, Verdict.IGNORED, "of weight_decay: see there")
    for name in _OF[found.optimizer]:
        path = at + name
        value: Any = _betas(reader, path) if name == "betas" else reader.number(path, whole=name in _SCHEDULE)
        if value is None:
            continue
        if name == "weight_decay" and value and kind == "adam" and decoupled is False:
            why = (
                "with adam_w_mode = false it is added to the gradient, and so divided by sqrt(v): here it is decoupled"
            )
            reader.say(path, value, Verdict.NONE, why)
            continue
        if name == "weight_decay" and value and found.optimizer == "ZeroOneAdam":
            why = "the same argument; there it also enters the momentum, at ten times its size (docs/algorithms.md)"
            reader.say(path, value, Verdict.TAKEN, why)
        else:
            reader.say(path, list(value) if name == "betas" else value, Verdict.TAKEN, _PARAMS[name])
        if name in _BOUNDS:
            found.bounds[name] = value
        elif name in _SCHEDULE:
            found.schedule[name] = value
        else:
            found.options[name] = value
    if torch_adam and decoupled is not False and "weight_decay" not in found.options:
        found.options["weight_decay"] = 0.01
        reader.say(at + "weight_decay", "not given", Verdict.TAKEN, "torch.optim.AdamW's 0.01")
    _freeze(reader, found)
    bias = reader.take(at + "bias_correction")
    if bias is False and not found.optimizer.startswith("OneBit") and found.optimizer != "ZeroOneAdam":
        reader.say(at + "bias_correction", bias, Verdict.NONE, "moments are corrected for their start at zero")
    elif bias is not None:
        reader.say(at + "bias_correction", bias, Verdict.IGNORED, "moments are corrected for their start at zero")
    if (amsgrad := reader.take(at + "amsgrad")) is not None:
        words = "CADA alone has AMSGrad's variance" if amsgrad else "it is off"
        reader.say(at + "amsgrad", amsgrad, Verdict.NONE if amsgrad else Verdict.IGNORED, words)
    if (clip := reader.number(at + "max_grad_norm")) is not None:
        words = "DeepSpeed refuses it there and takes gradient_clipping"
        reader.say(at + "max_grad_norm", clip, Verdict.TAKEN, f"max_grad_norm={clip!r}: {words}")
        found.options["max_grad_norm"] = clip
    for name, why in _PARAMS_OF_SGD.items() if found.optimizer == "SGD" else ():
        if (value := reader.take(at + name)) is not None:
            reader.say(at + name, value, Verdict.NONE if value else Verdict.IGNORED, why if value else "it is off")
    reader.all_of(_PARAMS_IGNORED, Verdict.IGNORED, at)


def _betas(reader: Reader, path: str) -> tuple[float, ...] | None:
    value = reader.take(path)
    if value is None or value == AUTO:
        if value == AUTO:
            reader.auto(path)
        return None
    fits = isinstance(value, list) and len(value) == 2
    if not fits or not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1 for x in value):
        raise ConfigRefused(f"{path} = {shown(value)}: must be two numbers, at least 0 and below 1")
    return tuple(value)


def _freeze(reader: Reader, found: Migration) -> None:
    """The end of the warm-up. DeepSpeed's first step() only makes its buffers, and is counted."""
    if found.optimizer in ("OneBitAdam", "OneBitLamb"):
        path = "optimizer.params.freeze_step"
        step = reader.number(path, least=1, whole=True)
        if step is None:
            why = '100000 there; warmup="auto" here finds the end by the variance'
            reader.missing(path, Verdict.IGNORED, why)
            return
        found.options["warmup"] = max(1, step - 1)
        words = f"warmup={max(1, step - 1)}: its count is one ahead, because its first step() trains nothing"
        reader.say(path, step, Verdict.TAKEN, words)
    if found.optimizer == "ZeroOneAdam":
        path = "optimizer.params.var_freeze_step"
        step = reader.number(path, least=1, whole=True)
        if step is None:
            reader.missing(path, Verdict.IGNORED, "100000 there; here it is found by the learning rate")
            return
        found.options["var_freeze_step"] = step
        reader.say(path, step, Verdict.TAKEN, f"var_freeze_step={step}, the same argument")


_SHAPES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_OTHER_SCHEDULERS = {
    "onecycle": "torch.optim.lr_scheduler.OneCycleLR on the optimizer works as on any other",
    "lrrangetest": "a rate is searched with a loop of your own",
}


def _scheduler(reader: Reader, found: Migration, steps_of_run: int | None) -> None:
    if reader.block("scheduler") is None:
        return
    reader.block("scheduler.params")
    kind, at = reader.take("scheduler.type"), "scheduler.params."
    shape = _SHAPES.get(str(kind).lower())
    if shape is None:
        why = _OTHER_SCHEDULERS.get(str(kind).lower(), "no scheduler of that name: those of torch work as they are")
        reader.say("scheduler.type", kind, Verdict.NONE, why)
        for path, value in reader.leave("scheduler.params").items():
            reader.say(path, value, Verdict.NONE, "it belongs to that scheduler")
        return
    warmup = reader.number(at + "warmup_num_steps", least=1, whole=True)
    total = reader.number(at + "total_num_steps", least=1, whole=True)
    rate = found.options.get("lr", 1e-3)
    if shape == "cosine":
        lowest = reader.number(at + "warmup_min_ratio") or 0.0
    else:
        low, high = reader.number(at + "warmup_min_lr"), reader.number(at + "warmup_max_lr")
        if high is not None:
            reader.say(
                at + "warmup_max_lr", high, Verdict.TAKEN, f"lr={high!r}: it stands in the place of the optimizer's"
            )
            rate = high
        elif shape == "linear":
            rate = 1e-3
            reader.missing(at + "warmup_max_lr", Verdict.TAKEN, "lr=0.001, WarmupDecayLR's own default")
        if low and not rate:
            raise ConfigRefused(f"{at}warmup_min_lr = {low}: must be 0 where the highest rate is 0")
        lowest = low / rate if low else 0.0
        if low is not None:
            reader.say(at + "warmup_min_lr", low, Verdict.TAKEN, "what the schedule begins with")
    found.options["lr"] = rate
    last = 0.0
    if shape == "cosine":
        if (ratio := reader.number(at + "cos_min_ratio")) is not None:
            reader.say(at + "cos_min_ratio", ratio, Verdict.TAKEN, "what the schedule ends with")
        last = 1e-4 if ratio is None else ratio
    type_of = reader.take(at + "warmup_type")
    is_log = type_of != "linear"
    words = "the rate rises with the logarithm of the step" if is_log else "the rate rises evenly"
    if type_of not in (None, "log", "linear"):
        words = f"DeepSpeed takes what it does not know as log: {words}"
    reader.say(at + "warmup_type", type_of or "not given", Verdict.TAKEN, words)
    if (start := reader.take(at + "last_batch_iteration")) not in (None, -1):
        reader.say(at + "last_batch_iteration", start, Verdict.NONE, "load the state of the scheduler instead")
    if shape != "constant" and total is None:
        if steps_of_run is None:
            raise ConfigRefused(f"{at}total_num_steps: no number is given, and {kind} needs the steps: give --steps")
        total = steps_of_run
        reader.missing(at + "total_num_steps", Verdict.TAKEN, f"total_steps={total}, of --steps", known=True)
    elif total is not None:
        reader.say(at + "total_num_steps", total, Verdict.TAKEN, f"total_steps={total}")
    steps = max(2, 1000 if warmup is None else warmup)
    reader.say("scheduler.type", kind, Verdict.TAKEN, "a LambdaLR of torch with the same rates, step for step")
    if warmup is None:
        reader.missing(at + "warmup_num_steps", Verdict.TAKEN, f"{steps} steps")
    else:
        reader.say(at + "warmup_num_steps", warmup, Verdict.TAKEN, f"{steps} steps")
    found.rates = Rates(shape, steps, is_log, lowest, last, total)


def _precision(reader: Reader, found: Migration) -> None:
    for name in ("fp16", "bf16", "bfloat16"):
        if reader.block(name) is None:
            continue
        enabled = reader.switch(f"{name}.enabled")
        if not enabled:
            for path, value in {f"{name}.enabled": enabled, **reader.leave(name)}.items():
                if value is not None and value != AUTO:
                    reader.say(path, value, Verdict.IGNORED, f"{name} is not turned on")
            continue
        if name != "fp16":
            if found.dtype == "float16":
                raise ConfigRefused(f"fp16 and {name} are both enabled: DeepSpeed refuses that too")
            found.dtype = "bfloat16"
            reader.say(
                f"{name}.enabled", True, Verdict.TAKEN, "parameters in bfloat16; the optimizer keeps fp32 masters"
            )
            reader.all_of(_BF16_IGNORED, Verdict.IGNORED, f"{name}.")
            continue
        found.dtype = "float16"
        words = "fp32 parameters under torch.autocast(dtype=torch.float16), with a GradScaler; bfloat16 needs no scale"
        reader.say("fp16.enabled", True, Verdict.TAKEN, words)
        _loss_scale(reader, found)
        reader.all_of(_FP16_IGNORED, Verdict.IGNORED, "fp16.")
        reader.all_of(_FP16_NONE, Verdict.NONE, "fp16.")


def _loss_scale(reader: Reader, found: Migration) -> None:
    static = reader.number("fp16.loss_scale")
    power, window = (
        reader.number("fp16.initial_scale_power", most=127),
        reader.number("fp16.loss_scale_window", whole=True),
    )
    found.scaler = {"init_scale": float(static or 2.0 ** (16 if power is None else power))}
    found.scaler["growth_interval"] = 2**31 - 1 if static else int(1000 if window is None else window)
    if static is not None:
        words = f"GradScaler(init_scale={static:g}), which never grows" if static else "0: dynamic, as GradScaler is"
        reader.say("fp16.loss_scale", static, Verdict.TAKEN, words)
    if power is not None:
        reader.say("fp16.initial_scale_power", power, Verdict.TAKEN, f"GradScaler(init_scale={2.0**power:g})")
    if window is not None:
        reader.say("fp16.loss_scale_window", window, Verdict.TAKEN, f"GradScaler(growth_interval={window})")


def _batches(reader: Reader, found: Migration) -> None:
    micro = reader.number("train_micro_batch_size_per_gpu", least=1, whole=True)
    steps = reader.number("gradient_accumulation_steps", least=1, whole=True)
    whole = reader.number("train_batch_size", least=1, whole=True)
    each = (micro or 1) * (steps or 1)
    if whole is not None and whole % each:
        raise ConfigRefused(
            f"train_batch_size = {whole}: must be a multiple of {each}, train_micro_batch_size_per_gpu times "
            "gradient_accumulation_steps"
        )
    if micro is not None:
        words = "batch_size of the DataLoader on each rank"
        reader.say("train_micro_batch_size_per_gpu", micro, Verdict.TAKEN, words)
    if steps is not None:
        words = f"backward() {steps} times before step()" if steps > 1 else "one backward() before each step()"
        reader.say("gradient_accumulation_steps", steps, Verdict.TAKEN, words)
    if whole is not None:
        reader.say("train_batch_size", whole, Verdict.TAKEN, f"global_batch: {whole} in a job file")
    found.micro_batch, found.micro_steps, found.global_batch = micro, steps or 1, whole
    clip = reader.number("gradient_clipping")
    if clip:
        found.options["max_grad_norm"] = clip
        reader.say("gradient_clipping", clip, Verdict.TAKEN, f"max_grad_norm={clip!r}")
    elif clip is not None:
        reader.say("gradient_clipping", clip, Verdict.IGNORED, "0: nothing is clipped")


def _zero(reader: Reader) -> None:
    given = reader.block("zero_optimization")
    if given is None:
        return
    stage = reader.number("zero_optimization.stage", whole=True) or 0
    if stage:
        words = ZERO_WORDS.get(stage, "there are stages 0 to 3")
        reader.say("zero_optimization.stage", stage, Verdict.NONE, words)
    elif given.get("stage") == 0:
        reader.say("zero_optimization.stage", 0, Verdict.IGNORED, "nothing is partitioned")
    for path, value in reader.leave("zero_optimization").items():
        if ".offload_" in path and value not in (None, "none", False) and path.endswith("device"):
            reader.say(path, value, Verdict.NONE, "nothing is off-loaded")
        else:
            reader.say(path, value, Verdict.IGNORED, "it belongs to ZeRO")


def _communication(reader: Reader, found: Migration) -> None:
    kind = reader.take("communication_data_type")
    if kind is None:
        return
    full = {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16", "fp16": "bf16"}.get(str(kind).lower())
    if full is None:
        raise ConfigRefused(f"communication_data_type = {shown(kind)}: must be fp32, fp16 or bf16")
    words = f"full_exchange={full!r}" + (
        ": 16 bits are bfloat16 here, which does not overflow" if kind == "fp16" else ""
    )
    found.options["full_exchange"] = full
    reader.say("communication_data_type", kind, Verdict.TAKEN, words)


def _elasticity(reader: Reader, found: Migration) -> None:
    given = reader.block("elasticity")
    if given is None:
        return
    if given.get("enabled") is not False:
        for name, here in (("min_gpus", "min"), ("max_gpus", "max")):
            if (value := reader.number(f"elasticity.{name}", least=1, whole=True)) is not None:
                limit = min(MOST_WORKERS, found.global_batch or MOST_WORKERS) if here == "max" else value
                found.workers[here] = most = min(value, limit)
                more = f", no more than samples in its batch and {MOST_WORKERS}" if value > most else ""
                words = f"workers.{here}: {most} in a job file{more}"
                reader.say(f"elasticity.{name}", value, Verdict.TAKEN, words)
    why = "a job keeps its global batch with any number of workers (docs/elasticity.md)"
    for path, value in reader.leave("elasticity").items():
        reader.say(path, value, Verdict.IGNORED, why)
