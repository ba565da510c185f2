"""A run on a cluster that nobody has: what must hold of any, and what disturbs it."""

import re
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.comm.wire.network import Exchange, Network, exchange_cost
from thinwire.contract.what_if import Disturbances, WhatIf, WhatIfRefused
from thinwire.workers.plan.catalogue import MODELS
from thinwire.workers.plan.cluster import Phase, run_through
from thinwire.workers.plan.what_if import ERRORS, METHODS, answer

SLOW = WhatIf(nodes=8, gpus=4, bytes_per_s=1.25e8, model="bert-base", steps=1000)
BITS = replace(SLOW, methods=("onebit_adam",))


def one(asked):
    return answer(asked).outcome("onebit_adam")


def test_all_methods_are_answered_and_dense_bf16_is_what_the_others_are_compared_with():
    found = answer(SLOW)
    assert [outcome.name for outcome in found.outcomes] == list(METHODS)
    assert found.outcome("dense_bf16").speedup == 1
    assert found.as_json()["speedup"].keys() == set(METHODS)
    assert found.global_batch == 8 * 4 * 16
    for outcome in found.outcomes:
        assert outcome.low_s < outcome.run_s < outcome.high_s
        assert outcome.speedup == pytest.approx(found.outcome("dense_bf16").run_s / outcome.run_s)
        assert outcome.samples_per_s * outcome.run_s == pytest.approx(found.global_batch * 1000)


def test_bytes_over_a_link_are_those_of_the_network():
    network, values = Network(32, 0.0, 1.0, 4), MODELS["bert-base"].values
    flat, nodes = (one(replace(BITS, topology=topology)).box_bytes for topology in ("flat", "node_first"))
    assert flat == pytest.approx(exchange_cost(Exchange.FLAT_ONE_BIT, network, values).num_bytes)
    assert nodes == pytest.approx(exchange_cost(Exchange.NODE_FIRST_ONE_BIT, network, values).num_bytes)
    dense = answer(replace(SLOW, methods=("dense_bf16",), latency_s=0.0)).outcome("dense_bf16")
    assert dense.box_bytes == pytest.approx(2 * 31 / 32 * 2 * values)


def test_a_run_is_its_warm_up_and_the_rest():
    found = one(replace(BITS, warmup=0.25))
    assert found.warmup == 250
    assert found.run_s == pytest.approx(250 * found.dense_step_s + 750 * found.step_s)
    assert one(replace(BITS, warmup=0.0)).run_s == pytest.approx(1000 * found.step_s)


def test_what_a_run_may_take_is_by_the_errors_of_each_of_its_parts():
    found, errors = one(replace(BITS, warmup=0.25)), ERRORS
    full_s, later_s = 250 * found.dense_step_s, 750 * found.step_s
    assert found.low_s == pytest.approx(full_s / (1 + errors["dense"][1]) + later_s / (1 + errors["bits"][1]))
    assert found.high_s == pytest.approx(full_s / (1 + errors["dense"][0]) + later_s / (1 + errors["bits"][0]))


def test_auto_takes_the_faster_topology():
    flat, nodes, auto = (one(replace(BITS, topology=topology)) for topology in ("flat", "node_first", "auto"))
    assert auto.run_s == min(flat.run_s, nodes.run_s)
    slow_inside = replace(BITS, inside_bytes_per_s=1e8)
    assert one(slow_inside).topology == "flat"
    assert auto.topology == "node_first"
    assert one(replace(BITS, gpus=1)).topology == "flat"


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4000), st.floats(1e6, 1e10), st.floats(1e6, 1e10))
def test_a_faster_link_never_makes_a_run_longer(nodes, some, other):
    slow, fast = sorted((some, other))
    asked = replace(SLOW, nodes=nodes, methods=("dense_bf16", "onebit_adam", "local_steps"))
    for before, after in zip(
        answer(replace(asked, bytes_per_s=slow)).outcomes,
        answer(replace(asked, bytes_per_s=fast)).outcomes,
        strict=True,
    ):
        assert after.run_s <= before.run_s * (1 + 1e-9)


def test_equal_questions_have_equal_answers_and_another_seed_another():
    disturbed = Disturbances(jitter=0.1, link_jitter=0.1, straggler_share=0.01, straggler_factor=3, node_mtbf_s=3e4)
    asked = replace(SLOW, disturbed=disturbed, methods=("dense_bf16", "onebit_adam"))
    assert answer(asked) == answer(asked)
    assert answer(asked) != answer(replace(asked, disturbed=replace(disturbed, seed=1)))


def test_what_is_late_makes_a_run_longer_and_more_so_among_more_boxes():
    def longer(nodes, **given):
        asked = replace(BITS, nodes=nodes, bytes_per_s=1e12, latency_s=0.0)  # what is computed is all that counts
        return one(replace(asked, disturbed=Disturbances(**given))).run_s / one(asked).run_s

    assert 1 < longer(8, jitter=0.1) < longer(1000, jitter=0.1) < 1.6
    assert (
        1
        < longer(8, straggler_share=1e-3, straggler_factor=3.0)
        < longer(1000, straggler_share=1e-3, straggler_factor=3.0)
    )
    assert longer(8, straggler_share=1.0, straggler_factor=3.0) == pytest.approx(3, rel=0.01)


def test_deaths_by_hand():
    """Steps of 1 s, of 2 s while a box is missing; deaths cost 5 s to regroup, a return 5 s and 3 s for its state."""
    disturbed = Disturbances(node_mtbf_s=1e3, regroup_s=5.0, return_s=50.0)
    random = Random(7)
    seconds, deaths = run_through([Phase(1000, lambda present: 1.0 + (present < 2))], 2, 3.0, disturbed, Random(7))
    first = random.expovariate(2 / 1e3)
    assert first < 1000
    assert deaths >= 1
    # Without deaths 1000 s. Each death: 5 s, its lost step; its return: 5 + 3 s and steps of 2 s while it is away.
    assert 1000 + 13 * deaths - 1 <= seconds <= 1000 + (5 + 5 + 3 + 2 + 2 + 55) * deaths
    assert run_through([Phase(10, lambda present: 1.0)], 2, 3.0, Disturbances(), Random(7)) == (10.0, 0)


def test_a_run_in_which_boxes_die_without_end_is_refused():
    disturbed = Disturbances(node_mtbf_s=1.0, regroup_s=0.0)
    with pytest.raises(WhatIfRefused, match=re.escape("node_mtbf_s = 1.0: of 8 machines 100,000 have died after")):
        one(replace(BITS, compute_s=1e3, disturbed=disturbed))


def test_one_gpu_sends_nothing_and_no_method_is_faster_by_it():
    found = answer(replace(SLOW, nodes=1, gpus=1))
    for outcome in found.outcomes:
        assert outcome.box_bytes == 0
        assert outcome.run_bytes == 0
        assert outcome.speedup <= 1.2


def test_a_price_is_of_every_gpu_and_hour():
    found = one(replace(BITS, price=2.0))
    assert found.cost == pytest.approx(2.0 * 32 * found.run_s / 3600)
    assert one(BITS).cost is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "model = 'bert': must be one of bert-base"),
        ({"model": None}, "no model: name one, or give values and flops"),
        ({"model": None, "values": 10}, "no model: name one"),
        ({"model": "resnet-50", "sequence": 128}, "of images, which have none"),
        ({"device": "tpu"}, "device = 'tpu': must be one of v100"),
        ({"nodes": 0}, "nodes = 0: must be 1 or more"),
        ({"bytes_per_s": float("nan")}, "bytes_per_s = nan: must be a number above 0"),
        ({"compute_s": float("inf")}, "compute_s = inf"),
        ({"warmup": 1.0}, "warmup = 1.0: must be a share of the run"),
        ({"topology": "ring"}, "topology = 'ring'"),
        ({"methods": ("adam",)}, "methods = 'adam': must be some of dense_fp32"),
        ({"software": "horovod"}, "software = 'horovod'"),
        ({"software": "deepspeed", "device": "h100"}, "device = 'h100': the papers' software was measured on the v100"),
        ({"disturbed": Disturbances(jitter=2.0)}, "jitter = 2.0"),
        ({"disturbed": Disturbances(straggler_share=2.0)}, "stragglers = 2.0:1.0"),
        ({"disturbed": Disturbances(node_mtbf_s=0.0)}, "node_mtbf_s = 0.0: must be 1 s or more"),
        ({"steps": 0}, "steps = 0: must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_asked(changes, words):
    with pytest.raises(WhatIfRefused, match=re.escape(words)):
        answer(replace(SLOW, **changes))


def test_it_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from thinwire.workers.plan.what_if import answer; from thinwire.contract.what_if import WhatIf; "
        "answer(WhatIf(2, 1, 1e8, 'resnet-18', steps=100)); print({'torch', 'numpy', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
