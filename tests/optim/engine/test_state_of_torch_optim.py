"""optimizer.state, groups added late, repr and copies: what code written for torch.optim looks at."""

import copy
import io
import pickle

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import (
    SGD,
    Adam,
    Lamb,
    Muon,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
)
from thinwire.optim.regroup import regroup
from thinwire.workers.replicas import replicas_bit_equal

MAKE = {
    "adam": lambda p, **k: construct(Adam, p, lr=1e-2, **k),
    "lamb": lambda p, **k: construct(Lamb, p, lr=1e-2, **k),
    "sgd": lambda p, **k: construct(SGD, p, lr=1e-2, **k),
    "onebit_sgd": lambda p, **k: construct(OneBitSGD, p, lr=1e-2, **k),
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, lr=1e-2, warmup=3, **k),
    "onebit_adam_auto": lambda p, **k: construct(OneBitAdam, p, lr=1e-2, **k),
    "onebit_lamb": lambda p, **k: construct(OneBitLamb, p, lr=1e-2, warmup=3, **k),
    "muon": lambda p, **k: construct(Muon, p, lr=1e-2, **k),
    "onebit_muon": lambda p, **k: construct(OneBitMuon, p, lr=1e-2, **k),
    "zero_one_adam": lambda p, **k: construct(ZeroOneAdam, p, lr=1e-2, var_freeze_step=3, local_step_scaler=2, **k),
}
every_optimizer = pytest.mark.parametrize("name", MAKE)


def network(seed=1):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(seed, make)


def descend(net, optimizer, steps, rank=0):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "theirs"), [("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("onebit_sgd", torch.optim.SGD)]
)
def test_state_has_the_values_that_torch_has(name, theirs):
    net, twin = network(), network()
    settings = {"momentum": 0.9} if name.endswith(("sgd", "muon")) else {"weight_decay": 0.0}
    ours, reference = MAKE[name](net.parameters()), theirs(twin.parameters(), lr=1e-2, **settings)
    descend(net, ours, range(5))
    descend(twin, reference, range(5))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        for key, value in reference.state[q].items():
            torch.testing.assert_close(ours.state[p][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.few(3)
@every_optimizer
def test_state_shows_the_flat_vectors_in_the_parameters_shapes_also_after_steps_and_loads(name):
    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group)
        early = {p: dict(optimizer.state[p]) for p in net.parameters()}
        descend(net, optimizer, range(6), group.rank)
        state = optimizer.state_dict()
        other = network()
        loaded = MAKE[name](other.parameters(), group=group)
        shown = {p: dict(loaded.state[p]) for p in other.parameters()}
        loaded.load_state_dict(state)
        fields = {"exp_avg": "m_N", "exp_avg_sq": "v_N", "momentum_buffer": "m_N"}
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert set(early[p]) == (
                {"step", "momentum_buffer"} if name.endswith(("sgd", "muon")) else {"step", "exp_avg", "exp_avg_sq"}
            )
            assert isinstance(early[p]["step"], torch.Tensor)
            assert early[p]["step"] == shown[q]["step"] == optimizer.num_steps == 6
            place = next(t for t in optimizer.space.tensors if t.param is p)
            for key in set(early[p]) - {"step"}:
                flat = getattr(optimizer.vectors, fields[key])[place.start : place.stop]
                assert early[p][key].shape == p.shape
                assert torch.equal(early[p][key].flatten(), flat)
                assert torch.equal(shown[q][key], early[p][key])
                assert early[p][key].any()
        return True

    assert run_threads(2, work) == [True, True]


@pytest.mark.few(3)
@every_optimizer
def test_a_group_added_before_the_first_step_is_as_if_it_had_been_there(name):
    def work(group):
        late, early = network(), network()
        a = MAKE[name](late[0].parameters(), group=group)
        a.add_param_group({"params": late[2].parameters(), "lr": 3e-3})
        b = MAKE[name]([{"params": early[0].parameters()}, {"params": early[2].parameters(), "lr": 3e-3}], group=group)
        for net, optimizer in ((late, a), (early, b)):
            descend(net, optimizer, range(8), group.rank)
        assert torch.equal(a.space.p_N, b.space.p_N)
        assert a.saved.keys() == b.saved.keys()
        a.prepare_to_save()
        assert replicas_bit_equal(a, group)
        assert len(a.state) == 4
        b.load_state_dict(a.state_dict())
        return True

    assert run_threads(2, work) == [True, True]


def test_the_rule_that_ends_warmup_follows_a_group_added_late():
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OneBitAdam([p], betas=(0.9, 0.9))
    optimizer.add_param_group({"params": [q], "betas": (0.9, 0.999)})
    assert optimizer.stability.beta2 == 0.999


def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was():
    net = network()
    optimizer = Adam(net[0].parameters())
    space, before = optimizer.space, optimizer.space.p_N.clone()
    for params, change, message in (
        ([torch.nn.Parameter(torch.empty(0))], {}, "parameter 0 of group 1.*no elements"),
        (net[2].parameters(), {"lr": -1.0}, "lr = -1.0"),
        (net[0].parameters(), {}, "more than one parameter group"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": params, **change})
        assert optimizer.space is space
        assert len(optimizer.param_groups) == 1
        assert torch.equal(optimizer.space.p_N, before)
    net[0](torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert optimizer.num_steps == 1


def test_a_group_that_only_one_rank_adds_otherwise_is_refused_by_all():
    def work(group):
        net = network()
        optimizer = Adam(net[0].parameters(), group=group)
        space = optimizer.space
        extra = torch.nn.Parameter(torch.ones(3 + group.rank))
        with pytest.raises(WireMismatch, match=r"parameter 0 of group 1.*\(3,\).*rank 1.*\(4,\)"):
            optimizer.add_param_group({"params": [extra]})
        assert optimizer.space is space
        descend(net[:1], optimizer, [0], group.rank)
        return optimizer.num_steps

    assert run_threads(2, work) == [1, 1]


@every_optimizer
def test_repr_shows_the_groups_and_copies_are_refused(name):
    optimizer = MAKE[name](network().named_parameters())
    assert "lr: 0.01" in repr(optimizer)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(optimizer)
    copy.deepcopy(optimizer.state_dict())


def test_a_model_whose_parameters_are_flat_can_be_copied():
    net = network()
    Adam(net.parameters())
    twin = copy.deepcopy(net)
    twin[0].weight.data.zero_()
    assert net[0].weight.all()


def test_a_newer_optimizer_of_the_same_parameters_takes_them_over_and_hands_them_back():
    net = network()
    first = SGD(net.parameters(), lr=0.1)
    second = SGD(net.parameters(), lr=0.1)
    for optimizer in (first, second, first):
        before = net[0].weight.detach().clone()
        descend(net, optimizer, [0])
        assert not torch.equal(net[0].weight, before)


@every_optimizer
def test_hooks_of_torch_optim_are_called(name):
    seen = []
    net = network()
    optimizer = MAKE[name](net.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("step_pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("step_post"))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save_pre"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "mine"})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["note"]))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("load_post"))
    descend(net, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["step_pre", "step_post", "save_pre", "mine", "load_post"]


@pytest.mark.few(3)
@every_optimizer
def test_what_others_put_into_the_state_stays_through_everything_and_goes_where_they_remove_it(name):
    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group)
        first, bias = net[0].weight, net[0].bias
        descend(net, optimizer, range(5), group.rank)
        optimizer.state[first]["z"] = first.detach().clone()
        optimizer.state[bias]["count"], optimizer.state[bias]["gone"] = 3, 1
        del optimizer.state[bias]["gone"]
        first.requires_grad_(False)
        descend(net, optimizer, range(5, 7), group.rank)
        optimizer.prepare_to_save()
        assert "z" in optimizer.state[first]
        written = io.BytesIO()
        torch.save(optimizer.state_dict(), written)
        written.seek(0)

        other = network()
        loaded = MAKE[name](other.parameters(), group=group)
        other[0].weight.requires_grad_(False)
        loaded.state[other[2].weight]["z"] = "of before"
        loaded.load_state_dict(torch.load(written, weights_only=True))
        other.load_state_dict(net.state_dict())
        for model, found in ((net, optimizer), (other, loaded)):
            model[0].weight.requires_grad_(True)
            descend(model, found, range(7, 9), group.rank)
            assert torch.equal(found.state[model[0].weight]["z"], optimizer.state[first]["z"])
            assert found.state[model[0].bias]["count"] == 3
            assert set(found.state[model[0].bias]) - set(found.state[model[2].weight]) == {"count"}
        return True

    assert run_threads(2, work) == [True, True]


def test_a_rank_that_comes_is_given_what_others_keep_in_the_state():
    def work(group):
        net = network(seed=group.rank)
        optimizer = MAKE["onebit_adam"](net.parameters())
        if not group.rank:
            descend(net, optimizer, range(5))
            optimizer.state[net[0].weight]["z"] = torch.arange(54, dtype=torch.bfloat16).view(9, 6)
            optimizer.state[net[0].bias].update(count=3, word="own")
        regroup(optimizer, group, has_state=not group.rank)
        shown = {key: value for key, value in optimizer.state[net[0].bias].items() if key in ("count", "word")}
        return optimizer.state[net[0].weight]["z"], shown

    (mine, words), (theirs, others) = run_threads(2, work)
    assert torch.equal(mine, theirs)
    assert words == others == {"count": 3, "word": "own"}


def test_what_no_message_can_hold_is_refused_by_name_where_a_rank_comes():
    def work(group):
        net = network()
        optimizer = Adam(net.parameters())
        if not group.rank:
            descend(net, optimizer, [0])
            optimizer.state[net[0].weight]["how"] = object()
        with pytest.raises(ValueError, match=r"parameter 0\.0 .* has 'how', object.*take it out"):
            regroup(optimizer, group, has_state=not group.rank)
        return optimizer.group.size

    assert run_threads(2, work) == [1, 1]


@every_optimizer
def test_entries_that_are_shown_cannot_be_set_or_removed_and_one_that_is_there_may_be_set_again(name):
    net = network()
    optimizer = MAKE[name](net.parameters())
    descend(net, optimizer, range(4))
    shown = optimizer.state[net[0].weight]
    for key in list(shown):
        for act in (
            lambda key=key: shown.__setitem__(key, torch.zeros(9, 6)),
            lambda key=key: shown.__delitem__(key),
            lambda key=key: shown.pop(key),
            lambda key=key: shown.update({key: 1}),
            shown.clear,
        ):
            with pytest.raises(RuntimeError, match=r"optimizer\.state\[p\]\['\w+'\] was (set|removed).*in place"):
                act()
    for of_one in optimizer.state.values():  # as people move a state to a device
        for key, value in of_one.items():
            of_one[key] = value.to("cpu")
    descend(net, optimizer, [4])
    for act in (
        lambda: optimizer.state.pop(net[0].bias),
        lambda: optimizer.state.__setitem__(net[0].bias, {}),
        lambda: setattr(optimizer, "state", {}),
    ):
        before = dict(optimizer.state)
        act()
        with pytest.raises(RuntimeError, match=r"emptied or replaced.*make the optimizer anew"):
            descend(net, optimizer, [5])
        optimizer.state = before
    descend(net, optimizer, [5])
