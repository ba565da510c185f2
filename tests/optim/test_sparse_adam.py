"""SparseAdam: torch's on the mean gradient, row by row; what 8 bits leave out waits with its row."""

import copy
import json
import pickle
import threading

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import NonFiniteInput, PeerLost, SoloGroup, WireMismatch, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup
from thinwire.optim import Adam, SparseAdam
from thinwire.optim.regroup import hand_over, regroup

EXACT = {"rtol": 0, "atol": 1e-12}


class Net(torch.nn.Module):
    """Two tables of one width, one of another that is no multiple of 8, and a layer behind them."""

    def __init__(self, rows=40):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(rows, 8, mode="sum", sparse=True)
        self.users = torch.nn.Embedding(17, 8, sparse=True)
        self.items = torch.nn.Embedding(23, 5, sparse=True)
        self.head = torch.nn.Linear(8, 1)

    @property
    def tables(self):
        return [self.words.weight, self.users.weight, self.items.weight]

    def forward(self, bags, pairs):
        user, item = pairs.T
        both = self.words(bags) * self.users(user)
        return self.head(both).squeeze(1) + self.items(item).tanh().sum(1)


def net(**given):
    return seeded(2, lambda: Net(**given)).double()


def batch(step, rank, samples=6, most=40):
    """Few rows of each table; of rank 2 in every third step none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = 0 if rank == 2 and step % 3 == 1 else samples
    bags = torch.randint(0, most, (samples, 3), generator=generator) ** 2 // most  # the first ones more often
    pairs = torch.stack([torch.randint(0, 17, (samples,), generator=generator) for _ in range(2)], 1)
    return bags, pairs


def backward(model, step, rank):
    bags, pairs = batch(step, rank)
    if len(bags):
        (model(bags, pairs) - 1).square().mean().backward()


def values(model):
    return torch.cat([p.detach().flatten() for p in model.tables])


def train(model, optimizer, steps, rank):
    for step in steps:
        model.zero_grad()
        backward(model, step, rank)
        optimizer.step()


@pytest.mark.few(2)
@every_value({"size": [1, 2, 3, 4], "exchange": ["fp32", "int8"]})
@pytest.mark.law
def test_it_is_torch_s_sparse_adam_on_the_mean_gradient_and_replicas_are_bit_equal(size, exchange):
    """With 8 bits on one rank too; on several the distance is that of what was left out."""

    def work(group):
        model = net()
        optimizer = SparseAdam(model.tables, lr=0.02, group=group, exchange=exchange)
        train(model, optimizer, range(10), group.rank)
        return values(model)

    model = net()
    reference = torch.optim.SparseAdam(model.tables, lr=0.02)
    for step in range(10):
        model.zero_grad()
        parts = []
        for rank in range(size):
            bags, pairs = batch(step, rank)
            if len(bags):
                parts.append((model(bags, pairs) - 1).square().mean() / size)
        sum(parts).backward()
        reference.step()
    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)
    if size == 1 or exchange == "fp32":
        torch.testing.assert_close(first, values(model), **EXACT)
    else:
        moved = (values(model) - values(net())).norm()
        assert 0 < (first - values(model)).norm() < 0.1 * moved


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.law
def test_what_is_received_of_a_row_and_its_residual_are_what_was_given_and_a_row_that_nobody_touches_waits(size):
    def work(group):
        model, worst, waited = net(), 0.0, 0
        optimizer = SparseAdam(model.tables, lr=0.02, group=group)
        received = []
        for table in optimizer.tables:

            def mean(rows, ids, given, table=table, made=table._mean):
                out = made(rows, ids, given)
                received.append((table, rows, out))
                return out

            table._mean = mean
        for step in range(10):
            model.zero_grad()
            backward(model, step, group.rank)
            before = optimizer.residual()
            kept = [(table.e_VD.clone(), table.E_SD.clone()) for table in optimizer.tables]
            dense = [
                [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in t.params]
                for t in optimizer.tables
            ]
            received.clear()
            optimizer.step()
            for table, left, (e, E), parts, after in zip(
                optimizer.tables, before, kept, dense, optimizer.residual(), strict=True
            ):
                g, out = torch.cat(parts), torch.zeros_like(left)
                group.mean_(g)
                rows = torch.cat([rows for of, rows, _ in received if of is table])
                for of, where, got in received:
                    if of is table:
                        out[where] = got
                worst = max(worst, float((out + after - g - left).abs().max()))
                untouched = torch.ones(len(left), dtype=torch.bool)
                untouched[rows] = False
                assert torch.equal(table.e_VD[untouched], e[untouched])
                own = untouched[group.rank :: group.size]
                assert torch.equal(table.E_SD[: len(own)][own], E[: len(own)][own])
                waited += int((left[untouched] != 0).sum())
        return worst, waited, float(after.abs().max())

    for worst, waited, left in run_threads(size, work):
        assert worst < 1e-13
        assert (waited > 0) == (left > 0) == (size > 1)


@pytest.mark.law
def test_rows_that_nobody_touches_send_no_byte():
    def work(group):
        sent = []
        for rows in (40, 40_000):
            model = net(rows=rows)
            optimizer = SparseAdam(model.tables, lr=0.02, group=group)
            before = group.stats.sent_bytes
            train(model, optimizer, range(3), group.rank)
            sent.append(group.stats.sent_bytes - before)
        return sent

    for few, many in run_threads(2, work):
        assert few == many


@pytest.mark.few(2)
@every_value({"size": [1, 2, 3, 4], "other": [1, 2, 3, 4]})
@pytest.mark.law
def test_what_n_ranks_saved_any_number_loads_with_its_residual_and_the_run_that_saved_goes_on_alike(size, other):
    def save(group):
        model = net()
        optimizer = SparseAdam(model.tables, lr=0.02, group=group)
        train(model, optimizer, range(6), group.rank)
        left = optimizer.residual()
        saved = optimizer.state_dict()
        at_save = model.state_dict()
        at_save = {name: x.clone() for name, x in at_save.items()}
        train(model, optimizer, range(6, 10), group.rank)
        return left, saved, at_save, values(model)

    left, saved, weights, went_on = run_threads(size, save)[0]
    assert any(one.any() for one in left) == (size > 1)

    def load(group):
        model = net()
        optimizer = SparseAdam(model.tables, lr=0.5, group=group)
        train(model, optimizer, range(20, 23), group.rank)  # it has a past of its own
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert optimizer.num_steps == 6
        assert optimizer.param_groups[0]["lr"] == 0.02
        found = optimizer.residual()
        train(model, optimizer, range(6, 10), group.rank)
        return found, values(model)

    loaded = run_threads(other, load)
    for found, end in loaded:
        assert all(torch.allclose(a, b, **EXACT) for a, b in zip(found, left, strict=True))
        assert torch.equal(end, loaded[0][1])
        assert torch.equal(end, went_on) or size != other


def faults(kind, rank, model):
    if rank != 1:
        return
    if kind == "dense":
        model.users.weight.grad = model.users.weight.grad.to_dense()
    elif kind == "not finite":
        model.users.weight.grad *= torch.nan


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("dense", ValueError, r"ranks \[1\] gave SparseAdam a gradient that is dense.*sparse=True.*OneBitAdam"),
        ("not finite", NonFiniteInput, r"a sparse gradient of ranks \[1\] holds NaN or infinity"),
    ],
)
def test_a_gradient_of_one_rank_that_cannot_be_used_is_refused_by_all_and_changes_nothing(kind, error, words):
    def work(group):
        model = net()
        optimizer = SparseAdam(model.tables, lr=0.02, group=group)
        train(model, optimizer, range(3), group.rank)
        before, left = values(model), optimizer.residual()
        model.zero_grad()
        backward(model, 3, group.rank)
        faults(kind, group.rank, model)
        with pytest.raises(error, match=words):
            optimizer.step()
        assert torch.equal(values(model), before)
        assert all(torch.equal(a, b) for a, b in zip(optimizer.residual(), left, strict=True))
        assert optimizer.num_steps == 3
        train(model, optimizer, range(3, 6), group.rank)
        return values(model)

    first, second, third = run_threads(3, work)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize(
    ("collective", "call"), [("all_gather", 0), ("all_gather", 1), ("all_to_all", 0), ("all_gather", 2)]
)
@pytest.mark.law
def test_a_peer_lost_in_any_collective_of_a_step_leaves_the_others_as_they_were(collective, call):
    """Counts, numbers of rows, and both phases of the exchange."""
    all_are_here = threading.Barrier(3)

    def work(group):
        model, faulty = net(), FaultyGroup(group)
        optimizer = SparseAdam(model.tables[:2], lr=0.02, group=faulty)  # of one width
        train(model, optimizer, range(3), group.rank)
        (table,) = optimizer.tables
        held = (table.m_VD, table.v_VD, table.e_VD, table.E_SD)
        before, kept = values(model), [x.clone() for x in held]
        model.zero_grad()
        backward(model, 3, group.rank)
        faulty.arm(Fault(ranks=(1,), collective=collective, call=call))
        all_are_here.wait()
        with pytest.raises(PeerLost):
            optimizer.step()
        assert optimizer.num_steps == 3
        return torch.equal(values(model), before) and all(map(torch.equal, held, kept))

    assert all(run_threads(3, work))


def test_what_cannot_be_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r'exchange = .bf16.: must be "int8" or "fp32"'):
        SparseAdam(net().tables, exchange="bf16")
    with pytest.raises(ValueError, match=r"shape \(8,\): must be a matrix of float32 or float64"):
        SparseAdam([torch.nn.Parameter(torch.zeros(8))])
    with pytest.raises(ValueError, match=r"lr = -1.0"):
        SparseAdam(net().tables, lr=-1.0)
    optimizer = SparseAdam(net().tables)
    with pytest.raises(RuntimeError, match="make it anew, over all groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 8))]})
    with pytest.raises(ValueError, match=r"maximize = True of a parameter group: this optimizer has no such setting"):
        SparseAdam([{"params": net().tables, "maximize": True}])
    with pytest.raises(ValueError, match="it is of another model"):
        optimizer.load_state_dict(SparseAdam(net(rows=41).tables).state_dict())
    with pytest.raises(ValueError, match="is not of SparseAdam of thinwire"):
        optimizer.load_state_dict(torch.optim.SparseAdam(net().tables).state_dict())


def broken(saved, change):
    """A state_dict of which one entry of its first table, or else of itself, is otherwise."""
    of_table = {name: x for name, x in change.items() if name in ("m", "v", "residual")}
    tables = [{**saved["tables"][0], **of_table}, *saved["tables"][1:]]
    return {**saved, "tables": tables, **{name: x for name, x in change.items() if name not in of_table}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_steps": -1}, r"num_steps = -1: must be a whole number"),
        ({"num_steps": "3"}, r"num_steps = '3'"),
        ({"tables": None}, r"tables = None: needed is a list of 2, of shapes \[\[57, 8\], \[23, 5\]\]"),
        ({"tables": [None, None]}, r"tables\[0\] = None: must be a dict"),
        ({"tables": [{}, {}]}, r"lacks \['m', 'v', 'residual'\]"),
        ({"m": [1.0]}, r"tables\[0\]\['m'\] = \[1.0\]: needed are dense floats of shape \[57, 8\]"),
        ({"residual": torch.zeros(57, 8, dtype=torch.int64)}, r"\['residual'\] = torch.int64"),
        ({"residual": torch.zeros(57, 8, device="meta")}, r"\['residual'\]"),
        ({"v": torch.full((57, 8), -1.0)}, r"with 456 values that are NaN or below 0"),
        ({"param_groups": [{}]}, r"param_groups\[0\] without \['lr', 'betas', 'eps'\]"),
        ({"param_groups": [None]}, r"param_groups\[0\] = None"),
        ({"param_groups": [{"lr": 1e-3, "betas": (0.9,), "eps": 1e-8}]}, r"betas"),
    ],
)
def test_a_damaged_save_is_refused_in_a_sentence_and_changes_nothing(change, words):
    model = net()
    optimizer = SparseAdam(model.tables)
    train(model, optimizer, range(2), 0)
    saved = optimizer.state_dict()
    groups = [dict(group) for group in optimizer.param_groups]
    other = {**saved, "num_steps": 9, "tables": [{k: x + 1 for k, x in one.items()} for one in saved["tables"]]}
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(broken(other, change))
    now = optimizer.state_dict()
    assert now["num_steps"] == 2
    assert all(torch.equal(a[k], b[k]) for a, b in zip(now["tables"], saved["tables"], strict=True) for k in a)
    assert optimizer.param_groups == groups


def test_parameters_that_a_save_lists_do_not_take_the_place_of_ours():
    model = net()
    optimizer = SparseAdam(model.tables)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1, 2]}]})
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.tables, strict=True))


def test_neither_a_parameter_given_twice_nor_a_copy_nor_an_edited_group_is_taken():
    model = net()
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="has a parameter twice"),
    ):
        SparseAdam([model.users.weight, model.users.weight])
    optimizer = SparseAdam(model.tables)
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="SparseAdam cannot be copied or pickled"):
            use(optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=r"edited by hand: it lists 2 parameters, 0 of them new, 1 gone"):
        optimizer.step()


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("lr", r"ranks? 0, 2 have lr, betas, eps of group 0 0\.02, .*rank 1 has .* 0\.04"),
        ("steps", r"rank 1 has steps 2"),
    ],
)
def test_ranks_that_step_otherwise_are_told_so_before_anything_is_changed(differs, words):
    """One has loaded alone, or has a schedule of its own."""

    def work(group):
        model = net()
        optimizer = SparseAdam(model.tables, lr=0.02, group=group)
        train(model, optimizer, range(2), group.rank)
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 4), group.rank)
        if group.rank == 1 and differs == "steps":
            optimizer.load_state_dict(saved)
        elif group.rank == 1:
            optimizer.param_groups[0]["lr"] *= 2
        before, tables = values(model), [table.m_VD.clone() for table in optimizer.tables]
        with pytest.raises(WireMismatch, match=words):
            train(model, optimizer, [4], group.rank)
        return torch.equal(values(model), before) and all(
            torch.equal(table.m_VD, m_VD) for table, m_VD in zip(optimizer.tables, tables, strict=True)
        )

    assert all(run_threads(3, work))


def test_ranks_with_other_tables_are_told_so_before_a_parameter_is_touched():
    def work(group):
        model = net(rows=40 + group.rank)
        before = values(model)
        with pytest.raises(WireMismatch, match="shapes of tables"):
            SparseAdam(model.tables, group=group)
        return torch.equal(values(model), before)

    assert all(run_threads(2, work))


def test_a_table_that_was_written_on_one_rank_is_told_to_all_and_one_written_alike_is_not():
    """max_norm shortens, in each forward, the rows of this rank's own batch."""

    def work(group):
        table = torch.nn.Embedding(9, 5, sparse=True, max_norm=0.5)
        with torch.no_grad():
            table.weight.normal_(generator=torch.Generator().manual_seed(3))
        optimizer = SparseAdam(table.parameters(), group=group)
        for row in (0, 1):  # of every rank's batch
            table(torch.tensor([row])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        table(torch.tensor([2 + group.rank])).sum().backward()
        before = table.weight.detach().clone()
        with pytest.raises(ValueError, match=r"other values on ranks \[1, 2\] than on rank 0, .* max_norm") as found:
            optimizer.step()
        assert torch.equal(table.weight, before)
        return str(found.value)

    assert len(set(run_threads(3, work))) == 1


def test_a_grad_scaler_is_refused_on_every_rank():
    def work(group):
        model, scaler = net().float(), torch.amp.GradScaler("cpu")
        optimizer = SparseAdam(model.tables, group=group)
        bags, pairs = batch(0, group.rank)
        scaler.scale((model(bags, pairs) - 1).square().mean()).backward()
        with pytest.raises(RuntimeError, match=r"use torch\.autocast with bfloat16"):
            scaler.step(optimizer)
        return True

    assert all(run_threads(2, work))


def test_beside_an_optimizer_of_the_rest_of_the_model_nothing_is_said(caplog):
    def work(group):
        model = net()
        rest = Adam(model.head.parameters(), lr=0.01, group=group, model=model)
        sparse = SparseAdam(model.tables, lr=0.02, group=group)
        for step in range(14):
            model.zero_grad()
            backward(model, step, group.rank)
            rest.step()
            sparse.step()
        return torch.cat([values(model), *(p.detach().flatten() for p in model.head.parameters())])

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)
    assert not [line for line in caplog.messages if "replicas_differ" in line]


OVER_GLOO = """
import json
from tests.optim.test_sparse_adam import SparseAdam, net, train, values
join()
model = net()
train(model, SparseAdam(model.tables, lr=0.02), range(6), rank)
say("values", json.dumps(values(model).tolist()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_over_processes_it_is_the_same_bit_for_bit(tmp_path):
    def work(group):
        model = net()
        train(model, SparseAdam(model.tables, lr=0.02, group=group), range(6), group.rank)
        return values(model).tolist()

    ranks = start(OVER_GLOO, 3, tmp_path, timeout_s=60)
    due = run_threads(3, work)[0]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * 3
    assert all(json.loads(said(tmp_path, rank, "values")) == due for rank in range(3))


def test_it_is_not_handed_over_and_the_refusal_says_how_other_ranks_go_on():
    for optimizer in (SparseAdam(net().tables), torch.optim.AdamW(net().parameters())):
        with pytest.raises(TypeError, match=rf"hand_over\(\) of {type(optimizer).__name__}: .*call state_dict\(\)"):
            hand_over(optimizer)
        with pytest.raises(TypeError, match=rf"regroup\(\) of {type(optimizer).__name__}: .*load_state_dict\(\)"):
            regroup(optimizer, SoloGroup(), has_state=True)


@pytest.mark.law
def test_what_rows_keep_lives_over_a_planned_change_of_ranks_by_a_save():
    """As the refusal of hand_over() says: three ranks, then two, then four."""
    found = []

    def work(group, saved, first):
        model = net()
        if saved is not None:
            torch.nn.utils.vector_to_parameters(saved[0], model.tables)
        optimizer = SparseAdam(model.tables, lr=0.02, group=group)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
        before = optimizer.residual()
        train(model, optimizer, range(first, first + 4), group.rank)
        left = optimizer.residual()
        return values(model), optimizer.state_dict(), before, left

    saved = None
    for first, size in enumerate((3, 2, 4)):
        before_R = None if saved is None else [table["residual"] for table in saved[1]["tables"]]
        found = run_threads(size, lambda group, saved=saved, first=first: work(group, saved, 4 * first))
        assert all(torch.equal(found[0][0], other[0]) for other in found[1:])
        for _, _, before, left in found:
            assert before_R is None or all(torch.equal(a, b) for a, b in zip(before, before_R, strict=True))
            assert any(bool(x.any()) for x in left)
        saved = found[0][:2]
