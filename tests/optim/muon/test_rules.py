"""Which rule a parameter gets, and what each makes of a momentum."""

from math import sqrt

import pytest
import torch
from torch import nn

from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import Muon, OneBitMuon
from thinwire.optim.muon_math import RULES, SIZE, WIDE, A, B, C, orthogonalised, type_of_products


class Gpt(nn.Module):
    """The parameters of one, with what people tie, stack and add."""

    def __init__(self, *, tied):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.proj, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 50), nn.Linear(50, 8)
        self.patch = nn.Conv2d(3, 8, 2)
        self.experts = nn.Parameter(torch.randn(4, 8, 6))
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.pos_emb = nn.Parameter(torch.randn(1, 16, 8))
        self.output = nn.Linear(8, 50, bias=False)
        if tied:
            self.output.weight = self.wte.weight
            self.transform = nn.Linear(8, 16)


def rules(model, **more):
    optimizer = Muon(model.parameters(), model=model, **more)
    return {name: rule for name, p in model.named_parameters() if (rule := optimizer.rules[p]) != "vector"}


def test_rules_are_found_from_the_model_and_not_from_shapes():
    """`up` has the shape of the table."""
    assert rules(Gpt(tied=False)) == {
        "pos_emb": "rows",
        "experts": "matrices",
        "wte.weight": "rows",
        "wpe.weight": "rows",
        "proj.weight": "matrix",
        "up.weight": "matrix",
        "down.weight": "matrix",
        "patch.weight": "matrix",
        "output.weight": "rows",
    }


def test_where_a_head_is_known_the_last_layer_is_none():
    tied = rules(Gpt(tied=True))
    assert "output.weight" not in tied
    assert (tied["wte.weight"], tied["transform.weight"]) == ("rows", "matrix")
    named = nn.ModuleDict({"head": nn.Linear(8, 5), "more": nn.Linear(5, 8)})
    assert rules(named) == {"head.weight": "rows", "more.weight": "matrix"}
    square = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 5))
    assert set(rules(square).values()) == {"matrix"}


def test_without_the_model_names_and_shapes_say_it():
    model = nn.ModuleDict({"wte": nn.Embedding(50, 8), "up": nn.Linear(8, 24), "lm_head": nn.Linear(8, 50)})
    named = Muon(model.named_parameters())
    assert [named.rules[p] for p in model.parameters()] == ["rows", "matrix", "vector", "rows", "vector"]
    shaped = Muon([nn.Parameter(torch.ones(9000, 8)), nn.Parameter(torch.ones(24, 8)), nn.Parameter(torch.ones(1, 8))])
    assert list(shaped.rules.values()) == ["rows", "matrix", "matrix"]


def test_a_group_says_it():
    model = Gpt(tied=False)
    said = [{"params": [model.wte.weight], "rule": "matrix"}, {"params": [model.proj.weight, model.proj.bias]}]
    optimizer = OneBitMuon(said, model=model)
    assert list(optimizer.rules.values()) == ["matrix", "matrix", "vector"]
    assert optimizer.stats()["rules"] == {"matrix": 400 + 192, "vector": 24}


@pytest.mark.parametrize("kind", [Muon, OneBitMuon])
def test_what_is_no_rule_and_what_has_no_matrix_is_refused_on_every_rank(kind):
    def work(group):
        before = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
        with pytest.raises(ValueError, match=r"none of the 2 parameters is a matrix.*OneBitAdam\(params.*'vector'"):
            kind(before, group=group)
        assert all(p.grad is None for p in before)
        with pytest.raises(ValueError, match=r"nesterov = 1: must be True or False"):
            kind([nn.Parameter(torch.ones(5, 4))], group=group, nesterov=1)
        with pytest.raises(ValueError, match=r"rule = 'ns': must be one of matrix, matrices, rows, vector, or None"):
            kind([{"params": [nn.Parameter(torch.ones(5, 4))], "rule": "ns"}], group=group)
        with pytest.raises(ValueError, match=r"complex64.*torch.view_as_real"):
            kind([nn.Parameter(torch.ones(5, 4, dtype=torch.complex64))], group=group)
        with pytest.raises(ValueError, match="lazy parameter without a shape"):
            kind(nn.LazyLinear(3).parameters(), group=group)
        kind([{"params": before, "rule": "vector"}], group=group)

    run_threads(2, work)


def test_a_rule_that_a_group_is_given_later_is_used_from_the_next_step_on():
    param = nn.Parameter(torch.zeros(5, 4))
    optimizer = Muon([param], lr=1.0)
    optimizer.param_groups[0]["rule"] = "vector"
    param.grad = torch.full((5, 4), 3.0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((5, 4), -0.2))


@pytest.mark.parametrize("kind", [Muon, OneBitMuon])
def test_a_rule_that_is_taken_back_is_found_again_and_one_that_is_none_is_refused_in_the_step(kind):
    made = nn.Parameter(torch.randn(4, 3))
    optimizer = kind([{"params": [made], "rule": "vector"}], lr=0.1, weight_decay=0.0)
    moved = []
    for rule in ("vector", None):
        optimizer.param_groups[0]["rule"] = rule
        before, made.grad = made.detach().clone(), torch.randn(4, 3)
        optimizer.step()
        moved.append((before - made.detach()).abs() / 0.1)
        assert optimizer.rules[made] == (rule or "matrix")
    torch.testing.assert_close(moved[0], torch.full((4, 3), SIZE))
    assert moved[1].std() > 0.02
    for bad in ("ns", ["rows"]):
        optimizer.param_groups[0]["rule"] = bad
        before, made.grad = made.detach().clone(), torch.randn(4, 3)
        with pytest.raises(ValueError, match=r"rule = .*: must be one of matrix, matrices, rows, vector, or None"):
            optimizer.step()
        assert torch.equal(made, before)


@pytest.mark.parametrize("kind", [Muon, OneBitMuon])
@pytest.mark.parametrize(
    ("rule", "shape", "least"),
    [("matrix", (), "1 dimension;"), ("rows", (), "1 d"), ("matrices", (5,), "2 dimensions;")],
)
def test_a_rule_that_a_tensor_has_too_few_dimensions_for_is_refused_on_every_rank(kind, rule, shape, least):
    def work(group):
        params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(shape))]
        with pytest.raises(ValueError, match=rf"rule = '{rule}' of a parameter of shape .*: .* at least {least}"):
            kind([{"params": params, "rule": rule}], group=group)
        optimizer = kind(params[:1], group=group)
        with pytest.raises(ValueError, match=rf"rule = '{rule}' of a parameter of shape"):
            optimizer.add_param_group({"params": params[1:], "rule": rule})
        assert len(optimizer.param_groups) == 1

    run_threads(2, work)


def test_ranks_with_other_rules_are_told():
    def work(group):
        rule = "rows" if group.rank else "matrix"
        OneBitMuon([{"params": [nn.Parameter(torch.ones(5, 4))], "rule": rule}], group=group)

    with pytest.raises(WireMismatch, match=r"rule of group 0 = matrix.*rule of group 0 = rows"):
        run_threads(2, work)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (5, 9), (9, 5), (16, 16), (64, 200), (1, 1)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_matrix_becomes_nearly_orthogonal_whatever_its_size(shape, size):
    m = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size
    found = torch.linalg.svdvals(orthogonalised(m))
    conditioned = torch.linalg.svdvals(m.double()) / torch.linalg.vector_norm(m.double())
    large = conditioned > 0.05  # five steps bring no smaller ones up
    assert found[large].min() > 0.6
    assert found.max() < 1.25
    u = RULES["matrix"](m)
    assert u.shape == m.shape
    if min(shape) == 1:
        assert 0.6 < u.square().mean().sqrt() / SIZE < 1.25


@pytest.mark.parametrize("shape", [(8, 8), (8, 8 * WIDE), (40, 5), (3, 4, 90)])
def test_however_its_products_are_ordered_it_is_the_quintic_five_times(shape):
    m = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    torch.testing.assert_close(orthogonalised(m), (u * s[..., None, :]) @ v, rtol=0, atol=1e-11)


def test_a_large_float32_matrix_is_near_its_float64_form_whatever_its_products_are_in(monkeypatch):
    m = torch.randn(128, 160, generator=torch.Generator().manual_seed(6))
    exact = orthogonalised(m.double())
    for has_bf16 in (True, False):
        monkeypatch.setattr("thinwire.optim.muon_math._cpu_multiplies_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert type_of_products(m) == (torch.bfloat16 if has_bf16 else torch.float32)
        assert type_of_products(m.double()) == torch.float64
        assert type_of_products(m[:100]) == torch.float32
        found = orthogonalised(m)
        assert found.dtype == torch.float32
        assert (found - exact).norm() < (0.03 if has_bf16 else 1e-5) * exact.norm()


@pytest.mark.parametrize("rule", RULES)
def test_of_zeros_an_update_is_zeros_and_what_is_not_finite_shows(rule):
    zeros = torch.zeros(6, 4)
    assert torch.equal(RULES[rule](zeros), zeros)
    for value in (torch.nan, torch.inf):
        m = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        m[3, 2] = value
        assert not RULES[rule](m).isfinite().all()


def test_a_stack_is_as_many_matrices_and_a_convolution_one():
    m = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    each = torch.stack([RULES["matrix"](one) for one in m])
    torch.testing.assert_close(RULES["matrices"](m), each, rtol=0, atol=1e-12)
    flat = RULES["matrix"](m.reshape(3, 24))
    torch.testing.assert_close(RULES["matrix"](m), flat.view(m.shape), rtol=0, atol=1e-12)


def test_the_scale_is_moonlights():
    m = torch.randn(12, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(RULES["matrix"](m), 0.2 * sqrt(40) * orthogonalised(m))


def test_a_row_that_was_hardly_touched_moves_less_and_less():
    m = torch.randn(50, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    m[7] *= 1e-3
    of_rows = RULES["rows"](m).square().mean(1).sqrt()
    torch.testing.assert_close(of_rows[:7], torch.full((7,), 0.2, dtype=torch.float64))
    whole = m.square().mean().sqrt()
    torch.testing.assert_close(of_rows[7], 0.2 * m[7].square().mean().sqrt() / (0.1 * whole))
