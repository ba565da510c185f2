"""CADA: its rule and step are the paper's; G is the mean of what ranks sent last; who does not send sends nothing."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.cada.problem import SIZES, SOME, closure_of, made, network, sent_by_all, train
from tests.reference.cada import ReferenceCada
from thinwire.comm import NonFiniteInput, SoloGroup, run_threads
from thinwire.comm.errors import WireMismatch

STEPS = 40


def reference(optimizer, net, size, **settings):
    """Its gradients come from a net of its own, whose parameters lie as the optimizer's."""
    other = network()
    by_name = dict(zip(net.parameters(), other.parameters(), strict=True))
    spans = [(by_name[tensor.param], tensor.start, tensor.stop) for tensor in optimizer.space.tensors]

    def gradient(x_N, step, rank):
        for param, start, stop in spans:
            param.data.copy_(x_N[start:stop].view_as(param))
            param.grad = None
        closure_of(other, step, rank)()
        g_N = torch.zeros_like(x_N)
        for param, start, stop in spans:
            g_N[start:stop] = param.grad.view(-1)
        return g_N

    return ReferenceCada(optimizer.space.p_N, size, gradient, **settings)


@pytest.mark.few(1)
@every_value(
    {
        "size": SIZES,
        "rule": (1, 2),
        "settings": (
            SOME,
            {"max_age": 50, "horizon": 10, "threshold": 0.005},
            {"max_age": 4, "horizon": 1, "threshold": 1.0},
            {"max_age": 7, "horizon": 3, "threshold": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "lr": 0.003},
        ),
    }
)
@pytest.mark.law
def test_it_is_the_papers_algorithm(size, rule, settings):
    """x and who sends, step by step, of a reference in float64 that knows every rank."""
    settings = {"lr": 0.01, **settings}

    def work(group):
        net = network()
        optimizer = made(net, group, rule=rule, **settings)
        due = reference(optimizer, net, size, rule=rule, **settings)
        for _ in range(STEPS):
            train(net, optimizer, 1, group.rank)
            due.step()
            torch.testing.assert_close(optimizer.space.p_N, due.x, rtol=0, atol=1e-10)
            assert optimizer.stats()["num_uploads"] == sum(map(len, due.uploads))
            torch.testing.assert_close(optimizer.vectors.sent_N, due.sent[group.rank], rtol=0, atol=1e-10)
        assert optimizer.stats()["possible_uploads"] == STEPS * size
        return optimizer.space.p_N.clone(), due.uploads

    found = run_threads(size, work)
    assert all(torch.equal(found[0][0], p) for p, _ in found)


@pytest.mark.law
@pytest.mark.parametrize("rule", [1, 2])
def test_in_these_problems_some_ranks_send_and_in_some_steps_none(rule):
    """So that the laws are of all kinds of steps."""

    def work(group):
        net = network()
        due = reference(made(net, SoloGroup()), net, 4, rule=rule, lr=0.01, **SOME)
        for _ in range(STEPS):
            due.step()
        return due.uploads

    counts = {len(givers) for givers in run_threads(1, work)[0]}
    assert {0, 4} < counts
    assert counts & {1, 2, 3}


@pytest.mark.few(1)
@pytest.mark.law
@every_value({"size": SIZES, "rule": (1, 2), "dtype": (torch.float32, torch.float64, torch.bfloat16)})
def test_g_is_the_mean_of_what_ranks_sent_last_and_replicas_are_bit_equal(size, rule, dtype):
    def work(group):
        net = network(dtype)
        optimizer = made(net, group, rule=rule)
        worst = 0.0
        for _ in range(60):
            train(net, optimizer, 1, group.rank)
            mean_N = optimizer.vectors.mean_N
            worst = max(worst, float((sent_by_all(optimizer) - mean_N).abs().max() / mean_N.abs().max()))
        held = [optimizer.space.p_N, *(getattr(optimizer.vectors, name) for name in ("m_N", "v_N", "peak_N", "mean_N"))]
        return worst, torch.stack(held)

    found = run_threads(size, work)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert max(worst for worst, _ in found) < 60 * eps  # a rounding in each step, of what is not larger than G by much
    assert all(torch.equal(found[0][1], held) for _, held in found)


@pytest.mark.few(1)
@pytest.mark.law
@every_value({"size": SIZES, "rule": (1, 2), "settings": ({"max_age": 0}, {"threshold": 0.0}, {"max_age": 1})})
def test_where_all_send_it_is_amsgrad_of_torch_on_the_mean_gradient(size, rule, settings):
    def work(group):
        net, other = network(), network()
        optimizer = made(net, group, rule=rule, weight_decay=0.1, **settings)
        torchs = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)
        calls = 0
        for step in range(1, 13):
            closure = closure_of(net, step, group.rank)

            def counted(closure=closure):
                nonlocal calls
                calls += 1
                return closure()

            optimizer.step(counted)
            torchs.zero_grad()
            closure_of(other, step, group.rank)()
            for param in other.parameters():
                group.mean_(param.grad)
            torchs.step()
            for mine, its in zip(net.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)
        assert calls == 12 or "threshold" in settings
        assert optimizer.stats()["num_uploads"] == 12 * size

    run_threads(size, work)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("size", [2, 3, 8])
def test_where_nobody_sends_a_byte_from_each_rank_is_all_that_crosses(size):
    def work(group):
        net = network()
        optimizer = made(net, group, max_age=5, threshold=1e9)
        sent = []
        for _ in range(11):
            before, uploads = group.stats.sent_bytes, optimizer.stats()["num_uploads"]
            train(net, optimizer, 1, group.rank)
            sent.append((optimizer.stats()["num_uploads"] - uploads, group.stats.sent_bytes - before))
        return sent

    for sent in run_threads(size, work):
        assert [uploads for uploads, _ in sent] == [size, 0, 0, 0, 0, size, 0, 0, 0, 0, size]
        assert all(num_bytes == size - 1 for uploads, num_bytes in sent if not uploads)
        assert sent[5][1] >= 8 * 2 * (size - 1) / size * 380  # float64, the ring's


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", [1, 2])
def test_who_sends_depends_neither_on_the_unit_of_the_loss_nor_on_the_rate(rule):
    """Of steps of rate 0: with a rate, a loss 1000 times as large moves x alike, but for eps."""

    def uploads_of(unit, lr):
        def work(group):
            net, found = network(), []
            optimizer = made(net, group, rule=rule, lr=0.01, eps=1e-300)
            for step in range(1, 25):
                optimizer.param_groups[0]["lr"] = lr if step > 16 else 0.01
                closure = closure_of(net, step, group.rank, unit)
                optimizer.step(closure)
                found.append(optimizer.stats()["num_uploads"])
            return found

        return run_threads(3, work)[0]

    due = uploads_of(1.0, 0.01)
    assert 24 < due[-1] < 3 * 24
    assert uploads_of(1024.0, 0.01) == due
    assert uploads_of(1.0, 0.0)[:17] == due[:17]
    assert uploads_of(1.0, 0.0)[-1] < 3 * 24


class WithStatistics(torch.nn.Module):
    """Which moves a buffer in each forward, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(7, 1).double()
        self.register_buffer("seen", torch.zeros(()))
        self.drawn = []

    def forward(self, x):
        self.seen += 1
        self.drawn.append(torch.rand(3).tolist())
        return self.linear(x)


def test_both_passes_draw_the_same_and_a_buffer_moves_once():
    model = WithStatistics()
    optimizer = made(model, SoloGroup(), model=model, max_age=100, threshold=1e9)
    train(model, optimizer, 5, 0)
    assert int(model.seen) == 5
    drawn = [tuple(row) for row in model.drawn]
    assert len(drawn) == 9  # there is nothing to compare in the first step
    assert drawn[1::2] == drawn[2::2]
    assert len(set(drawn)) == 5


def test_a_closure_that_zeroes_gradients_makes_no_difference_nor_do_gradients_that_were_left():
    ends = []
    for zeroes in (False, True):
        net = network()
        optimizer = made(net, SoloGroup())
        for step in range(1, 13):
            closure = closure_of(net, step, 0)
            net[0].weight.grad.fill_(3.0)

            def calls(closure=closure, zeroes=zeroes, optimizer=optimizer):
                if zeroes:
                    optimizer.zero_grad()
                return closure()

            loss = optimizer.step(calls)
            assert loss > 0
        ends.append(optimizer.space.p_N.clone())
    assert torch.equal(*ends)


def test_the_loss_and_the_gradient_that_are_left_are_those_of_now():
    net, other = network(), network()
    optimizer = made(net, SoloGroup(), max_age=100)
    train(net, optimizer, 3, 0)
    other.load_state_dict(net.state_dict())
    due = closure_of(other, 4, 0)()
    assert torch.equal(optimizer.step(closure_of(net, 4, 0)), due)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_a_missing_closure_is_a_sentence():
    net = network()
    optimizer = made(net, SoloGroup())
    closure_of(net, 1, 0)()
    with pytest.raises(TypeError, match=r"step\(\) of CADA without a closure.*optimizer\.step\(closure\)"):
        optimizer.step()
    assert optimizer.num_steps == 0


def test_a_closure_that_raises_has_changed_nothing():
    net = network()
    optimizer = made(net, SoloGroup(), max_age=100)
    train(net, optimizer, 4, 0)
    before = optimizer.space.p_N.clone()
    for good in (0, 1):
        calls = iter([closure_of(net, 5, 0)] * good)
        with pytest.raises(StopIteration):
            optimizer.step(lambda calls=calls: next(calls)())
        assert torch.equal(optimizer.space.p_N, before)
    train(net, optimizer, 1, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": 3}, "rule = 3: must be 1"),
        ({"rule": True}, "rule = True"),
        ({"max_age": -1}, "max_age = -1: must be a whole number"),
        ({"max_age": 2.0}, "max_age = 2.0"),
        ({"horizon": 0}, "horizon = 0: must be a whole number"),
        ({"threshold": -0.5}, "threshold = -0.5: must be a finite number, at least 0"),
        ({"threshold": float("nan")}, "threshold = nan"),
        ({"overlap": True}, "overlap = True: must be left out of CADA"),
        ({"topology": "node_first"}, "topology = 'node_first': must be left out of CADA"),
        ({"full_exchange": "bf16"}, "full_exchange = 'bf16': must be left out of CADA"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_what_cannot_be_is_refused_in_words(settings, words):
    with pytest.raises((ValueError, TypeError), match=words.replace("(", r"\(")):
        made(network(), SoloGroup(), **settings)


@pytest.mark.parametrize(("setting", "value"), [("rule", 1), ("max_age", 9), ("threshold", 0.5), ("horizon", 2)])
def test_ranks_with_other_settings_are_told_at_once(setting, value):
    def work(group):
        more = {setting: value} if group.rank == 1 else {}
        with pytest.raises(WireMismatch, match=setting):
            made(network(), group, **more)

    run_threads(3, work)


@pytest.mark.few(1)
@pytest.mark.law
@every_value({"non_finite": ("raise", "skip"), "rule": (1, 2)})
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(non_finite, rule):
    def work(group):
        net, other = network(), network()
        optimizer = made(net, group, non_finite=non_finite, rule=rule)
        undisturbed = made(other, group, rule=rule)
        for of, one in ((net, optimizer), (other, undisturbed)):
            train(of, one, 7, group.rank)
        bad = closure_of(net, 8, group.rank)

        def closure():
            loss = bad()
            if group.rank == 1:
                net[0].weight.grad[0, 0] = torch.inf
            return loss

        if non_finite == "raise":
            with pytest.raises(NonFiniteInput, match="rank 1 "):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
            assert optimizer.steps_skipped == 1
        for of, one in ((net, optimizer), (other, undisturbed)):
            train(of, one, 9, group.rank)
        assert torch.equal(optimizer.space.p_N, undisturbed.space.p_N)
        assert optimizer.saved == undisturbed.saved

    run_threads(3, work)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("rule", [1, 2])
def test_a_parameter_frozen_on_all_ranks_leaves_and_on_one_is_found(rule):
    def work(group):
        net = network()
        optimizer = made(net, group, rule=rule)
        train(net, optimizer, 5, group.rank)
        net[0].weight.requires_grad_(False)
        kept = net[0].weight.detach().clone()
        uploads = optimizer.stats()["num_uploads"]
        train(net, optimizer, 1, group.rank)
        assert optimizer.stats()["num_uploads"] == uploads + 3  # nobody knows what he sent before
        train(net, optimizer, 6, group.rank)
        assert torch.equal(net[0].weight, kept)
        net[0].weight.requires_grad_(True)
        train(net, optimizer, 6, group.rank)
        assert not torch.equal(net[0].weight, kept)
        assert float((sent_by_all(optimizer) - optimizer.vectors.mean_N).abs().max()) < 1e-12
        before = optimizer.space.p_N.clone()
        if group.rank == 1:
            net[2].bias.requires_grad_(False)
        with pytest.raises(WireMismatch):
            train(net, optimizer, 1, group.rank)
        net[2].bias.requires_grad_(True)
        assert torch.equal(optimizer.space.p_N, before)
        train(net, optimizer, 1, group.rank)
        return optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_each_rank_shortens_its_own_gradient_and_the_rule_sees_what_it_was():
    def work(group):
        net = network()
        optimizer = made(net, group, max_grad_norm=0.05, threshold=4.0)  # of the length of what is shortened
        for _ in range(12):
            train(net, optimizer, 1, group.rank)
            assert float(torch.linalg.vector_norm(optimizer.vectors.sent_N)) < 0.0501
            change_N = optimizer._change_N
            assert change_N is None or torch.isfinite(change_N).all()
        assert 3 < optimizer.stats()["num_uploads"] < 36
        return float((sent_by_all(optimizer) - optimizer.vectors.mean_N).abs().max())

    assert max(run_threads(3, work)) < 1e-12


def test_a_scaler_which_has_looked_before_the_closure_is_refused_on_every_rank():
    def work(group):
        net, scaler = network().float(), torch.amp.GradScaler("cpu")
        optimizer = made(net, group)
        scaler.scale(torch.ones(()))  # else torch has no scale yet
        before = optimizer.space.p_N.clone()
        with pytest.raises(RuntimeError, match="a GradScaler calls step") as found:
            scaler.step(optimizer, closure_of(net, 1, group.rank))
        assert torch.equal(optimizer.space.p_N, before)
        train(net, optimizer, 1, group.rank)
        return str(found.value)

    assert len(set(run_threads(2, work))) == 1


@pytest.mark.parametrize("rule", [1, 2])
def test_where_the_length_of_g_overflows_all_send(rule):
    """Of infinity everything is less: nobody would send, for max_age steps."""

    def work(group):
        net = network().float()
        optimizer = made(net, group, rule=rule, max_age=50)
        for step in range(1, 4):
            optimizer.step(closure_of(net, step, group.rank, unit=1e24))
        return optimizer.saved["lengths"], optimizer.stats()["num_uploads"]

    for lengths, uploads in run_threads(2, work):
        assert lengths == [float("inf")] * 3
        assert uploads == 3 * 2
