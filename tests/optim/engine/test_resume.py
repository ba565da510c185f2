"""A loaded run is bit-equal to the run that saved and went on: in every phase, for every optimizer, on all ranks."""

import copy
import io

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import CLASSES, COMPRESSED, FREEZING, bits, make
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.engine.state import error_memories, replicated

FREEZE = 5
DENSE_STEPS = (4,)
SAVED_AT = {"warm-up": 3, "at the freeze": FREEZE, "compressed": 7}
BETWEEN_SYNCS = {"between syncs": 10, "in a long round": 15}


def network(seed, dtype=torch.float32):
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))  # noqa: E731
    return seeded(seed, layers).to(dtype)


def two_groups(net):
    shared = {"betas": (0.9, 0.99), "eps": 1e-8}
    return [
        {"params": list(net[0].parameters()), "lr": 1e-2, "weight_decay": 0.1, **shared},
        {"params": list(net[2].parameters()), "lr": 3e-3, "weight_decay": 0.0, **shared},
    ]


def train(net, optimizer, steps, rank):
    dtype = next(net.parameters()).dtype
    for _ in range(steps):
        step = optimizer.num_steps + 1
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        (net(x.to(dtype)).float() - torch.sin(x[:, :3] * 2)).square().mean().backward()
        optimizer.step()


def everything(optimizer):
    """All that the next step depends on, and that a rank can see."""
    s = optimizer.vectors
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    local = s.of_round() if not optimizer.at_sync else ()
    return bits(optimizer.space.p_N, *replicated(s).values(), *errors, *local)


def told(optimizer):
    """The small values beside the vectors."""
    rates = [group["lr"] for group in optimizer.param_groups]
    floored = optimizer.stats().get("floored_elements")
    return optimizer.num_steps, optimizer.frozen_at, optimizer.saved, rates, floored


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


VARIANTS = {
    "": {},
    "narrow": {"bucket_elements": 64, "narrow": ("variance", "error_memory")},
    "narrow variance": {"bucket_elements": 64, "narrow": ("variance",)},
    "narrow errors": {"bucket_elements": 64, "narrow": ("error_memory",)},
    "refreshing": {
        "bucket_elements": 64,
        "narrow": ("variance", "error_memory"),
        "warmup": "auto",
        "total_steps": 40,
        "full_exchange": "fp32",
    },
    "node first": {"bucket_elements": 64, "block": 64, "topology": "node_first"},
}
"""What may follow the name of an optimizer. Refreshing: frozen by itself at step 8, brought up to date from then on."""
REFRESHING = {"before a refresh": 10, "at a refresh": 12, "after refreshes": 18}
CASES = [
    *((name, phase, step) for name in FREEZING for phase, step in SAVED_AT.items()),
    *(("zero_one_adam", phase, step) for phase, step in BETWEEN_SYNCS.items()),
    *((name, "dense", step) for name in CLASSES if name not in COMPRESSED for step in DENSE_STEPS),
    ("onebit_muon", "compressed", 7),
    *(("onebit_adam, narrow", phase, step) for phase, step in SAVED_AT.items()),
    ("onebit_adam, narrow variance", "compressed", 7),
    ("onebit_adam, narrow errors", "compressed", 7),
    *(("onebit_adam, refreshing", phase, step) for phase, step in REFRESHING.items()),
    *((f"{name}, node first", phase, step) for name in COMPRESSED for phase, step in SAVED_AT.items()),
]


def variant(name, param_groups, group, **more):
    """As written_out.make, of a name that may have a variant behind it."""
    name, _, which = name.partition(", ")
    if which == "node first":
        more.pop("full_exchange", None)  # 8 bits have no way there
    return make(name, param_groups, group, **{"warmup": FREEZE, **VARIANTS[which], **more})


@pytest.mark.few(2)
@every_value(
    {
        "name, phase, saved_at": CASES,
        "size, how, weights_first": [
            (3, "state_dict", True),
            (2, "rank_state_dict", True),
            (2, "state_dict", False),
            (3, "rank_state_dict", True),
            (1, "rank_state_dict", True),
        ],
        "dtype": [torch.float32, torch.bfloat16],
        "more": [{}, {"bucket_elements": 64, "full_exchange": "int8"}, {"bucket_elements": 64, "overlap": True}],
    },
    only=(1, 3, 8, 9, 11, 12, 16, 21, 22, 27),
)
@pytest.mark.law
def test_a_loaded_run_is_bit_equal_to_the_run_that_saved_and_went_on(
    name, phase, saved_at, size, how, weights_first, dtype, more
):
    """Also in bfloat16, the masters included. A share is saved without a collective, and changes nothing."""
    of_one, boxes = how == "rank_state_dict", (0, 0, 1, 1) if "node first" in name else None
    size = len(boxes) if boxes else size

    def work(group):
        net, beside = network(0, dtype), network(0, dtype)
        optimizer, unsaved = (variant(name, two_groups(one), group, **more) for one in (net, beside))
        for one, of in ((net, optimizer), (beside, unsaved)):
            train(one, of, saved_at, group.rank)
        assert optimizer.at_sync == (phase not in BETWEEN_SYNCS)
        collectives = group.stats.collectives
        saved = through_a_file(getattr(optimizer, how)())
        if of_one:
            assert group.stats.collectives == collectives
            assert list(saved["share"]) == [f"{group.rank} of {size}"]
        weights = through_a_file(net.state_dict())
        at_save = bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())

        other = network(9, dtype)
        resumed = variant(name, two_groups(other), group, **more)
        train(other, resumed, 14, group.rank)  # it has a past of its own; 0/1 Adam's is in the middle of a round
        loads = [lambda: other.load_state_dict(weights), lambda: resumed.load_state_dict(saved)]
        for load in loads if weights_first else reversed(loads):
            load()
        assert torch.equal(everything(resumed), everything(optimizer))
        for steps in (1, 1, 8):
            for one, of in ((net, optimizer), (other, resumed), *([(beside, unsaved)] if of_one else [])):
                train(one, of, steps, group.rank)
            assert torch.equal(everything(resumed), everything(optimizer))
            assert torch.equal(bits(*other.parameters()), bits(*net.parameters()))
            known = 2 if "refreshing" in name else None  # the automatic rule looks at a norm when somebody asks for it
            assert told(resumed)[:known] == told(optimizer)[:known]
            assert not of_one or torch.equal(everything(unsaved), everything(optimizer))
        return at_save, optimizer.frozen_at

    (first, frozen_at), *others = run_threads(size, work, boxes=boxes)
    assert of_one or all(torch.equal(first, other) for other, _ in others)
    if "refreshing" in name:
        assert frozen_at == 8 or "full_exchange" in more  # 8 bits put it off
    else:
        assert frozen_at == (FREEZE if name.partition(",")[0] in FREEZING else None)


AUTO = {
    "onebit_adam": lambda params, group: OneBitAdam(params, lr=1e-4, betas=(0.9, 0.9), group=group),
    "onebit_lamb": lambda params, group: OneBitLamb(params, lr=1e-4, betas=(0.9, 0.9), group=group),
    "zero_one_adam": lambda params, group: construct(
        ZeroOneAdam, params, lr=1e-4, betas=(0.9, 0.9), local_step_scaler=4, group=group
    ),
}


def train_smoothly(net, optimizer, steps, rank):
    """Large batches of one kind at a small rate: the variance is stable before long."""
    for _ in range(steps):
        x = torch.randn(64, 7, generator=torch.Generator().manual_seed(1000 * (optimizer.num_steps + 1) + rank))
        optimizer.zero_grad()
        (net(x) - x[:, :3]).square().mean().backward()
        optimizer.step()


@every_value({"size": [1, 2, 3], "name": AUTO}, only=(1,))
def test_a_run_loaded_before_the_automatic_freeze_freezes_at_the_same_step(name, size):
    def work(group):
        net = network(seed=0)
        optimizer = AUTO[name](net.parameters(), group)
        train_smoothly(net, optimizer, 7, group.rank)
        assert optimizer.frozen_at is None
        saved, weights = through_a_file(optimizer.state_dict()), through_a_file(net.state_dict())

        other = network(seed=9)
        resumed = AUTO[name](other.parameters(), group)
        other.load_state_dict(weights)
        resumed.load_state_dict(saved)
        for _ in range(60):
            train_smoothly(net, optimizer, 1, group.rank)
            train_smoothly(other, resumed, 1, group.rank)
            assert torch.equal(everything(resumed), everything(optimizer))
            assert resumed.frozen_at == optimizer.frozen_at
        assert resumed.stats() | {"sent_bytes": 0} == optimizer.stats() | {"sent_bytes": 0}
        return optimizer.frozen_at

    frozen_at = run_threads(size, work)
    assert len(set(frozen_at)) == 1
    assert 8 <= frozen_at[0] <= 60


@pytest.mark.few(1)
@every_value(
    {
        "name": COMPRESSED,
        "old, new": [(2, 2), (3, 3), (1, 3), (4, 2)],
        "dtype": [torch.float32, torch.bfloat16],
    },
    only=(1, 3),
)
@pytest.mark.law
def test_t9_replicas_are_bit_equal_1_2_and_10_steps_after_a_resume_in_the_compressed_phase(name, old, new, dtype):
    """All ranks load what rank 0 saved. Steps 8, 9 and 17 are syncs of 0/1 Adam."""
    saved_at = SAVED_AT["compressed"]

    def save(group):
        net = network(0, dtype)
        optimizer = make(name, two_groups(net), group, warmup=FREEZE)
        train(net, optimizer, saved_at, group.rank)
        return through_a_file(optimizer.state_dict()), through_a_file(net.state_dict())

    saved, weights = run_threads(old, save)[0]

    def load(group):
        net = network(group.rank, dtype)
        optimizer = make(name, two_groups(net), group, warmup=FREEZE)
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(saved))
        seen = [bits(*net.parameters())]
        for steps in (1, 1, 8):
            train(net, optimizer, steps, group.rank)
            assert optimizer.at_sync
            seen.append(bits(*net.parameters(), *optimizer.common_vectors().values()))
        return seen

    first, *others = run_threads(new, load)
    assert torch.equal(first[0], bits(*(weights[key] for key in weights)))
    assert not torch.equal(first[1], first[2])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
