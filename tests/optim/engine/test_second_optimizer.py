"""What another optimizer trains beside ours, and drifts apart between ranks, is said; nothing else is."""

import copy

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import Adam, OneBitAdam, ZeroOneAdam

OURS = {
    "adam": Adam,
    "adam, overlap": lambda p, **k: construct(Adam, p, overlap=True, **k),
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, warmup=3, **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, dense_steps=2, var_freeze_step=4, local_step_scaler=3, **k
    ),
}


class Muon(torch.optim.Optimizer):
    """As people write it: a step along the orthogonal factor of the momentum."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                m = state["m"] = state.get("m", torch.zeros_like(param)).lerp(param.grad, 0.1)
                u, _, vh = torch.linalg.svd(m, full_matrices=False)
                param.sub_(u @ vh, alpha=group["lr"])


def trained(ours, theirs, ranks=3, steps=4, with_model=True, before_step=lambda model, group: None, first=False):
    """A net whose matrix has an optimizer of its own, theirs(params); the rest is trained by ours."""

    def work(group):
        model = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2)))
        matrix = [model[0].weight]
        rest = [param for param in model.parameters() if param is not matrix[0]]
        mine = ours(rest, group=group, **({"model": model} if with_model else {}))
        other = theirs(matrix)
        for step in range(steps):
            mine.zero_grad()
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))
            model(x).square().mean().backward()
            before_step(model, group)
            for one in (other, mine) if first else (mine, other):
                one.step()

    run_threads(ranks, work)


def lines(caplog):
    return [line for line in caplog.messages if "replicas_differ" in line]


@every_value({"ours": OURS, "theirs": [Muon, torch.optim.AdamW], "with_model": [True, False]})
def test_a_second_optimizers_parameters_that_drift_apart_are_said_in_the_second_step(ours, theirs, with_model, caplog):
    trained(OURS[ours], theirs, with_model=with_model)
    (line,) = lines(caplog)
    name = "'0.weight'" if with_model else "'parameter 0, (9, 6)'"
    assert f"step=1: {theirs.__name__} (1) steps parameters that ranks do not hold alike" in line
    assert f"1 of 1, the first is {name} on ranks [1, 2]" in line
    assert "as a parameter group of its own" in line


@every_value({"ours": OURS, "steps": [1, 3], "with_model": [True, False]})
def test_of_one_that_steps_before_ours_it_is_said_in_the_first_step(ours, steps, with_model, caplog):
    trained(OURS[ours], torch.optim.AdamW, with_model=with_model, steps=steps, first=True)
    (line,) = lines(caplog)
    assert "step=0: AdamW (1) steps parameters that ranks do not hold alike" in line
    trained(Adam, torch.optim.AdamW, before_step=averaged, first=True, ranks=1)
    assert len(lines(caplog)) == 1


def averaged(model, group):
    group.mean_(model[0].weight.grad)


def test_who_averages_the_gradients_by_hand_is_told_nothing(caplog):
    trained(Adam, Muon, before_step=averaged)
    assert not lines(caplog)


def test_what_each_rank_has_otherwise_or_alone_is_told_nothing(caplog):
    """A probe that one rank trains, and parts that are another one on each rank."""

    def work(group):
        net = seeded(0, lambda: torch.nn.Linear(6, 2))
        mine = Adam(net.parameters(), group=group)
        own = torch.nn.Linear(2, 3 + group.rank)
        others = [torch.optim.SGD(own.parameters(), lr=0.1)]
        if group.rank == 1:
            others.append(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()))
        for step in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))
            mine.zero_grad()
            net(x).square().mean().backward()
            own(x[:, :2]).square().mean().backward()
            for other in (mine, *others):
                other.step()

    run_threads(3, work)
    assert not lines(caplog)


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, lambda params: Nothing(params)])
def test_what_the_model_names_as_each_rank_s_own_is_told_nothing(theirs, caplog):
    trained(Adam, theirs, before_step=named_as_own)
    assert not lines(caplog)


def named_as_own(model, group):
    model._ddp_params_and_buffers_to_ignore = ["0.weight"]
    with torch.no_grad():
        model[0].weight += group.rank


class Nothing:
    """An optimizer that is none."""

    def __init__(self, params):
        pass

    def step(self):
        pass


def test_two_optimizers_of_thinwire_are_told_nothing(caplog):
    def work(group):
        model = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2)))
        first = Adam(model[0].parameters(), group=group, model=model)
        second = OURS["zero_one_adam"](model[1].parameters(), group=group, model=model)
        for step in range(8):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))
            first.zero_grad()
            second.zero_grad()
            model(x).square().mean().backward()
            first.step()
            second.step()

    run_threads(2, work)
    assert not lines(caplog)


def test_what_is_trained_by_hand_is_said_where_the_model_is_known(caplog):
    def by_hand(model, group):
        with torch.no_grad():
            model[0].weight -= 0.1 * model[0].weight.grad

    trained(Adam, Nothing, before_step=by_hand)
    (line,) = lines(caplog)
    assert "model= has parameters that no optimizer steps, and that ranks do not hold alike" in line


@pytest.mark.slow  # torch.compile is slow to import
def test_a_step_of_torch_can_be_compiled_beside_ours():
    model = torch.nn.Linear(3, 2)
    run_threads(2, lambda group: Adam(copy.deepcopy(model).parameters(), group=group))
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    torch.compile(theirs.step, backend="eager")()
    assert not torch.equal(model.weight, before)


IN_PROCESSES = """
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from thinwire.optim import Adam, OneBitAdam
import logging
join()
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("thinwire").addHandler(Kept())

def refused(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "was not"

def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))

def uneven():
    model = layers()
    with Join([Adam(model.parameters())]):
        pass

def sharded():
    model = layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OneBitAdam, lr=1e-3, warmup=4)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

say("join", refused(uneven))
say("zero", refused(sharded))

# ZeroRedundancyOptimizer of AdamW beside ours: its parameters are averaged by hand, and equal after each step.
torch.manual_seed(0)
model = torch.nn.Sequential(layers(), torch.nn.Linear(4, 2))
mine = Adam(model[1].parameters(), model=model)
other = ZeroRedundancyOptimizer(model[0].parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
for step in range(14):
    mine.zero_grad(), other.zero_grad()
    model(torch.randn(4, 4, generator=torch.Generator().manual_seed(7 * step + rank))).square().sum().backward()
    for param in model[0].parameters():
        dist.all_reduce(param.grad)
    mine.step(), other.step()
say("beside", [line for line in lines if "replicas_differ" in line])

# async_save, whose thread has collectives of its own on the default group, beside steps
import torch.distributed.checkpoint as checkpoint
def trained(where):
    model = layers()
    optimizer, saving = OneBitAdam(model.parameters(), lr=1e-2, warmup=3), None
    for step in range(14):
        optimizer.zero_grad()
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(7 * step + rank))).square().sum().backward()
        optimizer.step()
        if step == 5:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saving = checkpoint.async_save(state, checkpoint_id=where) if where else None
    if saving is not None:
        saving.result()
    return torch.cat([param.detach().flatten() for param in model.parameters()])
say("saved", torch.equal(trained(os.path.join(folder, "saved")), trained(None)))
say("files", len(os.listdir(os.path.join(folder, "saved"))))
dist.destroy_process_group()
"""


def test_what_torch_distributed_puts_around_an_optimizer_is_refused_in_a_sentence(tmp_path):
    ranks = start(IN_PROCESSES, 2, tmp_path, timeout_s=60)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert "Give every rank as many batches" in said(tmp_path, rank, "join")
        assert "without ZeroRedundancyOptimizer" in said(tmp_path, rank, "zero")
        assert said(tmp_path, rank, "beside") == "[]"
        assert said(tmp_path, rank, "saved") == "True"
        assert int(said(tmp_path, rank, "files")) > 1
