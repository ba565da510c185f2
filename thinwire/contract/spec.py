"""What a user asks for: TrainSpec, a recipe of ours; ScriptSpec, a script of the user's own. Torch-free.

The contract between the service and the workers: every default of a job lives here, those of hyperparameters in
hyperparameters.py. The world size never changes the mathematics: the global batch is fixed by the spec and each
worker's share is derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from thinwire.contract import labels, script, start, stores, tracking
from thinwire.contract.fields import Fraction, Frozen, Impossible, StepsOrFraction, Whole, refuse
from thinwire.contract.job_names import LABEL
from thinwire.contract.labels import Labels
from thinwire.contract.optimizers import (
    CadaSpec,
    Freezing,
    FullExchange,
    LocalStepsSpec,
    OneBitAdamSpec,
    OneBitLambSpec,
    OneBitSgdSpec,
    Optimizer,
    SketchedSgdSpec,
    TrustRatio,
    ZeroOneAdamSpec,
)
from thinwire.contract.script import ScriptRecipe
from thinwire.contract.start import Start
from thinwire.contract.tracking import Tracking

_Channels = Annotated[Whole, Field(ge=1, le=4096)]
MOST_WORKERS = 4096
LARGEST_STEP = 10**9
_Steps = Annotated[Whole, Field(ge=1, le=LARGEST_STEP)]
_Samples = Annotated[Whole, Field(ge=1, le=10**6)]
WorkerCount = Annotated[Whole, Field(ge=1, le=MOST_WORKERS)]
"""A number of workers that a job may ask for, at its submission or later. Not a text, nor true, which would be 1."""


class TextRecipe(Frozen):
    """What every transformer over windows of bytes has."""

    name: str
    layers: Whole = Field(5, ge=1, le=96)
    width: Whole = Field(192, ge=8, le=16384, description="model width; a multiple of heads")
    heads: Whole = Field(6, ge=1, le=256)
    context: Whole = Field(128, ge=2, le=65536, description="bytes in one training window")


class GptRecipe(TextRecipe):
    """A byte-level GPT: pre-norm blocks, learned positions, untied head, vocabulary of 256 bytes."""

    name: Literal["gpt"] = "gpt"


class BertRecipe(TextRecipe):
    """A byte-level BERT: post-norm blocks, learned positions, tied head, 256 bytes and a mask, 15 % of them masked."""

    name: Literal["bert"]


class ResnetRecipe(Frozen):
    """A small ResNet with group norms: three stages of basic blocks over grey images of 8x8."""

    name: Literal["resnet"]
    widths: tuple[_Channels, _Channels, _Channels] = Field((32, 64, 128), description="channels of each stage")
    blocks: Whole = Field(2, ge=1, le=64, description="basic blocks in each stage")
    shift: Whole = Field(1, ge=0, le=3, description="a training image is moved by up to so many pixels, each way")


class PythonStdlib(Frozen):
    """The source code of the Python standard library of the worker's interpreter: real text on every machine."""

    source: Literal["python-stdlib"] = "python-stdlib"
    validation_fraction: Fraction = 0.1


class TextFile(Frozen):
    """One file of bytes; its tail is the validation part."""

    source: Literal["text-file"]
    path: str = Field(min_length=1, description="absolute path, readable by every worker")
    validation_fraction: Fraction = 0.1

    def parts(self, size: int) -> tuple[int, int]:
        """Bytes of the training and of the validation part of a file of `size`."""
        validation = round(size * self.validation_fraction)
        return size - validation, validation


class Digits(Frozen):
    """scikit-learn's handwritten digits: 1797 real grey images of 8x8 in ten classes. Needs `thinwire[vision]`."""

    source: Literal["digits"]
    validation_fraction: Fraction = 1 / 3


class LrSchedule(Frozen):
    """Linear warm-up, then cosine to `final_fraction` of the peak (or constant)."""

    warmup: StepsOrFraction = Field(0.05)
    decay: Literal["cosine", "constant"] = "cosine"
    final_fraction: float = Field(0.1, ge=0.0, le=1.0)


Shadow = Literal["nothing", "rows", "replica"]
"""The values of comm.keeps.Keeps."""


def _shadow_of_before(value: object) -> object:
    """Job files of earlier versions have true, for the replica, or false."""
    return {True: "replica", False: "nothing"}[value] if isinstance(value, bool) else value


class Workers(Frozen):
    """How many workers, and on what. One worker a GPU where there are GPUs, else one CPU each."""

    min: WorkerCount = 1
    max: WorkerCount = 1
    per_box: Whole = Field(
        1,
        ge=1,
        le=64,
        description="processes of a worker, on one machine, each with a GPU or a CPU: more than 1 for a model that is "
        "sharded over them; a worker is then a box, and min and max count boxes",
    )
    device: Literal["auto", "cpu", "gpu"] = "auto"
    max_restarts: Whole = Field(3, ge=0, le=1000, description="restarts from the checkpoint after a worker is lost")
    elastic: Literal["in_place", "restart"] = Field(
        "in_place",
        description="in_place: survivors keep their processes when workers come or go; restart: Ray Train's own way, "
        "everybody starts again from the checkpoint",
    )
    shadow: Annotated[Shadow, BeforeValidator(_shadow_of_before)] = Field(
        "rows",
        description="what workers keep of each other's error memory, so that a death loses less of it. rows: what "
        "crossed last, from which it is estimated; replica: the server error of the one before, exactly, for half as "
        "many bytes again; nothing",
    )
    grace_s: float = Field(
        30.0,
        gt=0.0,
        le=86400.0,
        description="how long a worker that is asked to stop (preemption, drain) has to hand over",
    )


class Checkpoint(Frozen):
    """When the job saves, and how many checkpoints it keeps. It resumes from the newest by default."""

    every_steps: Whole = Field(50, ge=1)
    keep: Whole = Field(2, ge=1, le=100)
    store: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="where: an absolute folder, or a URL that fsspec or pyarrow opens; null: the run's folder",
    )


class Network(Frozen):
    """Which way the workers of the job speak to each other."""

    interface: str | None = Field(
        None,
        min_length=1,
        max_length=15,
        pattern=r"^[^\s/]+$",
        description="the network interface, of this name on every machine; null: the one of the machine's address in "
        "the cluster",
    )


class Kueue(Frozen):
    """Where Kueue, on Kubernetes, is to admit the job: it waits there for quota, as a whole."""

    queue: str = Field(min_length=1, max_length=63, pattern=LABEL, description="name of a LocalQueue")
    priority: str | None = Field(
        None, min_length=1, max_length=63, pattern=LABEL, description="name of a WorkloadPriorityClass"
    )
    elastic: bool = Field(
        False,
        description="the job grows and shrinks by workload slices, which Kueue must have turned on "
        "(ElasticJobsViaWorkloadSlices); without it the job has workers.max pods from its beginning to its end",
    )


class Evaluation(Frozen):
    """When the validation loss is taken, on the same fixed samples each time; always at the start and at the end."""

    every_steps: Whole = Field(25, ge=1)
    windows: Whole = Field(64, ge=1, le=65536, description="validation samples: windows of text, or images")


def _priority(given: object) -> object:
    """A word for it is a number too."""
    return {"low": -10, "normal": 0, "high": 10}.get(given, given) if isinstance(given, str) else given


def _gpt_unless_named(recipe: object) -> object:
    """A recipe without a name is a GPT. pydantic takes no default for a discriminator."""
    return {"name": "gpt", **recipe} if isinstance(recipe, Mapping) else recipe


Recipe = Annotated[
    Annotated[GptRecipe | BertRecipe | ResnetRecipe, Field(discriminator="name")], BeforeValidator(_gpt_unless_named)
]
Data = Annotated[PythonStdlib | TextFile | Digits, Field(discriminator="source")]


class JobSpec(Frozen):
    """What every training job has, with a recipe of ours or a script."""

    name: str = Field("job", min_length=1, max_length=63, pattern=LABEL)
    seed: Whole = Field(0, ge=0, lt=2**31)
    steps: _Steps | None
    global_batch: _Samples | None
    bucket_elements: Whole | None = Field(
        None,
        ge=1 << 16,
        le=1 << 32,
        description="the most that is sent at a time; null: chosen at the start of the run, for the network it finds",
    )
    priority: Annotated[Whole, BeforeValidator(_priority)] = Field(
        0,
        ge=-100,
        le=100,
        description="in the service's queue: the higher starts first; low is -10, normal 0, high 10. No job that "
        "trains is stopped for another",
    )
    labels: Labels = Field(
        default_factory=dict,
        description="by which jobs are found again, such as {team: vision}; they may change later, and are no part of "
        "what the run is",
    )
    # By a factory: a default that is an object cannot be read by generators of clients, and says what the object's
    # own fields say.
    workers: Workers = Field(default_factory=Workers)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    start: Start | None = Field(
        None, description="given weights, or a checkpoint of another job; null: the job begins with fresh values"
    )
    network: Network = Field(default_factory=Network)
    tracking: Tracking = Field(default_factory=Tracking)
    kueue: Kueue | None = Field(None, description="where the launcher is kuberay; null: the job waits in no queue")


class TrainSpec(JobSpec):
    """One training job of a recipe of ours. YAML or JSON; unknown fields are refused."""

    steps: _Steps = Field(description="optimizer steps")
    global_batch: _Samples = Field(description="samples in one step, over all workers")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the parameters; the optimizer keeps float32 masters of bfloat16 ones"
    )
    overlap: bool = Field(
        True, description="send gradients while backward still runs, wherever the optimizer's step allows it"
    )
    topology: Literal["flat", "node_first", "auto"] = Field(
        "flat",
        description="flat: every worker exchanges with every other. node_first: exactly inside a machine, compressed "
        "between machines, where there are several, with as many workers each, at least two, and else flat, as the log "
        "says. auto: the same, also for an optimizer that has no such exchange",
    )
    recipe: Recipe = Field(default_factory=GptRecipe, description="default: a GPT")
    data: Data = Field(default_factory=PythonStdlib, description="default: the Python standard library's source")
    optimizer: Optimizer
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    evaluation: Evaluation = Field(default_factory=Evaluation)

    @property
    def warmup_steps(self) -> int | None:
        """Uncompressed steps before the compressed phase; None where there is no such phase, or it is found (auto)."""
        if isinstance(self.optimizer, Freezing) and self.optimizer.warmup != "auto":
            return steps_of(self.optimizer.warmup, self.steps)
        return None

    @property
    def var_freeze_step(self) -> int | None:
        """The last step at which 0/1 Adam may update its variance; None for any other optimizer, and for auto."""
        if isinstance(self.optimizer, ZeroOneAdamSpec) and self.optimizer.var_freeze != "auto":
            return steps_of(self.optimizer.var_freeze, self.steps)
        return None

    @property
    def lr_warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return steps_of(self.lr_schedule.warmup, self.steps)

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> TrainSpec:
        refuse([*_impossible(self), *_secrets_in(self, info)])
        return self


class ScriptSpec(JobSpec):
    """One training job of a script of the user's own, which says the rest. Unknown fields are refused."""

    steps: _Steps | None = Field(None, description="optimizer steps; null: as many as the script makes")
    global_batch: _Samples | None = Field(None, description="samples in one step; null: the script says")
    recipe: ScriptRecipe

    @model_validator(mode="before")
    @classmethod
    def _not_of_ours(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            refuse([(name, given[name], words) for name, words in _OF_THE_SCRIPT.items() if name in given])
        return given

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> ScriptSpec:
        refuse([*_impossible_anywhere(self), *script.impossible(self.recipe), *_secrets_in(self, info)])
        return self


_OF_THE_SCRIPT = {
    name: f"left out with recipe.name = script: the script {does}"
    for name, does in {
        "optimizer": "makes its own optimizer",
        "data": "opens its own data",
        "lr_schedule": "makes its own schedule",
        "evaluation": "says when it evaluates, by run.evaluate_every",
        "precision": "chooses the type of its parameters",
        "overlap": "tells its optimizer",
        "topology": "tells its optimizer",
    }.items()
}


def _kind(given: object) -> str:
    """Which of both a spec is, by the name of its recipe; what is neither is read as one of ours."""
    recipe = given.get("recipe") if isinstance(given, Mapping) else getattr(given, "recipe", None)
    name = recipe.get("name") if isinstance(recipe, Mapping) else getattr(recipe, "name", None)
    return "ScriptSpec" if name == "script" else "TrainSpec"


AnySpec = Annotated[
    Annotated[TrainSpec, Tag("TrainSpec")] | Annotated[ScriptSpec, Tag("ScriptSpec")], Discriminator(_kind)
]
"""What POST /v1/jobs takes. The tags are the names of the schemas."""
_ANY = TypeAdapter[TrainSpec | ScriptSpec](AnySpec)


def read_spec(given: object) -> TrainSpec | ScriptSpec:
    """The spec of a job, of either kind. Raises pydantic.ValidationError."""
    return _ANY.validate_python(given)


def read_accepted(given: object) -> TrainSpec | ScriptSpec:
    """The same of a job that a service has taken. What is a secret an earlier version may have seen otherwise: such a
    job goes on. Raises pydantic.ValidationError.
    """
    return _ANY.validate_python(given, context=_ACCEPTED)


_ACCEPTED = {"accepted": True}


def steps_of(amount: int | float, total: int) -> int:
    """Steps named by `amount`: itself if an int, else that fraction of `total`, at least 1."""
    return amount if isinstance(amount, int) else max(1, round(amount * total))


WorkersConflict = Literal["min_above_max", "more_workers_than_samples"]


def conflicts_of_workers(least: int, most: int, global_batch: int | None) -> set[WorkersConflict]:
    """What limits on the number of workers contradict, at a submission or later; which field is to blame differs.

    global_batch: None where only a script knows it.
    """
    found: set[WorkersConflict] = set()
    if least > most:
        found.add("min_above_max")
    if global_batch is not None and most > global_batch:
        found.add("more_workers_than_samples")
    return found


def uneven_boxes(samples: int, per_box: int, numbers: Iterable[int]) -> int | None:
    """The first of these numbers of boxes over whose processes so many samples are not shared out alike; None: there
    is none. FSDP weighs the shares of a box's processes alike.
    """
    return None if per_box == 1 else next((number for number in numbers if samples % (number * per_box)), None)


def _impossible_workers(spec: JobSpec) -> list[Impossible]:
    found: list[Impossible] = []
    conflicts = conflicts_of_workers(spec.workers.min, spec.workers.max, spec.global_batch)
    if "min_above_max" in conflicts:
        found.append(("workers.min", spec.workers.min, f"at most workers.max = {spec.workers.max}"))
    if "more_workers_than_samples" in conflicts:
        found.append(
            ("global_batch", spec.global_batch, f"at least one sample a worker: workers.max = {spec.workers.max}")
        )
    return found


def _impossible_boxes(spec: JobSpec) -> list[Impossible]:
    """Of workers that are boxes."""
    size = spec.workers.per_box
    if size == 1:
        return []
    found: list[Impossible] = []
    if isinstance(spec, TrainSpec):
        found.append(("workers.per_box", size, "1 with a built-in recipe, which shards no model; write a script"))
    if spec.workers.elastic == "restart":
        found.append(("workers.per_box", size, "1 with workers.elastic = restart; or say in_place"))
    if spec.start is not None:
        found.append(("workers.per_box", size, "1 with start, which fills whole models; load it in the script"))
    least, most = spec.workers.min, spec.workers.max
    uneven = None if spec.global_batch is None else uneven_boxes(spec.global_batch, size, range(least, most + 1))
    if uneven is not None:
        words = (
            f"a multiple of workers.per_box = {size} times each number of boxes from workers.min = {least} to "
            f"workers.max = {most}, which it is not with {uneven}; or let both be the same, and a job that has lost a "
            "box waits for another"
        )
        found.append(("global_batch", spec.global_batch, words))
    return found


def _impossible_anywhere(spec: JobSpec) -> list[Impossible]:
    """Of a job of either kind."""
    found = [*_impossible_workers(spec), *_impossible_boxes(spec)]
    store = spec.checkpoint.store
    if store is not None and (words := stores.misplaced(store)):
        found.append(("checkpoint.store", store, words))
    if spec.start is not None:
        found += start.impossible(spec.start)
    return [*found, *tracking.impossible(spec.tracking)]


def _secrets_in(spec: JobSpec, info: ValidationInfo) -> list[Impossible]:
    """What everybody who may see the job would read of it; of a job that was accepted nothing is asked."""
    recipe = spec.recipe if isinstance(spec, ScriptSpec) else None
    if info.context is _ACCEPTED:
        return []
    return [*labels.secrets_in(spec.labels), *script.secrets_in(spec.checkpoint.store, spec.start, recipe)]


def _impossible(spec: TrainSpec) -> list[Impossible]:
    """Fields that are each in range and cannot stand together."""
    found = _impossible_anywhere(spec)
    recipe = spec.recipe
    if isinstance(recipe, TextRecipe) and recipe.width % recipe.heads:
        found.append(("recipe.width", recipe.width, f"a multiple of recipe.heads = {recipe.heads}"))
    if isinstance(recipe, ResnetRecipe) != isinstance(spec.data, Digits):
        fitting = "digits" if isinstance(recipe, ResnetRecipe) else "python-stdlib or text-file"
        found.append(("data.source", spec.data.source, f"{fitting} with recipe.name = {recipe.name}"))
    warmup = spec.warmup_steps
    if warmup is not None and warmup >= spec.steps:
        found.append(("optimizer.warmup", warmup, f"fewer than steps = {spec.steps}, or nothing would be compressed"))
    freeze = spec.var_freeze_step
    if freeze is not None and freeze >= spec.steps > 1:
        found.append(
            ("optimizer.var_freeze", freeze, f"fewer than steps = {spec.steps}, or no step would ever be left out")
        )
    if isinstance(spec.optimizer, Freezing) and spec.steps < 2:
        found.append(
            ("steps", spec.steps, "at least 2 with optimizer.warmup = auto: one uncompressed step and one compressed")
        )
    if isinstance(spec.optimizer, ZeroOneAdamSpec) and spec.steps < 2:
        found.append(
            (
                "steps",
                spec.steps,
                "at least 2 with optimizer.name = zero_one_adam: the variance is frozen before the last",
            )
        )
    adam = spec.optimizer
    if isinstance(adam, OneBitAdamSpec) and (adam.error_memory or adam.variance) and spec.topology != "flat":
        name = "variance" if adam.variance else "error_memory"
        found.append(("topology", spec.topology, f"flat with optimizer.{name} = bf16"))
    if spec.topology == "node_first" and isinstance(adam, FullExchange) and adam.full_exchange == "int8":
        found.append(("topology", spec.topology, "flat or auto with optimizer.full_exchange = int8"))
    sgd = spec.optimizer
    if isinstance(sgd, OneBitSgdSpec) and sgd.nesterov and (not sgd.momentum or sgd.dampening):
        allowed = "false, or optimizer.momentum above 0 and optimizer.dampening = 0"
        found.append(("optimizer.nesterov", sgd.nesterov, allowed))
    if isinstance(sgd, OneBitSgdSpec) and sgd.codec != "sign" and spec.topology == "node_first":
        found.append(("topology", spec.topology, "flat or auto with optimizer.codec = " + sgd.codec))
    if isinstance(sgd, SketchedSgdSpec):
        if sgd.rows % 2 == 0:
            found.append(("optimizer.rows", sgd.rows, "odd, for the median of so many estimates is taken"))
        if spec.topology == "node_first":
            found.append(("topology", spec.topology, "flat or auto with optimizer.name = sketched_sgd"))
    bounds = spec.optimizer
    if isinstance(bounds, TrustRatio) and bounds.min_coeff > bounds.max_coeff:
        found.append(("optimizer.min_coeff", bounds.min_coeff, f"at most optimizer.max_coeff = {bounds.max_coeff}"))
    if isinstance(bounds, OneBitLambSpec) and bounds.factor_min > bounds.factor_max:
        found.append(("optimizer.factor_min", bounds.factor_min, f"at most optimizer.factor_max = {bounds.factor_max}"))
    local = spec.optimizer
    if isinstance(local, LocalStepsSpec):
        if local.every > spec.steps:
            found.append(
                ("optimizer.every", local.every, f"at most steps = {spec.steps}, or workers would exchange nothing")
            )
        if local.parts > local.every:
            words = f"at most optimizer.every = {local.every}, one part a step"
            found.append(("optimizer.parts", local.parts, words))
        if local.inner.full_exchange is not None:
            words = "left out: inside of local steps no gradient is sent; optimizer.codec says how moves are"
            found.append(("optimizer.inner.full_exchange", local.inner.full_exchange, words))
        if spec.topology == "node_first":
            found.append(("topology", spec.topology, "flat or auto with optimizer.name = local_steps"))
    if isinstance(local, CadaSpec) and spec.topology == "node_first":
        found.append(("topology", spec.topology, "flat or auto with optimizer.name = cada"))
    if spec.lr_warmup_steps > spec.steps:
        found.append(("lr_schedule.warmup", spec.lr_warmup_steps, f"at most steps = {spec.steps}"))
    return found
