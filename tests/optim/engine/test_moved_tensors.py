"""Where tensors lie; and what moves them after the optimizer was made: it trains as if nothing was done.

Two ranks. Each deed is done before the first step, in the warm-up and in the compressed phase. Bit-equal to the run
without it: the values are the same, only where they lie is not.
"""

import copy
import io

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_training_loops import ADAM, end, inputs, loss_of, network
from tests.optim.reference.written_out import bits, make
from thinwire.comm import run_threads
from thinwire.optim import Adam

FREEZE, STEPS = 4, 9
every_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def replace_gradient_memory(net):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()


def replace_memory(net):
    for p in net.parameters():
        p.data = p.data.clone()


DEEDS = {
    "converted and back": lambda net: net.double().float(),
    "in shared memory": lambda net: net.share_memory(),
    "gradients in other memory": replace_gradient_memory,
    "parameters in other memory": replace_memory,
    "gradients dropped": lambda net: net.zero_grad(),
    "gradients zeroed": lambda net: net.zero_grad(set_to_none=False),
    "saved and loaded": lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}),
}


def trained(deed, overlap, name, group):
    """Bits at the end of the optimizer, and of the model that its user holds."""
    net = network()
    optimizer = make(name, [{"params": list(net.parameters()), **ADAM}], group, warmup=FREEZE, overlap=overlap)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        if step in (1, 3, FREEZE + 3):
            deed(net)
        loss_of(net, inputs(step, group.rank)).backward()
        optimizer.step()
    return end(optimizer), bits(*(p.detach() for p in net.parameters()))


def laid_out():
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2))


def test_parameters_are_views_in_whole_bytes_and_keep_their_values():
    net = laid_out()
    before = copy.deepcopy(net.state_dict())
    space = Adam(net.parameters()).space
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    for tensor in space.tensors:
        assert tensor.start % 8 == 0
        assert tensor.param.data_ptr() == space.p_N[tensor.start :].data_ptr()
    assert space.layout.num_live == sum(p.numel() for p in net.parameters())


def test_vectors_of_a_group_share_one_segment_and_matrices_have_their_own():
    layout = Adam(laid_out().parameters()).space.layout
    assert layout.segments == ((0, 16 + 16 + 16 + 8), (56, 104), (104, 128))


@pytest.mark.few(1)
@every_value({"name": ["adam", "onebit_adam", "zero_one_adam"], "overlap": (False, True)})
def test_tensors_that_were_moved_train_on(name, overlap):
    expected = run_threads(2, lambda group: trained(lambda net: None, overlap, name, group))
    for what, deed in DEEDS.items():
        found = run_threads(2, lambda group, deed=deed: trained(deed, overlap, name, group))
        assert all(map(torch.equal, sum(found, ()), sum(expected, ()))), what


@every_value({"name": ["adam", "onebit_adam", "zero_one_adam"], "save": ["state_dict", "rank_state_dict"]})
def test_weights_that_are_set_through_data_for_a_save_and_back_train_on(name, save):
    """An average that is looked at by `p.data = ...`: what is put back has the values of before."""

    def swap(optimizer, net):
        before, average = [p.data for p in net.parameters()], [p.detach() / 2 for p in net.parameters()]
        for p, x in zip(net.parameters(), average, strict=True):
            p.data = x
        getattr(optimizer, save)()
        for p, x in zip(net.parameters(), before, strict=True):
            p.data = x

    def ends(group, deed):
        net = network()
        optimizer = make(name, [{"params": list(net.parameters()), **ADAM}], group, warmup=FREEZE)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(net, inputs(step, group.rank)).backward()
            optimizer.step()
            if optimizer.at_sync or save == "rank_state_dict":
                deed(optimizer, net)
        return torch.cat([end(optimizer), bits(*net.parameters())])

    found = run_threads(2, lambda group: ends(group, swap))
    expected = run_threads(2, lambda group: ends(group, lambda optimizer, net: getattr(optimizer, save)()))
    assert all(map(torch.equal, found, expected))


def test_the_end_of_a_round_reaches_parameters_that_were_moved_in_it():
    """0/1 Adam: each rank has values of its own, which another place does not change; all have the same after it."""

    def ends(group):
        net = network()
        optimizer = make("zero_one_adam", [{"params": list(net.parameters()), **ADAM}], group, warmup=FREEZE)
        step = 0
        while optimizer.at_sync or step <= FREEZE:
            step += 1
            optimizer.zero_grad()
            loss_of(net, inputs(step, group.rank)).backward()
            optimizer.step()
        replace_memory(net)
        optimizer.prepare_to_save()
        return bits(*net.parameters())

    assert torch.equal(*run_threads(2, ends))


def test_a_parameter_in_shared_memory_stays_there_and_others_see_what_it_becomes():
    net = network().share_memory()
    seen_elsewhere = [p.detach() for p in net.parameters()]
    optimizer = Adam(net.parameters(), lr=0.1)
    alike = network()
    reference = torch.optim.AdamW(alike.parameters(), lr=0.1, weight_decay=0)
    for step in range(3):
        for model, opt in ((net, optimizer), (alike, reference)):
            opt.zero_grad()
            loss_of(model, inputs(step, 0)).backward()
            opt.step()
            with torch.no_grad():
                model[2].bias.data.mul_(2)  # without a trace in its version
    assert all(p.is_shared() for p in net.parameters())
    for ours, theirs in zip(seen_elsewhere, alike.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_what_is_saved_of_one_tensor_is_as_long_as_that_tensor():
    net = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 2))
    optimizer = Adam(net.parameters())
    for tensor in [*net.parameters(), *(p.grad for p in net.parameters())]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
    assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 4
    written = io.BytesIO()
    torch.save(net[1].state_dict(), written)
    assert written.tell() < 2 * 4 * 602 + 2048
    del optimizer  # the memory lives as long as a tensor in it
    assert torch.isfinite(net(torch.ones(100))).all()


@every_overlap
def test_rows_of_a_sparse_gradient_train_as_dense_ones_do(overlap):
    def ends(group, sparse):
        net = network()  # a matrix and a bias beside the table
        table = torch.nn.Embedding(7, 6, sparse=sparse)
        with torch.no_grad():
            table.weight.copy_(torch.arange(42.0).view(7, 6) / 42)
        optimizer = Adam([*table.parameters(), *net.parameters()], lr=0.01, group=group, overlap=overlap)
        for step in range(4):
            if step % 2:
                optimizer.zero_grad()
            else:
                net.zero_grad()
                table.zero_grad()
            loss_of(net, table(torch.tensor([step, 2, 2, group.rank]))).backward()
            optimizer.step()
        return end(optimizer)

    sparse, dense = (run_threads(2, lambda group, kind=kind: ends(group, kind)) for kind in (True, False))
    assert all(map(torch.equal, sparse, dense))


def test_a_step_without_a_gradient_says_what_to_look_at_and_the_second_is_refused(caplog):
    def work(group):
        net = network()
        held = list(net.parameters())  # by somebody else than the optimizer, which could not tell otherwise
        optimizer = Adam(held, lr=0.1, group=group)
        net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}, assign=True)  # new Parameters
        optimizer.zero_grad()
        loss_of(net, inputs(1, group.rank)).backward()
        optimizer.step()
        before = optimizer.space.p_N.clone()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"step 2: no parameter .* on any rank.*assign=True.*make the optimizer"):
            optimizer.step()
        return optimizer.num_steps == 1 and torch.equal(before, optimizer.space.p_N)

    assert run_threads(2, work) == [True, True]
    assert sum("no_gradient step 1:" in record.getMessage() for record in caplog.records) == 2


def test_a_rank_without_a_gradient_beside_one_that_has_one_goes_on(caplog):
    def work(group):
        net = network()
        optimizer = Adam(net.parameters(), lr=0.1, group=group)
        for step in range(1, 4):
            optimizer.zero_grad()
            if group.rank:
                loss_of(net, inputs(step, group.rank)).backward()
            optimizer.step()
        return end(optimizer)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)
    assert [r.getMessage()[:19] for r in caplog.records] == ["no_gradient step 1:"]


def with_a_buffer_of_the_weights():
    net = network()
    net.register_buffer("shown", net[0].weight.data)
    return net, lambda: net.shown


def with_an_array_of_the_weights():
    net = network()
    array = net[0].weight.detach().numpy()
    return net, lambda: torch.from_numpy(array)


def with_a_frozen_layer_that_is_tied_by_its_memory():
    net, tied = network(), torch.nn.Linear(6, 11)
    tied.weight = torch.nn.Parameter(net[0].weight.detach(), requires_grad=False)
    return net, lambda: tied.weight


def with_a_copy_that_has_the_same_memory():
    net, other = network(), network()
    other.load_state_dict(net.state_dict(), assign=True)
    return net, lambda: other[0].weight


MADE = [
    with_a_buffer_of_the_weights,
    with_an_array_of_the_weights,
    with_a_frozen_layer_that_is_tied_by_its_memory,
    with_a_copy_that_has_the_same_memory,
]


@pytest.mark.few(2)
@every_value({"make_net": MADE, "name": ["adam", "onebit_adam", "zero_one_adam", "onebit_lamb"]})
def test_what_lies_in_the_memory_of_a_parameter_sees_every_step(make_net, name, caplog):
    def ends(group, made):
        net, seen = made()
        optimizer = make(name, [{"params": list(net.parameters()), **ADAM}], group, warmup=FREEZE)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(net, inputs(step, group.rank)).backward()
            optimizer.step()
            assert torch.equal(seen(), net[0].weight)
            if step == FREEZE:
                net[0].weight.requires_grad_(False)
            if step == FREEZE + 2:
                net[0].weight.requires_grad_(True)
        assert torch.equal(seen(), net[0].weight)
        return end(optimizer)

    found = run_threads(2, lambda group: ends(group, make_net))
    assert "memory_shared" in caplog.text
    caplog.clear()
    expected = run_threads(2, lambda group: ends(group, lambda: (net := network(), lambda: net[0].weight)))
    assert "memory_shared" not in caplog.text
    assert all(map(torch.equal, found, expected))


def test_memory_is_the_optimizer_s_again_once_nothing_else_looks_at_it(caplog):
    net = network()
    kept = net.state_dict()
    optimizer = Adam(net.parameters(), lr=0.1)
    places = [tensor.param.data_ptr() for tensor in optimizer.space.tensors]
    assert "memory_shared parameters=4" in caplog.text
    for step, is_kept in ((1, True), (2, False)):
        if not is_kept:
            del kept
        optimizer.zero_grad()
        loss_of(net, inputs(step, 0)).backward()
        optimizer.step()
        stays = [
            tensor.param.data_ptr() == place for tensor, place in zip(optimizer.space.tensors, places, strict=True)
        ]
        assert stays == [is_kept] * 4


def transposed(grad):
    grad.t_()


def transposed_through_data(grad):
    grad.data = grad.data.t()


@pytest.mark.parametrize("deed", [transposed, transposed_through_data])
@every_overlap
def test_a_gradient_that_is_read_otherwise_in_its_own_memory_counts_as_it_reads(deed, overlap):
    """And zero_grad() has the view back, for the next backward."""

    def work(group):
        ends = []
        for itself in (True, False):
            weight = torch.nn.Parameter(torch.arange(16.0).view(4, 4) / 8)
            optimizer = Adam([weight], lr=0.1, group=group, overlap=overlap)
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                with optimizer.no_sync():
                    ((weight * torch.arange(16.0).view(4, 4)).sin().sum() * (step + 1)).backward()
                if step == 1 and itself:
                    deed(weight.grad)
                elif step == 1:
                    weight.grad = weight.grad.t().clone()
                optimizer.step()
            ends.append(weight.detach().clone())
        assert torch.equal(*ends)

    run_threads(2, work)


@pytest.mark.parametrize("shape", [(4, 4), (1, 2, 8), (1, 8)])
def test_a_gradient_that_gets_another_shape_in_its_own_memory_is_refused_until_zero_grad(shape):
    weight = torch.nn.Parameter(torch.ones(2, 8))
    optimizer = Adam([weight], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        weight.square().sum().backward()
        if step == 1:
            weight.grad.data = weight.grad.data.view(-1)[: torch.Size(shape).numel()].view(shape)
            with pytest.raises(ValueError, match="its gradient is"):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.num_steps == 2


def test_state_of_a_parameter_that_is_put_under_another_key_is_refused():
    weight = torch.nn.Parameter(torch.ones(2, 8))
    optimizer = Adam([weight], lr=0.1)
    optimizer.state[torch.nn.Parameter(torch.ones(2, 8))] = optimizer.state.pop(weight)
    weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="was emptied or replaced"):
        optimizer.step()


def test_a_parameter_of_another_shape_is_named_before_the_next_forward():
    weight = torch.nn.Parameter(torch.ones(2, 8))
    optimizer = Adam([weight], lr=0.1)
    weight.data = weight.data.view(4, 4)
    with pytest.raises(ValueError, match=r"is now torch.float32 \(4, 4\) on cpu; move and convert the model first"):
        optimizer.zero_grad()


@pytest.mark.parametrize(("own_memory", "held"), [(True, False), (False, False), (True, True)])
def test_a_parameter_that_is_turned_trains_as_it_reads(own_memory, held):
    weight = torch.nn.Parameter(torch.arange(16.0).view(4, 4))
    plain = torch.nn.Parameter(weight.detach().t().clone())
    optimizer, reference = Adam([weight], lr=0.1), torch.optim.Adam([plain], lr=0.1)
    kept = weight.detach() if held else None
    weight.data = weight.data.t() if own_memory else weight.data.t().clone()
    for _ in range(3):
        for param, its in ((weight, optimizer), (plain, reference)):
            its.zero_grad()
            (param * torch.arange(16.0).view(4, 4).sub(7.0)).square().sum().backward()
            its.step()
    torch.testing.assert_close(weight, plain)
    assert kept is None or kept.data_ptr() == weight.data_ptr()


def test_parameters_that_change_places_keep_their_values():
    a, b = (torch.nn.Parameter(torch.full((4, 4), value)) for value in (1.0, 2.0))
    optimizer = Adam([a, b], lr=0.0)
    a.data, b.data = b.data, a.data
    for param in (a, b):
        param.grad = torch.ones(4, 4)
    optimizer.step()
    assert a.eq(2.0).all()
    assert b.eq(1.0).all()
