"""An Accelerate loop with one more line, two ranks over gloo: trains as AdamW under DDP, sends less, resumes equally.

All runs are made once, by two processes.
"""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing
from tests.once import once

RUNS = """
import contextlib, json
from pathlib import Path
from tests.integrations.hugging_face import prepare_environment
prepare_environment(rank, size)
join()
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType
from torch.nn.parallel import DistributedDataParallel
from thinwire.comm import SoloGroup
from thinwire.integrations.accelerate import with_thinwire
from thinwire.integrations.shares import own_state, share_file
from thinwire.optim import Adam, LocalSteps, OneBitAdam, ZeroOneAdam, ZeroOneSchedule

gc.freeze()  # modules are no garbage, and are not to be looked through for some
told = {}
torch.manual_seed(0)
X = torch.randn(96, 12)
Y = torch.tanh(X @ torch.randn(12, 6)) @ torch.randn(6, 3)

def fresh(**given):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **given)

def net(seed=0):
    torch.manual_seed(seed + rank)
    return torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.Tanh(), torch.nn.Linear(48, 3))

def weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])

def everywhere(x):
    others = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(others, x)
    return all(torch.equal(x, other) for other in others)

def prepared(accelerator, make, seed=0, factor=0.97):
    model = net(seed)
    optimizer = make(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
    return accelerator.prepare(model, optimizer, loader, schedule)

def epochs(accelerator, model, optimizer, loader, schedule, count, clip=None, norms=None):
    losses = []
    for _ in range(count):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    if norms is not None:
                        norms.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses

def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)

def adam(params, **given):
    return Adam(params, lr=1e-2, weight_decay=0.1, **given)

def onebit(params, **given):
    return OneBitAdam(params, lr=1e-2, warmup=12, **given)

def refused(do):
    try:
        do()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"

# 1. Adam and AdamW: accumulation over a number of batches that it does not divide, clipping, bfloat16
for name, given, clip in (
    ("plain", dict(gradient_accumulation_steps=5), 0.4), ("bf16", dict(mixed_precision="bf16"), None)
):
    theirs = fresh(**given)
    parts = prepared(theirs, adamw)
    their_norms, our_norms = [], []
    their_losses = epochs(theirs, *parts, 2, clip, their_norms)
    ours = with_thinwire(fresh(**given))
    own = prepared(ours, adam)
    our_losses = epochs(ours, *own, 2, clip, our_norms)
    told[name] = {
        "wrapped": [isinstance(parts[0], DistributedDataParallel), isinstance(own[0], DistributedDataParallel)],
        "apart": (weights(parts[0]) - weights(own[0])).abs().max().item(),
        "moved": (weights(own[0]) - weights(net() if rank == 0 else own[0])).abs().max().item(),
        "losses": [their_losses, our_losses],
        "rates": [parts[3].get_last_lr(), own[3].get_last_lr()],
        "replicas": everywhere(weights(own[0])),
        "norms": [their_norms, our_norms],
        "bound_after": own[1].optimizer.max_grad_norm,
    }

# 2. every collective of torch.distributed: ours are all there are
from torch.profiler import ProfilerActivity, profile

def collectives(accelerator, parts):
    before = parts[1].optimizer.stats()["sent_bytes"] if hasattr(parts[1].optimizer, "stats") else 0
    model, optimizer, loader, _ = parts
    batch = next(iter(loader))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        accelerator.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    names = [event.key for event in seen.key_averages() if event.key.startswith("gloo:") for _ in range(event.count)]
    after = parts[1].optimizer.stats()["sent_bytes"] if hasattr(parts[1].optimizer, "stats") else 0
    return sorted(names), after - before

theirs, ours = fresh(), None
told["ddp_collectives"] = collectives(theirs, prepared(theirs, adamw))
ours = with_thinwire(fresh())
parts = prepared(ours, onebit)
told["warmup_collectives"] = collectives(ours, parts)
epochs(ours, *parts, 2)
told["collectives"] = collectives(ours, parts)
told["elements"] = parts[1].optimizer.space.p_N.numel()

# 3. 1-bit Adam: a state saved in the compressed phase, and the run that goes on from it
accelerator = with_thinwire(fresh())
parts = prepared(accelerator, onebit, factor=0.99)
losses = epochs(accelerator, *parts, 2)
accelerator.save_state(os.path.join(folder, "state"))
losses += epochs(accelerator, *parts, 4)
final = weights(parts[0])
accelerator = with_thinwire(fresh())
parts = prepared(accelerator, onebit, seed=9, factor=0.99)
accelerator.load_state(os.path.join(folder, "state"))
again = epochs(accelerator, *parts, 4)
theirs = fresh()
told["onebit"] = {
    "losses": losses, "again": again, "adamw": epochs(theirs, *prepared(theirs, adamw, factor=0.99), 6),
    "resumed_equal": torch.equal(final, weights(parts[0])), "replicas": everywhere(final),
    "phase": parts[1].optimizer.stats()["phase"],
}

# 4. each rank saves its share; another number of ranks brings them together
accelerator = with_thinwire(fresh())
parts = prepared(accelerator, onebit)
parts[1].optimizer.saves = "rank"
epochs(accelerator, *parts, 2)
before = parts[1].optimizer.stats()["sent_bytes"]
accelerator.save_state(os.path.join(folder, "shares"))
told["shares_sent"] = parts[1].optimizer.stats()["sent_bytes"] - before
accelerator.wait_for_everyone()
epochs(accelerator, *parts, 1)
final = weights(parts[0])
accelerator = with_thinwire(fresh())
parts = prepared(accelerator, onebit, seed=2)
parts[1].optimizer.saves = "rank"
accelerator.load_state(os.path.join(folder, "shares"))
file = Path(folder, "shares", "optimizer.bin")
parts[1].optimizer.saves = "together"
whole = parts[1].state_dict()["residuals"]["momentum_error"]
alone = OneBitAdam(net().parameters(), group=SoloGroup())
found = own_state(file, torch.load(file, weights_only=True), alone)["residuals"]["momentum_error"]
told["shares_apart"] = [(whole - found).norm().item(), whole.norm().item()]
accelerator.load_state(os.path.join(folder, "shares"))
epochs(accelerator, *parts, 1)
told["shares_equal"] = torch.equal(final, weights(parts[0]))
os.rename(share_file(file, 1, 2), str(file) + ".away") if rank == 1 else None
accelerator.wait_for_everyone()
accelerator.load_state(os.path.join(folder, "shares"))  # rank 0's share is whole but for R
epochs(accelerator, *parts, 1)
told["one_share"] = [everywhere(weights(parts[0])), torch.equal(final, weights(parts[0]))]

# 5. overlap under accumulation
found = []
for overlap in (True, False):
    accelerator = with_thinwire(fresh(gradient_accumulation_steps=2))
    parts = prepared(accelerator, lambda params: onebit(params, overlap=overlap))
    epochs(accelerator, *parts, 4)
    found.append(weights(parts[0]))
    if overlap:
        told["overlapped"] = parts[1].optimizer.stats()["overlapped"]["in_backward"]
        told["overlap_clip"] = refused(lambda: accelerator.clip_grad_norm_(parts[0].parameters(), 1.0))
told["overlap_equal"] = torch.equal(*found)

# 6. a step that all leave out holds the schedule too, with a scaler and without
for name in ("skip", "scaler"):
    accelerator = with_thinwire(fresh())
    if name == "scaler":  # Accelerate makes one on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parts = prepared(accelerator, lambda params: adam(params, **({"non_finite": "skip"} if name == "skip" else {})))
    model, optimizer, loader, schedule = parts
    rates, kept = [], None
    for step, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y)
        before = weights(model).clone()
        accelerator.backward(loss * (torch.inf if step == 2 and rank == 1 else 1.0))
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
        if step == 2:
            kept = torch.equal(before, weights(model))
        optimizer.zero_grad()
        if step == 4:
            break
    told[name] = {"rates": rates, "kept": kept, "replicas": everywhere(weights(model)),
                  "skipped": optimizer.optimizer.stats()["steps_skipped"]}

# 7. 0/1 Adam between two syncs, and local steps in a round: what is saved is not one rank's
from safetensors.torch import load_model
short = dict(lr=1e-2, var_freeze_step=3, schedule=ZeroOneSchedule(local_step_scaler=1, local_step_clipper=16))
for name, make in {
    "zero": lambda params: ZeroOneAdam(params, **short),
    "local": lambda params: LocalSteps(torch.optim.AdamW(params, lr=1e-2), every=5, overlap=True),
}.items():
    accelerator = with_thinwire(fresh())
    parts = prepared(accelerator, make, factor=1.0)
    model, optimizer, loader, _ = parts
    for step, (x, y) in enumerate(loader):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step > 6 and not optimizer.optimizer.at_sync:
            break
    apart = not everywhere(weights(model))
    accelerator.save_state(os.path.join(folder, name))
    loaded = net()
    load_model(loaded, os.path.join(folder, name, "model.safetensors"))
    told[name] = [apart, everywhere(weights(model)), torch.equal(weights(loaded), weights(model))]

# 8. what is refused, and by what words
def two_optimizers():
    accelerator = with_thinwire(fresh())
    first, second = net(), net()
    accelerator.prepare(first, adam(first.parameters()), second, adam(second.parameters()))
    accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)

def with_parts(do):
    accelerator = with_thinwire(fresh())
    return refused(lambda: do(accelerator, prepared(accelerator, adam)))

def forgotten(accelerator):
    model, other = net(), net()
    accelerator.prepare(other, adam(other.parameters()))
    model = accelerator.prepare(model)
    accelerator.backward(model(X).sum())

def teacher():
    accelerator = with_thinwire(fresh())
    taught, teaches = net(), net(5)
    accelerator.prepare(taught, teaches, adam(taught.parameters()))
    return everywhere(weights(teaches))

told["teacher"] = teacher()

def from_adamw():
    theirs, ours = fresh(), with_thinwire(fresh())
    parts = prepared(theirs, adamw)
    epochs(theirs, *parts, 1)
    torch.save(parts[1].state_dict(), os.path.join(folder, f"adamw{rank}"))
    prepared(ours, adam)[1].load_state_dict(torch.load(os.path.join(folder, f"adamw{rank}")))

def too_late():
    accelerator = fresh()
    prepared(accelerator, adamw)
    with_thinwire(accelerator)

def alone():
    prepared(with_thinwire(fresh()), lambda params: adam(params, group=SoloGroup()))

def hooked():
    with_thinwire(fresh(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]))

def joined(accelerator, parts):
    with accelerator.join_uneven_inputs([parts[0]]):
        pass

def averaged_locally(accelerator, parts):
    with LocalSGD(accelerator=accelerator, model=parts[0], local_sgd_steps=4):
        pass

def reads(accelerator):
    model = net()
    model.adapters = type("AdaLoraModel", (torch.nn.Identity,), {"__module__": "peft.tuners"})()
    model, optimizer = accelerator.prepare(model, onebit(model.parameters()))
    accelerator.backward(model(X).sum())
    optimizer.step()

# Contexts that assume a wrapper, or might: each trains as without it.
def in_contexts(entered):
    accelerator = with_thinwire(fresh())
    model, optimizer, loader, _ = prepared(accelerator, onebit)
    for step, (x, y) in enumerate(loader):
        with entered(accelerator, model):
            loss = torch.nn.functional.mse_loss(model(x), y)
        with accelerator.no_sync(model):
            accelerator.backward(loss / 2, retain_graph=True)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)

plain = in_contexts(lambda accelerator, model: contextlib.nullcontext())
told["contexts"] = [
    torch.equal(in_contexts(entered), plain)
    for entered in (
        lambda accelerator, model: accelerator.autocast(),
        lambda accelerator, model: accelerator.profile(),
        lambda accelerator, model: accelerator.split_between_processes([1, 2]),
        lambda accelerator, model: accelerator.main_process_first(),
        lambda accelerator, model: LocalSGD(accelerator, model, 4, enabled=False),
    )
]
theirs = fresh()
parts = prepared(theirs, adamw)
averaged_locally(theirs, parts)  # as ever, without with_thinwire

told["refused"] = {
    "not_an_accelerator": refused(lambda: with_thinwire(net())),
    "torch_optimizer": refused(lambda: prepared(with_thinwire(fresh()), adamw)),
    "too_late": refused(too_late),
    "alone": refused(alone),
    "hooked": refused(hooked),
    "adamw": refused(from_adamw),
    "wrapped": refused(lambda: with_thinwire(fresh()).prepare(DistributedDataParallel(net()))),
    "forgotten": refused(lambda: forgotten(with_thinwire(fresh()))),
    "values": with_parts(lambda accelerator, parts: accelerator.clip_grad_value_(parts[0].parameters(), 1.0)),
    "part": with_parts(lambda accelerator, parts: accelerator.clip_grad_norm_(parts[0][0].parameters(), 1.0)),
    "norm_type": with_parts(lambda accelerator, parts: accelerator.clip_grad_norm_(parts[0].parameters(), 1.0, 1)),
    "max_norm": with_parts(lambda accelerator, parts: accelerator.clip_grad_norm_(parts[0].parameters(), 0.0)),
    "uneven": with_parts(joined),
    "local_sgd": with_parts(averaged_locally),
    "reader": refused(lambda: reads(with_thinwire(fresh()))),
    "two": refused(two_optimizers),
}
import resource
told["cpu_s"] = resource.getrusage(resource.RUSAGE_SELF).ru_utime
say("told", json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What rank 0 saw of all runs."""
    if importlib.util.find_spec("accelerate") is None:
        missing("accelerate is not installed: pip install accelerate")

    def make(folder):
        ranks = start(RUNS, 2, folder, timeout_s=60)
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
        both = [json.loads(said(folder, rank, "told")) for rank in range(2)]
        assert both[0]["refused"] == both[1]["refused"]
        return both[0]

    return once(tmp_path_factory, "accelerate", make)


@pytest.mark.few(1)
@pytest.mark.parametrize("run", ["plain", "bf16"])
def test_adam_in_accelerate_is_adamw_under_ddp_to_rounding(told, run):
    here = told[run]
    assert here["wrapped"] == [True, False]
    assert here["replicas"]
    assert here["moved"] > 0.02
    assert here["apart"] < 1e-4 * here["moved"]
    assert here["losses"][1] == pytest.approx(here["losses"][0], rel=1e-4)
    assert here["rates"][1] == pytest.approx(here["rates"][0])


def test_clipping_is_of_the_mean_and_of_that_step_alone(told):
    theirs, ours = told["plain"]["norms"]
    assert max(theirs) > 0.4  # something was clipped, or the weights would not say how
    assert len(ours) == len(theirs)
    assert all(norm > 0 for norm in ours)
    assert told["plain"]["bound_after"] is None


def test_nothing_is_sent_but_what_the_optimizer_counts(told):
    theirs, _ = told["ddp_collectives"]
    assert theirs == ["gloo:all_reduce"]
    warmup, warmup_bytes = told["warmup_collectives"]
    assert warmup == ["gloo:all_gather", "gloo:all_reduce"]  # the second step compares what ranks hold, too
    assert warmup_bytes == pytest.approx(4 * told["elements"], rel=0.1)
    compressed, sent = told["collectives"]
    assert "gloo:all_reduce" not in compressed
    assert sent < warmup_bytes / 8


def test_a_state_saved_in_the_compressed_phase_is_gone_on_from_bit_for_bit(told):
    here = told["onebit"]
    assert here["phase"] == "compressed"
    assert here["replicas"]
    assert here["resumed_equal"]
    assert here["again"] == here["losses"][-len(here["again"]) :]


def test_shares_are_saved_without_a_byte_and_serve_any_number_of_ranks(told):
    assert told["shares_sent"] == 0
    assert told["shares_equal"]
    apart, norm = told["shares_apart"]
    assert norm > 0
    assert apart < 1e-5 * norm
    assert told["one_share"] == [True, False]


def test_onebit_adam_ends_where_adamw_does(told):
    here = told["onebit"]
    ours, theirs = (sum(run[-12:]) / 12 for run in (here["losses"], here["adamw"]))
    assert ours < 0.5 * here["losses"][0]
    assert ours < 1.5 * theirs


def test_overlap_waits_for_the_last_micro_batch_and_refuses_to_clip_late(told):
    assert told["overlap_equal"]
    assert told["overlapped"] > 0
    assert re.search("max_grad_norm=1.0 and leave this line out", told["overlap_clip"])


def test_a_model_that_no_optimizer_trains_is_rank_0s(told):
    assert told["teacher"]


@pytest.mark.parametrize("run", ["skip", "scaler"])
def test_a_step_that_all_ranks_leave_out_holds_the_schedule_too(told, run):
    here = told[run]
    assert here["kept"]
    assert here["replicas"]
    assert here["skipped"] == 1
    assert here["rates"][2] == here["rates"][1]
    assert here["rates"][4] < here["rates"][3] < here["rates"][2]


def test_local_steps_and_zero_one_adam_are_saved_where_ranks_agree(told):
    assert told["zero"] == told["local"] == [True, True, True]


def test_every_context_of_an_accelerator_trains_as_without_it(told):
    assert told["contexts"] == [True] * 5


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("not_an_accelerator", "TypeError.*received Sequential.*accelerate.Accelerator"),
        ("torch_optimizer", "received AdamW.*use an optimizer of thinwire.optim"),
        ("too_late", "has prepared 1 models and 1 optimizers.*before accelerator.prepare"),
        ("alone", "2 processes.*Adam exchanges with 1.*make the Accelerator"),
        ("hooked", "comm_hook='fp16'.*leave it out"),
        ("adamw", "of an optimizer of torch.optim.*begin the optimizer anew"),
        ("wrapped", "in DistributedDataParallel.*give it the model itself"),
        ("forgotten", "Sequential has gradients.*accelerator.prepare.model, optimizer"),
        ("values", "clip_grad_value_.*use accelerator.clip_grad_norm_"),
        ("part", "received 2 of the 4 parameters.*give it all"),
        ("norm_type", "norm_type = 1.*2-norm"),
        ("max_norm", "max_norm = 0.0: must be above 0"),
        ("uneven", "even_batches=True"),
        ("local_sgd", "LocalSGD.local_sgd_steps=4.*leave it out"),
        ("reader", 'AdaLoraModel.*gradients = "mean"'),
        ("two", "2 optimizers.*once for each"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(told, what, words):
    assert re.search(words, told["refused"][what] or "nothing was raised")
