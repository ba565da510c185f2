"""A Lightning Trainer whose batches are those of a session: a worker that is lost costs it no step.

    with session() as run:
        trainer = lightning.Trainer(max_epochs=3, strategy=SessionStrategy(run))
        trainer.fit(module, DataLoader(dataset, batch_size=64, shuffle=True))

Trainer is alone in its process, and knows nothing of other workers. Its data loader says what a step is: batch_size
samples of a dataset, which the workers share. run.batches() gives out this worker's part, and a step that was lost
again. What Trainer has counted of a lost step is taken back with it, for that is registered with the session; it
neither validates after one nor ends an epoch.

Written against lightning 2.6; needs `lightning`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from thinwire.comm.protocol import Group
from thinwire.integrations.accelerate import mixed
from thinwire.integrations.lightning import ClippedInStep, refuse_averaging, refuse_clipping
from thinwire.integrations.run import Run
from thinwire.optim.engine.optimizer import FlatOptimizer

PROGRESS = {
    "epochs": "epoch_progress",
    "batches": "epoch_loop.batch_progress",
    "schedules": "epoch_loop.scheduler_progress",
    "steps": "epoch_loop.automatic_optimization.optim_progress",
    "manual_steps": "epoch_loop.manual_optimization.optim_step_progress",
}
"""Where Lightning's fit loop counts."""


class SessionStrategy(ClippedInStep, SingleDeviceStrategy):  # type: ignore[misc]
    """One worker of a session. run: what thinwire.train.session gave. settings: of SingleDeviceStrategy.

    Trainer.fit raises a ValueError where configure_optimizers gives anything but one optimizer of thinwire.optim, made
    with `group=self.trainer.strategy.group`, and for what a session cannot keep, with what to say instead.
    """

    strategy_name = "thinwire-session"

    def __init__(self, run: Run, **settings: Any) -> None:
        self.run = run
        self._loader: DataLoader[Any] | None = None
        super().__init__(device=run.device, **settings)

    @property
    def group(self) -> Group:
        """What the optimizer is made over."""
        return self.run.group

    @property
    def is_global_zero(self) -> bool:
        """Is this worker the one that writes? Until the first batch each is."""
        return self.run.rank == 0

    def setup_optimizers(self, trainer: Trainer) -> None:
        """That of configure_optimizers. Raises: ValueError for one that cannot train here, saying what to change."""
        super().setup_optimizers(trainer)
        _refuse_foreign(self.optimizers, self.run.group)
        refuse_clipping(self.optimizers[0], trainer)
        refuse_averaging(self.optimizers[0], trainer)

    def setup(self, trainer: Trainer) -> None:
        """As Lightning's; from here on the session feeds the fit loop. Raises: ValueError."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_settings(trainer)
            loop = trainer.fit_loop.epoch_loop
            if not isinstance(loop, _FedBySession):
                mixed(loop, _FedBySession)
            loop._thinwire_feed = _Feed(trainer, self)

    def process_dataloader(self, dataloader: object) -> object:
        """Of the one to train on: what a step is. Others stay as they are: each worker validates on all of it."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
            raise ValueError(
                f"the train_dataloader is a {type(dataloader).__name__} without a batch_size: give a DataLoader with "
                "dataset and batch_size; the session makes the batches of it"
            )
        self._loader = dataloader
        return _Told(dataloader, trainer)

    @property
    def loader(self) -> DataLoader[Any]:
        """The data loader of the script, which says what a step is."""
        assert self._loader is not None
        return self._loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. The loss is reported, as the mean over all workers."""
        found = super().training_step(*args, **kwargs)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if loss is not None:
            self.run.report(loss=loss)
        return found

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This worker's share: nothing is sent for a checkpoint of Lightning's."""
        return optimizer.rank_state_dict()  # type: ignore[attr-defined, no-any-return]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, of steps that count."""
        if not self.run.step_is_lost:
            super().save_checkpoint(*args, **kwargs)

    def on_validation_end(self) -> None:
        """A validation in training is one of the run: its loss, and what else the module has logged in it."""
        super().on_validation_end()
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or self.run.step_is_lost:
            return
        found = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
        self.run.report(**{f"validation_{_said_of(name)}": value for name, value in found.items()})

    def on_train_end(self) -> None:
        """The run is over where its last step was made."""
        self.run.finish()

    def teardown(self) -> None:
        """As Lightning's, but that model and optimizer stay where they are: the session may save them yet."""
        self.let_precision_plugin_clip()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class _Told:
    """In place of the data loader: how many steps an epoch has. It is never drawn from."""

    def __init__(self, loader: DataLoader[Any], trainer: Trainer) -> None:
        self._loader, self._trainer = loader, trainer

    def __len__(self) -> int:
        dataset = self._loader.dataset
        if hasattr(dataset, "__len__"):
            return math.ceil(len(dataset) / (self._loader.batch_size or 1))
        if self._trainer.max_steps < 1:
            raise ValueError("a train_dataloader whose dataset has no length: say Trainer(max_steps=...)")
        return int(self._trainer.max_steps)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Feed:
    """In place of Lightning's fetcher: the session's batches, none of them drawn ahead."""

    def __init__(self, trainer: Trainer, strategy: SessionStrategy) -> None:
        self._trainer, self.strategy = trainer, strategy
        self._batches: Iterator[Any] | None = None
        self.fetched = 0
        self._start_profiler: Callable[[], None] = _nothing
        self._stop_profiler: Callable[[], None] = _nothing

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._batches is None:
            self._batches = self._begun()
        self._start_profiler()
        try:
            return next(self._batches), self._trainer.fit_loop.epoch_loop.batch_idx + 1, 0
        finally:
            self._stop_profiler()

    @property
    def done(self) -> bool:
        """Is the batch that was given out the last of its epoch?"""
        ready: int = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return bool(ready + 1 >= self._trainer.num_training_batches)

    def _begun(self) -> Iterator[Any]:
        trainer, strategy, loader = self._trainer, self.strategy, self.strategy.loader
        if len(trainer.fit_loop._combined_loader.flattened) > 1:
            raise ValueError("several train_dataloaders: give one, with a dataset of all of them")
        schedules = {f"schedule_{i}": one.scheduler for i, one in enumerate(strategy.lr_scheduler_configs)}
        strategy.run.register(
            module=strategy.lightning_module,
            optimizer=strategy.optimizers[0],
            trainer=_Counted(trainer),
            **schedules,
        )
        epochs = trainer.max_epochs * trainer.num_training_batches if trainer.max_epochs > 0 else math.inf
        steps = min(epochs, trainer.max_steps if trainer.max_steps > 0 else math.inf)
        if steps == math.inf:
            raise ValueError("Trainer(max_epochs=-1, max_steps=-1): a session has an end; say one of them")
        seed = os.environ.get("PL_GLOBAL_SEED")  # of lightning.seed_everything()
        return strategy.run.batches(
            loader.dataset,
            global_batch=loader.batch_size,
            steps=int(steps),
            shuffle=_is_shuffled(loader),
            seed=None if seed is None else int(seed),
            loader={name: getattr(loader, name) for name in KEPT if getattr(loader, name)},
        )


KEPT = ("collate_fn", "num_workers", "pin_memory", "prefetch_factor", "timeout", "worker_init_fn")
"""What the session's loader takes from the script's."""


class _FedBySession:
    """Mixed into Lightning's loop over an epoch."""

    _thinwire_feed: _Feed

    @property
    def done(self) -> bool:
        """As Lightning's. After a lost step never: it comes again."""
        return not self._thinwire_feed.strategy.run.step_is_lost and super().done  # type: ignore[misc]

    def run(self, data_fetcher: Any) -> None:
        """As Lightning's, over the session's batches. Raises: ValueError for a training_step that draws them itself."""
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError("training_step(self, dataloader_iter): in a session the batch is given: take `batch`")
        super().run(self._thinwire_feed)  # type: ignore[misc]

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """As Lightning's. After a lost step never."""
        lost = self._thinwire_feed.strategy.run.step_is_lost
        return not lost and super()._should_check_val_fx(data_fetcher)  # type: ignore[misc]


class _Counted:
    """What a step changes of a trainer: taken back with a step that is lost, given to workers that come later."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """For the session."""
        callbacks = self._trainer.callbacks
        return {
            "progress": {name: one.state_dict() for name, one in self._progress().items()},
            "stepped": self._trainer.fit_loop.epoch_loop._batches_that_stepped,
            "callbacks": {one.state_key: one.state_dict() for one in callbacks if not isinstance(one, Checkpoint)},
            "saved": [getattr(one, "_last_global_step_saved", 0) for one in self._trainer.checkpoint_callbacks],
        }

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """What state_dict() gave, here or on another worker."""
        for name, one in self._progress().items():
            one.load_state_dict(given["progress"][name])
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = given["stepped"]
        for callback in self._trainer.callbacks:
            if given["callbacks"].get(callback.state_key):
                callback.load_state_dict(given["callbacks"][callback.state_key])
        for checkpoint, step in zip(self._trainer.checkpoint_callbacks, given["saved"], strict=True):
            checkpoint._last_global_step_saved = step

    def _progress(self) -> dict[str, Any]:
        found = {}
        for name, where in PROGRESS.items():
            one = self._trainer.fit_loop
            for part in where.split("."):
                one = getattr(one, part)
            found[name] = one
        return found


def _refuse_foreign(optimizers: list[Optimizer], group: Group) -> None:
    """Raises: ValueError for anything but one optimizer of thinwire.optim over the session's group."""
    kinds = ", ".join(type(one).__name__ for one in optimizers)
    if len(optimizers) != 1 or not isinstance(optimizers[0], FlatOptimizer):
        raise ValueError(
            f"configure_optimizers gave {kinds or 'no optimizer'}: in a session there is one, of thinwire.optim (Adam "
            "is the uncompressed one); give it all parameters"
        )
    if optimizers[0].group.size != group.size:
        raise ValueError(
            f"{kinds} exchanges with {optimizers[0].group.size} ranks, and the session has {group.size}: make it in "
            "configure_optimizers, with group=self.trainer.strategy.group"
        )


def _refuse_settings(trainer: Trainer) -> None:
    wrong = {
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "make the batch_size of the loader larger"),
        "ckpt_path": (trainer.ckpt_path, None, "the session goes on from its own checkpoints: leave it out"),
        "overfit_batches": (trainer.overfit_batches, 0.0, "give a smaller dataset"),
        "reload_dataloaders_every_n_epochs": (trainer.reload_dataloaders_every_n_epochs, 0, "leave it out"),
    }
    for name, (value, usual, remedy) in wrong.items():
        if value != usual:
            raise ValueError(f"{name} = {value!r} inside of a session: {remedy}")


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    """Raises: ValueError for an order that is the loader's own."""
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, SequentialSampler):
        return False
    if isinstance(loader.sampler, RandomSampler):
        return True
    raise ValueError(
        f"the train_dataloader has a {type(loader.sampler).__name__}: in a session the order of the samples follows "
        "from a seed, so that workers may come and go: say shuffle=True or shuffle=False"
    )


def _said_of(name: str) -> str:
    """What a metric of a validation is called, without the word that it is one of a validation."""
    return re.sub(r"^(validation|valid|val)[_/. -]", "", name) or name


def _nothing() -> None:
    pass
