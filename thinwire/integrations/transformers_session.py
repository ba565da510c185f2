"""A Hugging Face Trainer whose batches are those of a session: a worker that is lost costs it no step.

    with session() as run:
        trainer = with_thinwire(Trainer(model, args, ...), OneBitAdam, run=run)
        trainer.train()

Trainer is alone in its process, and knows nothing of other workers. Its data loader is run.batches(), which gives out
this worker's share, and a step that was lost again. What Trainer itself has counted of a lost step is taken back with
it, for that is registered with the session; what it would do after the step (log, evaluate, stop) is left out.

Called by with_thinwire of thinwire.integrations.transformers.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from thinwire.integrations.accelerate import own_optimizer
from thinwire.integrations.run import Run

OVERRIDDEN = (
    "_get_collator_with_removed_columns",
    "_get_num_items_in_batch",
    "_init_training_state",
    "_save_checkpoint",
    "get_batch_samples",
    "get_train_dataloader",
    "set_initial_training_values",
    "training_step",
)
"""Methods of Trainer that this file builds on, beside those of thinwire.integrations.transformers."""

COUNTED = ("global_step", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")
"""Of TrainerState: what a step changes."""
ORDERED_BY = ("get_train_dataloader", "_get_train_sampler")
"""Methods of Trainer by which a subclass says which samples are a step's."""
OF_THE_CLOCK = ("epoch", "_runtime", "_per_second", "_time")
"""Ends of the names of what Trainer says of an evaluation beside what it has found."""


class FedBySession:
    """Mixed into a Trainer, in front of TrainsTogether: where batches come from, and how many there are."""

    args: Any
    control: Any
    train_dataset: Any
    loss_is_scaled_for_ga: bool | None
    _thinwire_run: Run
    _thinwire_by_tokens: bool

    def get_train_dataloader(self) -> Any:
        """The session's batches."""
        return _Batches(self)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, int, int, int, int]:
        """As Trainer: (epochs, steps of one, samples, samples of the run, of a step, batches of an epoch, steps).

        To Trainer the run is one epoch: it counts in a loop's variable how far an epoch has come, which cannot be taken
        back. Raises: ValueError where the number of steps is not known.
        """
        size, known = args.per_device_train_batch_size, hasattr(self.train_dataset, "__len__")
        if args.max_steps <= 0 and not known:
            raise ValueError(
                f"TrainingArguments(max_steps={args.max_steps}) and a train_dataset without a length: say max_steps"
            )
        samples = len(self.train_dataset) if known else args.max_steps * size
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * samples / size)
        return 1, sys.maxsize, samples, steps * size, size, math.ceil(samples / size), steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer. Where no batch is left, as in a run that was over when it was started again, it stops."""
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if not found[0]:
            self.control.should_training_stop = True
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer. The loss is reported, as the mean over all workers."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._thinwire_run.report(loss=loss)
        return loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer. At least 1: the loss of a share that has no token to be learned is 0, and not 0 / 0."""
        found = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        return found.clamp(min=1) if isinstance(found, torch.Tensor) else found

    def _weigh(self, batch: Any) -> Any:
        """How many tokens the loss of this share is a mean over; None where it is one over samples."""
        if self.loss_is_scaled_for_ga is False:
            return None
        return super()._get_num_items_in_batch([batch], torch.device("cpu"))  # type: ignore[misc]

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer. Raises: ValueError where it would go on from a checkpoint of its own."""
        found = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if found != (0, 0):
            raise ValueError(
                "train(resume_from_checkpoint=...) inside of a session, which goes on from its own checkpoints: leave "
                "it out"
            )
        return found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Nothing: the session saves, also what Trainer has counted."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer, of a run that is over."""
        self._thinwire_run.finish()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _bring_together(self) -> None:
        """Nothing: outside of step() a session sends nothing."""


class _Batches:
    """What Trainer takes for a data loader. It has no length, and is not accelerate's: those are drawn ahead."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        trainer, args = self._trainer, self._trainer.args
        trainer.callback_handler.callbacks.sort(key=lambda one: (isinstance(one, _Last), not isinstance(one, _First)))
        run: Run = trainer._thinwire_run
        run.register(
            model=trainer.model,
            optimizer=own_optimizer(trainer.optimizer),
            schedule=trainer.lr_scheduler,
            trainer=_Counted(trainer),
            **_moved_by_callbacks(trainer),
        )
        loader = {
            "collate_fn": trainer._get_collator_with_removed_columns(trainer.data_collator, "training"),
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        return run.batches(
            trainer.train_dataset,
            global_batch=args.per_device_train_batch_size,
            steps=trainer.state.max_steps,
            shuffle=args.train_sampling_strategy != "sequential",
            weigh=trainer._weigh if trainer._thinwire_by_tokens else None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            loader={name: value for name, value in loader.items() if value},
        )


class _Counted:
    """What a step changes of a trainer: taken back with a step that is lost, given to workers that come later.

    Beside Trainer's state these are the numbers, and lists and dicts of numbers, among its attributes that training has
    changed, whichever class keeps them there: so does TRL with the metrics that it averages for its log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before = _numbers_of(trainer)

    def state_dict(self) -> dict[str, Any]:
        """For the session."""
        trainer = self._trainer
        numbers = _numbers_of(trainer)
        return {
            "state": {name: getattr(trainer.state, name) for name in COUNTED},
            "logged": len(trainer.state.log_history),
            "loss": trainer._tr_loss,
            "numbers": {name: x for name, x in numbers.items() if self._before.get(name) != x},
            "callbacks": {type(one).__name__: one.state()["attributes"] for one in self._stateful()},
        }

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """What state_dict() gave, here or on another worker."""
        trainer = self._trainer
        for name, value in given["state"].items():
            setattr(trainer.state, name, value)
        del trainer.state.log_history[given["logged"] :]
        trainer._tr_loss.copy_(given["loss"])
        for name, x in {**self._before, **given["numbers"]}.items():
            setattr(trainer, name, _put_into(getattr(trainer, name, None), x))
        for one in self._stateful():
            for name, value in given["callbacks"].get(type(one).__name__, {}).items():
                setattr(one, name, value)

    def _stateful(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _numbers_of(trainer: Any) -> dict[str, Any]:
    """Copies of its attributes that are numbers, and dicts and lists of nothing else."""
    return {name: _copied(value) for name, value in vars(trainer).items() if _is_of_numbers(value)}


def _is_of_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_of_numbers(item) for key, item in value.items())
    if isinstance(value, list | deque):
        return all(map(_is_of_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | deque) else value


def _put_into(there: Any, value: Any) -> Any:
    """The value, in the containers that are there: a defaultdict stays one, and who holds it sees it."""
    if isinstance(there, dict) and isinstance(value, dict):
        filled = {key: _put_into(there.get(key), item) for key, item in value.items()}
        there.clear()
        there.update(filled)
        return there
    if isinstance(there, list | deque) and isinstance(value, list):
        there.clear()
        there.extend(value)
        return there
    return _copied(value)


def _moved_by_callbacks(trainer: Any) -> dict[str, torch.nn.Module]:
    """Modules that callbacks hold, to move them: an average of the weights, a reference model that follows (TRL)."""
    return {
        f"{type(one).__name__} {number}, {name}": value
        for number, one in enumerate(trainer.callback_handler.callbacks)
        for name, value in vars(one).items()
        if isinstance(value, torch.nn.Module) and value is not trainer.model
    }


class _First(TrainerCallback):  # type: ignore[misc]
    """Called before all others of a trainer: says where the run is, whatever this process has seen of it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Which worker is the first is known from the first batch on, and changes."""
        state.is_world_process_zero = state.is_local_process_zero = self._trainer._thinwire_run.rank == 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer counts batches that were drawn here: with those of lost steps, without those drawn earlier."""
        dataset = self._trainer.train_dataset
        of_epoch = len(dataset) / args.per_device_train_batch_size if hasattr(dataset, "__len__") else state.max_steps
        state.epoch = state.global_step / of_epoch


class _Last(TrainerCallback):  # type: ignore[misc]
    """Called after all others: what they have asked for after a lost step, they will ask for again."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing follows a lost step, nor does a checkpoint of Trainer's any."""
        control.should_save = False
        if self._trainer._thinwire_run.step_is_lost:
            control.should_log = control.should_evaluate = False
            control.should_epoch_stop = control.should_training_stop = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As on_step_end."""
        control.should_save = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """An evaluation in training is one of the run: its loss, and what else compute_metrics has found."""
        trainer = self._trainer
        if not trainer.is_in_train or trainer._thinwire_run.step_is_lost:
            return
        found = {name: x for name, x in (metrics or {}).items() if isinstance(x, float | int)}
        wanted = {name: x for name, x in found.items() if not name.endswith(OF_THE_CLOCK)}
        trainer._thinwire_run.report(**{f"validation_{name.removeprefix('eval_')}": x for name, x in wanted.items()})


def feed(trainer: Any, run: Run) -> None:
    """Let the session feed the trainer, before train(). Modifies its callbacks and arguments.

    Raises: ValueError for TrainingArguments that cannot be kept, with what to say instead.
    """
    args = trainer.args
    wrong = {
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps > 1,
            "a step is one batch of per_device_train_batch_size samples, which the workers share: make that larger",
        ),
        "load_best_model_at_end": (args.load_best_model_at_end, "the session keeps the checkpoints: leave it out"),
        "eval_strategy": (_word(args.eval_strategy) == "epoch", 'say "steps", and eval_steps'),
        "train_sampling_strategy": (
            args.train_sampling_strategy not in ("random", "sequential"),
            'the session draws the samples: say "random" or "sequential"',
        ),
        "save_strategy": (_word(args.save_strategy) == "best", "the session keeps the checkpoints: leave it out"),
    }
    for name, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise ValueError(f"TrainingArguments({name}={_word(getattr(args, name))!r}) inside of a session: {remedy}")
    for name in ORDERED_BY:
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            raise ValueError(
                f"{type(trainer).__name__}.{name} says which samples are a step's, and inside of a session that does: "
                "leave run= out"
            )
    # A collective of Trainer's, that a lost worker would fail: the session weighs each share by its tokens.
    trainer._thinwire_by_tokens, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    trainer._thinwire_run = run
    trainer.add_callback(_First(trainer))
    trainer.add_callback(_Last(trainer))


def _word(value: Any) -> Any:
    return getattr(value, "value", value)
