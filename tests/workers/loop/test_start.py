"""A run that starts from given weights or from another job's checkpoint: what it goes on with, and what is refused."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.covering import parametrize
from tests.workers.by_hand import build
from tests.workers.loop.test_loop import load, saved
from tests.workers.loop.threads_job import Plan, ThreadsJob, Worker
from tests.workers.small_job import Recording, run_small, small_spec
from thinwire.comm import PeerLost, SoloGroup, run_threads
from thinwire.contract.run_folder import RunFolder
from thinwire.optim import OneBitAdam
from thinwire.workers.checkpoints import CheckpointStore
from thinwire.workers.checkpoints.manifest import folder_of
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.recipes.gpt import GptOverText
from thinwire.workers.session.job import run_job
from thinwire.workers.session.joining import Origin
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Run, Training
from thinwire.workers.telemetry import history
from thinwire.workers.weights import StartRefused, fetch, fill, opened

CPU = torch.device("cpu")
KEPT = {"checkpoint": {"every_steps": 8, "keep": 10}}
DENSE = {"name": "adam", "lr": 4e-3}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The checkpoints of another job, of steps 8, 16 and 24, of two workers."""
    folder = tmp_path_factory.mktemp("other")
    run_small(folder, small_spec(**KEPT), 2)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def weights(other, tmp_path_factory):
    """What `thinwire fetch` makes of it."""
    return fetch(str(other), tmp_path_factory.mktemp("fetched")).path


def alone(spec):
    """What one rank trains with."""
    built = build(spec, SoloGroup(), CPU)
    registered = Registered(built.optimizer)
    registered.add("model", built.model)
    return Training(built.group, CPU, built.optimizer, registered, built.feed)


def final(folder, step=24):
    return load(folder / "checkpoints", step).flat


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [DENSE, {}], ids=["adam", "onebit_adam"])
@parametrize("size", [1, 2, 3], usual=[1])
def test_with_everything_it_goes_on_bit_equal_to_the_job_that_went_on(tmp_path, size, optimizer):
    changes = {**KEPT, **({"optimizer": optimizer} if optimizer else {})}
    first = run_small(tmp_path / "first", small_spec(**changes), size)
    start = {"checkpoints": str(tmp_path / "first" / "checkpoints"), "step": 8}
    second = run_small(tmp_path / "second", small_spec(**changes, start=start), size)
    assert second[0][2][:2] == [("resumed", 0), ("started_from", 8)]
    then = {sample.step: sample for sample in first[0][1]}
    assert [sample.step for sample in second[0][1]] == list(range(9, 25))
    assert all(sample.loss == then[sample.step].loss for sample in second[0][1])
    assert [one.step for one in history.read(RunFolder(tmp_path / "second").history)] == list(range(9, 25))
    assert second[0][1][-1].payload_bytes_total == sum(sample.payload_bytes for sample in second[0][1])
    ours, theirs = final(tmp_path / "second"), final(tmp_path / "first")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    steps = [which.step for which in CheckpointStore(tmp_path / "second" / "checkpoints", 9).sound()]
    assert steps == [8, 16, 24]


@parametrize("name", ["onebit_lamb", "zero_one_adam"], usual=[1])
def test_what_it_goes_on_with_may_have_another_number_of_workers(tmp_path, name):
    optimizer = {"name": name, "lr": 4e-3}
    run_small(tmp_path / "first", small_spec(**KEPT, optimizer=optimizer), 3)
    start = {"checkpoints": str(tmp_path / "first" / "checkpoints")}
    longer = small_spec(**KEPT, optimizer=optimizer, steps=32, start=start)
    (summary, samples, _), *_ = run_small(tmp_path / "second", longer, 2)
    assert [sample.step for sample in samples] == list(range(25, 33))
    assert summary["replicas_bit_equal"]


def test_settings_are_those_of_the_job_that_starts(tmp_path, other):
    optimizer = {"name": "onebit_adam", "lr": 1e-3, "betas": [0.8, 0.95], "weight_decay": 0.1, "warmup": 6}
    spec = small_spec(**KEPT, optimizer=optimizer, global_batch=8, start={"checkpoints": str(other), "step": 16})
    run_small(tmp_path, spec, 2)
    (group,) = load(tmp_path / "checkpoints", 24).plain["optimizer"]["param_groups"]
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0.1)


def by_hand(tmp_path, weights, monkeypatch, size):
    """A run whose model has the weights when its optimizer is made."""
    plain = GptOverText.model

    def loaded(recipe):
        model = plain(recipe)
        model.load_state_dict(load_file(weights))
        return model

    with monkeypatch.context() as patched:
        patched.setattr(GptOverText, "model", loaded)
        run_small(tmp_path, small_spec(seed=3), size)
    return final(tmp_path)


def test_weights_alone_equal_a_model_that_was_loaded_by_hand(tmp_path, other, weights, monkeypatch):
    expected = by_hand(tmp_path / "hand", weights, monkeypatch, 1)
    of_file, of_job = {"weights": str(weights)}, {"checkpoints": str(other), "what": "weights"}
    for index, start in enumerate((of_file, of_job)):
        ((_, samples, events),) = run_small(tmp_path / str(index), small_spec(seed=3, start=start), 1)
        assert [sample.step for sample in samples] == list(range(25))
        assert ("started_from", 0) in events
        found = final(tmp_path / str(index))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_ranks_begin_with_them(tmp_path, weights):
    ((_, one, _),) = run_small(tmp_path / "one", small_spec(steps=8, start={"weights": str(weights)}), 1)
    (summary, three, _), *_ = run_small(tmp_path / "three", small_spec(steps=8, start={"weights": str(weights)}), 3)
    assert summary["replicas_bit_equal"]
    assert three[0].validation_loss == pytest.approx(one[0].validation_loss, abs=1e-5)
    assert three[0].validation_loss < 4.0


def test_a_restart_begins_with_them_again_until_it_has_a_checkpoint_and_then_needs_them_no_more(tmp_path, weights):
    file = tmp_path / "w.safetensors"
    shutil.copy(weights, file)
    spec = small_spec(**KEPT, start={"weights": str(file)})
    first = run_small(tmp_path / "run", spec, 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = run_small(tmp_path / "run", spec, 2)
    assert [s.loss for s in again[0][1]] == [s.loss for s in first[0][1]]
    for step in (8, 16, 24):
        shutil.rmtree(saved(tmp_path / "run" / "checkpoints", step))
    file.unlink()
    third = run_small(tmp_path / "run", spec, 2)
    assert ("started_from", 0) not in third[0][2]
    assert [s.loss for s in third[0][1]] == [s.loss for s in first[0][1]]


def test_a_worker_that_comes_later_shows_the_same_checksum_without_the_file(tmp_path, weights):
    file = tmp_path / "w.safetensors"
    shutil.copy(weights, file)
    spec = small_spec(steps=8, start={"weights": str(file)})
    early = Origin(spec.start, CheckpointStore(tmp_path / "checkpoints", keep=1))
    early.look(alone(spec))
    run_small(tmp_path, spec, 1)
    file.unlink()
    later = Origin(spec.start, CheckpointStore(tmp_path / "checkpoints", keep=1))
    later.look(alone(spec))
    assert later.signed == early.signed != {}
    other = load_file(weights)
    save_file({**other, "head.weight": other["head.weight"] + 1}, file)
    changed = Origin(spec.start, None)
    changed.look(alone(spec))
    assert changed.signed.keys() == early.signed.keys()
    assert changed.signed != early.signed


@pytest.mark.slow
def test_workers_that_die_and_come_train_on_from_the_start(tmp_path, weights, monkeypatch):
    signatures = []
    form = Worker.form

    def noted(worker, step, has_state, signature):
        signatures.append(signature)
        return form(worker, step, has_state, signature)

    monkeypatch.setattr(Worker, "form", noted)
    spec = small_spec(steps=12, start={"weights": str(weights)})
    plan = Plan(kills={0: (1, None), 5: (0, None)}, joins={3: 1})
    job = ThreadsJob(tmp_path, None, 3, plan, spec=spec).run(monkeypatch)
    ended = list(job.ended.values())
    assert len(ended) == 2
    assert torch.equal(*ended)
    assert len({one["start"] for one in signatures}) == 1


# What is refused


def refused(spec, tmp_path, size=1, match=""):
    """A run that is refused by all its ranks, before its first step."""
    found = []

    def work(group):
        reporter = Recording(tmp_path)
        with pytest.raises(StartRefused, match=match) as told:
            run_job(spec, Run(tmp_path, time.time()), FixedRanks(group), CPU, reporter)
        found.append(str(told.value))
        return reporter.samples

    assert run_threads(size, work) == [[]] * size
    return found


@pytest.fixture(scope="module")
def training():
    return alone(small_spec())


def without(name):
    def change(tensors):
        del tensors[name]

    return change


def put(name, change):
    def changed(tensors):
        tensors[name] = change(tensors.get("head.weight"))

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("head.weight"), r"it lacks: head\.weight \[256, 32\]: give weights of this model"),
        (put("lm_head.bias", lambda x: x[0].clone()), r"it has what the model lacks: lm_head\.bias \[32\]"),
        (put("head.weight", lambda x: x[:, :16]), r"other shapes: head\.weight \[256, 16\], the model's \[256, 32\]"),
        (
            put("head.weight", lambda x: x.half()),
            r"other types: head\.weight in F16, the model's F32: make the model in",
        ),
    ],
    ids=["missing", "extra", "shape", "type"],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, training, weights, change, words):
    tensors = load_file(weights)
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "w")
    before = training.optimizer.space.p_N.clone()
    with opened(str(tmp_path / "w")) as given, pytest.raises(StartRefused, match=words):
        fill(training, given)
    assert torch.equal(training.optimizer.space.p_N, before)


def test_many_misfits_are_counted(tmp_path, training):
    save_file({"x": torch.zeros(1)}, tmp_path / "w")
    with (
        opened(str(tmp_path / "w")) as given,
        pytest.raises(StartRefused, match=r"lacks: .*, .*, .* and \d+ more; it has|; has"),
    ):
        fill(training, given)


@pytest.mark.parametrize("kind", ["text", "truncated", "torch.save", "folder", "none", "empty"])
def test_what_is_no_file_of_weights_is_told_as_what_it_is(tmp_path, weights, kind):
    path = tmp_path / "w"
    if kind == "text":
        path.write_text("these are no weights at all")
    elif kind == "truncated":
        path.write_bytes(weights.read_bytes()[:-100])
    elif kind == "torch.save":
        torch.save(load_file(weights), path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    words = {
        "torch.save": "begins like a file of torch.save, which may hold code and is never read",
        "folder": "is a folder: name the file in it",
        "none": "cannot be read on this machine: No such file",
    }.get(kind, "is no whole safetensors file: .*; copy it again")
    with pytest.raises(StartRefused, match=words), opened(str(path)):
        pass


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.head.weight = self.body.weight
        self.norm = torch.nn.BatchNorm1d(3)


def tied(dtype=torch.float32):
    """A model that has tied weights and statistics, and what trains it."""
    model = Tied().to(dtype)
    optimizer = OneBitAdam(model.parameters(), warmup=2)
    registered = Registered(optimizer)
    registered.add("model", model)
    return model, Training(SoloGroup(), CPU, optimizer, registered, MapFeed([0], 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_tensor_is_there_once_or_twice_and_alike(tmp_path, dtype):
    source = Tied().to(dtype)
    source.norm.running_mean += 3
    state = {name: x.clone() for name, x in source.state_dict().items()}
    for left_out in ((), ("head.weight",), ("body.weight",)):
        save_file({name: x for name, x in state.items() if name not in left_out}, tmp_path / "w")
        model, training = tied(dtype)
        with opened(str(tmp_path / "w")) as given:
            fill(training, given)
        assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
        masters = torch.cat([x.view(-1) for x in training.optimizer.space._parameters])
        params = torch.cat([one.param.detach().view(-1) for one in training.optimizer.space.tensors])
        assert torch.equal(masters, params.float())
    save_file({**state, "head.weight": state["head.weight"] + 1}, tmp_path / "w")
    with (
        opened(str(tmp_path / "w")) as given,
        pytest.raises(StartRefused, match=r"different values for body\.weight and head"),
    ):
        fill(tied(dtype)[1], given)


def test_what_the_optimizer_steps_and_no_module_has_cannot_be_given(tmp_path):
    model, training = tied()
    save_file({name: x.clone() for name, x in model.state_dict().items()}, tmp_path / "w")
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))]})
    with (
        opened(str(tmp_path / "w")) as given,
        pytest.raises(StartRefused, match=r"shape \[2, 2\], belong to no module"),
    ):
        fill(training, given)


def test_a_file_that_is_wrong_fails_the_run_alike_on_all_ranks(tmp_path):
    file = tmp_path / "w"
    file.write_text("none")
    spec = small_spec(start={"weights": str(file)})
    assert len(refused(spec, tmp_path / "run", 2, "is no whole safetensors file")) == 2


def test_ranks_with_other_files_do_not_begin(tmp_path, weights):
    changed = load_file(weights)
    save_file({**changed, "head.weight": changed["head.weight"] + 1}, tmp_path / "1.safetensors")
    shutil.copy(weights, tmp_path / "0.safetensors")

    def work(group):
        spec = small_spec(start={"weights": str(tmp_path / f"{group.rank}.safetensors")})
        with pytest.raises(StartRefused, match=r"what rank 1 has read is not what rank 0 has"):
            run_job(spec, Run(tmp_path, time.time()), FixedRanks(group), CPU, Recording(tmp_path))

    run_threads(2, work)


def test_a_rank_that_alone_cannot_read_it_is_the_one_that_fails(tmp_path, weights):
    def work(group):
        place = weights if group.rank == 0 else tmp_path / "none"
        spec = small_spec(start={"weights": str(place)})
        words = "rank 1 cannot begin: .*none cannot be read" if group.rank == 0 else "none cannot be read"
        with pytest.raises(PeerLost if group.rank == 0 else StartRefused, match=words):
            run_job(spec, Run(tmp_path, time.time()), FixedRanks(group), CPU, Recording(tmp_path))

    run_threads(2, work)


@parametrize(
    ("start", "changes", "words"),
    [
        ({"step": 9}, {}, r"no whole checkpoint of step 9, and whole ones of steps 8, 16, 24"),
        ({}, {}, r"is of step 24, and steps = 24: nothing is left to train\. Give more steps"),
        (
            {"step": 8},
            {"recipe": {"layers": 1, "width": 16, "heads": 2, "context": 32}},
            r"other shapes: blocks.0.norm_1.weight \[32\], the model's \[16\]",
        ),
        ({"step": 8}, {"recipe": {"layers": 2, "width": 32, "heads": 2, "context": 32}}, r"it lacks: .*blocks\.1"),
        ({"step": 8}, {"precision": "bfloat16"}, r"other types: .* in F32, the model's BF16"),
        ({"step": 8}, {"optimizer": DENSE}, r"'OneBitAdam': this optimizer needs 'Adam'.*start\.what = weights"),
        ({"what": "weights"}, {"precision": "bfloat16"}, "other types"),
    ],
    ids=["step", "nothing left", "shapes", "layers", "precision", "optimizer", "weights of another type"],
    usual=[0, 2, 5],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, other, start, changes, words):
    refused(small_spec(**changes, start={"checkpoints": str(other), **start}), tmp_path, 2, words)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    start = {"checkpoints": str(tmp_path / "gone"), "job": "other-3f"}
    refused(small_spec(start=start), tmp_path / "a", 1, "job other-3f has saved none there, or it was deleted")
    refused(small_spec(start={"checkpoints": "nowhere://x"}), tmp_path / "b", 1, "cannot open nowhere://x")
    refused(small_spec(start={"job": "other-3f"}), tmp_path / "c", 1, "the service alone knows")


def test_a_checkpoint_that_is_removed_while_it_is_read_is_left_for_another(tmp_path, other, monkeypatch):
    store, removed = tmp_path / "other", []
    shutil.copytree(other, store)
    plain = CheckpointStore.load

    def load_late(self, which, device):
        if which.step == 24 and not removed:
            removed.append(which)
            shutil.rmtree(store / folder_of(which))
        return plain(self, which, device)

    monkeypatch.setattr(CheckpointStore, "load", load_late)
    ((_, samples, events),) = run_small(tmp_path / "run", small_spec(start={"checkpoints": str(store)}), 1)
    assert removed
    assert ("started_from", 16) in events
    assert samples[-1].step == 24
    start = {"checkpoints": str(store), "step": 16}
    shutil.rmtree(store)
    refused(small_spec(start=start), tmp_path / "late", 1, "or it was deleted")
