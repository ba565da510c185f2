"""A whole run, by hand; when not to compress, and what is said then."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.plan.rehearsed import FAST, MILLION, SLOW, plan, rehearsed
from tests.workers.small_job import small_spec
from thinwire.comm.wire.step_time import Transport
from thinwire.contract.plan import Link, PlanRequest
from thinwire.workers.plan import run
from thinwire.workers.plan.ways import COMPRESSED, Busy

SPEC = small_spec(
    steps=1000,
    global_batch=4096,
    bucket_elements=25 * MILLION,
    optimizer={"name": "onebit_adam", "warmup": 100},
    workers={"min": 1, "max": 2},
)
OF_INT8 = {"name": "local_steps", "inner": {"name": "adam"}, "every": 32, "codec": "int8"}
TINY = {"elements": 1000, "forward_s": 1e-6, "backward_s": 1e-6, "update_s": 1e-6, "cast_s": 1e-6}


def test_a_run_by_hand():
    """fp32: 0.23 s of work and 100 MB over 12.5 MB/s. One bit: 3.125 MB and 6104 scales of 4 bytes, twice 0.2 ms.

    DDP has four buckets: half of three quarters of 0.12 s of backward is hidden, with one core.
    """
    found = plan(SPEC)
    dense, half, adam = (found.method(name) for name in ("dense_fp32", "dense_bf16", "onebit_adam"))
    assert dense.step_s == pytest.approx(0.23 + 8.0 + 4 * 2 * 1e-4 - 0.045)
    assert half.step_s == pytest.approx(0.24 + 4.0 + 4 * 2 * 1e-4 - 0.045)
    assert adam.warmup_step_s == pytest.approx(0.25 + 8.0 + 2e-4)
    assert adam.step_bytes == 3_125_000 + 4 * 6104
    assert adam.step_s == pytest.approx(0.23 + adam.step_bytes / 12.5e6 + 2e-4)
    assert adam.run_s == pytest.approx(100 * adam.warmup_step_s + 900 * adam.step_s)
    assert adam.run_bytes == pytest.approx(100 * 100e6 + 900 * adam.step_bytes)
    assert adam.gain_fp32 == pytest.approx(dense.run_s / adam.run_s)
    assert adam.gain_bf16 == pytest.approx(half.run_s / adam.run_s)
    assert found.compress
    assert found.best in COMPRESSED
    assert found.verdict.startswith("Compress, with ")


def test_the_time_to_the_same_loss_is_the_runs_by_the_steps_of_our_studies_or_none():
    adams = plan(SPEC)
    for name in ("dense_fp32", "dense_bf16", *COMPRESSED):
        assert adams.method(name).same_loss_s == adams.method(name).run_s
    assert adams.method("local_steps").same_loss_s is None  # of 31 rounds
    assert adams.soonest == "onebit_muon"
    assert adams.best != "onebit_muon"
    long = plan(small_spec(steps=3200, global_batch=4096)).method("local_steps")
    assert long.same_loss_s == pytest.approx(2 * long.run_s)
    in_bytes = small_spec(steps=3200, global_batch=4096, optimizer=OF_INT8)
    assert plan(in_bytes).method("local_steps").same_loss_s is None
    muons = plan(small_spec(steps=1000, global_batch=4096, optimizer={"name": "onebit_muon"}))
    assert muons.method("onebit_muon").same_loss_s == pytest.approx(0.4 * muons.method("onebit_muon").run_s)
    assert json.loads(json.dumps(muons.as_json()))["methods"][-1]["same_loss_s"] is None


def test_lines_of_each_kind_of_collective_change_what_is_predicted_and_advised():
    """Rings as before, all-to-all and all-gather with a round of 20 ms and a tenth of the bandwidth; then of no use."""
    before, bits = plan(SPEC), 3_125_000 + 4 * 6104
    slower = plan(SPEC, link=replace(SLOW, rows=(2e-2, SLOW.bytes_per_s / 10)))
    for name in ("dense_fp32", "dense_bf16"):
        assert slower.method(name) == replace(before.method(name))
    assert slower.method("onebit_adam").step_s == pytest.approx(0.23 + bits / 1.25e6 + 2 * 2e-2)
    assert slower.method("onebit_adam").warmup_step_s == before.method("onebit_adam").warmup_step_s
    assert slower.compress
    useless = plan(SPEC, link=replace(SLOW, rows=(2e-2, SLOW.bytes_per_s / 100)))
    assert (before.compress, useless.compress) == (True, False)
    assert (before.best in COMPRESSED, useless.best) == (True, "dense_bf16")


def test_a_job_that_goes_node_first_is_planned_so_where_machines_have_several_workers():
    """Two machines of two: one sends 25 MB / 8 and its scales for both, where flat both send to both of the other."""
    spec = small_spec(**SPEC.model_dump() | {"topology": "node_first", "workers": {"min": 1, "max": 4}})
    flat, nodes, one_each = plan(SPEC, workers=4, per_machine=2), plan(spec, workers=4, per_machine=2), plan(spec)
    bits, wire_s = 3_125_000 + 4 * 6104, 12.5e6
    assert nodes.method("onebit_adam").step_s == pytest.approx(0.23 + bits / wire_s + 2e-4, rel=1e-3)
    assert flat.method("onebit_adam").step_s == pytest.approx(0.23 + 1.75 * bits / wire_s + 4e-4, rel=1e-3)
    assert nodes.method("onebit_adam").warmup_step_s < flat.method("onebit_adam").warmup_step_s
    assert "node first: what crosses inside of a machine takes no time" in nodes.assumed
    assert one_each.method("onebit_adam") == plan(SPEC).method("onebit_adam")


def test_what_sending_costs_the_processor_is_not_added_to_lines_that_were_measured_through_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = rehearsed(transport=Transport(1e-6, 1e-6, 1e-6))
    monkeypatch.setattr(run, "spawn", lambda orders, say: found)
    lines = replace(SLOW, rows=(SLOW.latency_s, SLOW.bytes_per_s))
    by_lines, by_rate = (run.run(PlanRequest(SPEC, link, 2), lambda what, done: None) for link in (lines, SLOW))
    assert by_lines == plan(SPEC, link=lines)
    assert by_rate == plan(SPEC, link=SLOW, transport=found.transport)
    assert by_rate.method("onebit_adam").step_s > by_lines.method("onebit_adam").step_s


@pytest.mark.parametrize("kind", ["sgd", "muon"])
@pytest.mark.parametrize("prefix", ["", "onebit_"])
def test_a_job_of_sgd_or_muon_is_planned_beside_the_same_at_one_bit_which_has_no_warm_up(prefix, kind):
    given = SPEC.model_dump(exclude={"optimizer"})
    spec = small_spec(**given | {"optimizer": {"name": f"{prefix}{kind}", "lr": 0.1}})
    found = plan(spec, busy={f"onebit_{kind}": Busy(0.0, 0.23)})
    assert [one.name for one in found.methods] == ["dense_fp32", "dense_bf16", f"onebit_{kind}", "local_steps"]
    ours = found.method(f"onebit_{kind}")
    assert any("AdamW" in note for note in found.assumed) == (kind == "muon")
    assert (ours.warmup, ours.warmup_step_s) == (0, None)
    assert ours.run_bytes == pytest.approx(spec.steps * (3_125_000 + 4 * 6104))
    assert found.best == f"onebit_{kind}"
    assert {"sgd": "1-bit SGD", "muon": "1-bit Muon"}[kind] in found.verdict
    assert "warm-up" not in found.verdict
    assert not [note for note in found.assumed if "warm-up" in note or "full exchanges" in note]


def test_local_steps_exchange_once_in_a_round_and_are_advised_to_who_asks_for_them_alone():
    """1000 steps of rounds of 32: 32 exchanges, the last of a round that the end of the run cuts short."""
    bits = 3_125_000 + 4 * 6104
    by_default = plan(SPEC)
    local = by_default.method("local_steps")
    assert local.run_bytes == pytest.approx(32 * bits)
    assert local.run_s == pytest.approx(968 * 0.24 + 32 * (0.26 + bits / 12.5e6 + 2e-4))
    assert local.run_s < by_default.method(by_default.best).run_s
    assert by_default.best != "local_steps"
    assert any("2.221 in place of 1.981" in note for note in by_default.assumed)
    given = {"name": "local_steps", "every": 100, "inner": {"name": "muon"}, "codec": "int8"}
    asked = plan(small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": given}))
    assert [one.name for one in asked.methods] == ["dense_fp32", "dense_bf16", "onebit_muon", "local_steps"]
    assert asked.best == "local_steps"
    assert asked.method("local_steps").run_bytes == pytest.approx(10 * 8 * bits, rel=0.02)
    assert any("muon, 100 to a round" in note and "is not known" in note for note in asked.assumed)
    late = plan(small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": {**given, "overlap": True}}))
    busy_s = 990 * 0.24 + 10 * 0.26
    assert late.method("local_steps").run_s == pytest.approx(busy_s)  # 100 steps hide an exchange of 2 s
    assert late.method("local_steps").run_bytes == asked.method("local_steps").run_bytes
    in_parts = plan(small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": {**given, "parts": 4}}))
    of_parts, whole = in_parts.method("local_steps"), asked.method("local_steps")
    assert of_parts.run_bytes == pytest.approx(whole.run_bytes, rel=0.01)
    assert of_parts.run_s == pytest.approx(whole.run_s, rel=0.01)  # as long in all, a quarter of it at a time
    assert any("in 4 parts of 6,250,000 values, of which one crosses every 25" in note for note in in_parts.assumed)


@pytest.mark.parametrize(
    ("codec", "due"),
    [
        ("sign", 3_125_000 + 4 * 6104),
        ("int8", 25_000_000 + 4 * 97_657),
        ("int4", 12_500_000 + 4 * 195_313),
        ("topk", 120 * 6104),
        ("threshold", 4 * 250_000),
    ],
)
@pytest.mark.parametrize("name", ["onebit_sgd", "local_steps"])
def test_a_job_s_own_method_sends_the_bytes_of_its_codec_and_the_others_signs(name, codec, due):
    given = {"name": name, "codec": codec} | ({"every": 100, "inner": {"name": "sgd"}} if name == "local_steps" else {})
    busy = dict.fromkeys(("onebit_sgd", "local_steps"), Busy(0.3, 0.3, 0.3))
    found = plan(small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": given}), busy=busy)
    own, other = (found.method(one) for one in sorted(("onebit_sgd", "local_steps"), key=lambda one: one != name))
    every, per = (1, 32) if name == "onebit_sgd" else (100, 1)
    assert own.run_bytes == pytest.approx(1000 / every * due, rel=1e-3)
    assert other.run_bytes == pytest.approx(-(-1000 // per) * (3_125_000 + 4 * 6104), rel=1e-3)
    assert own.title.endswith(f", {codec}") == (codec != "sign")
    assert "," not in other.title


@pytest.mark.parametrize("given", [{"name": "sketched_sgd"}, {"name": "onebit_sgd", "codec": "powersgd"}])
def test_a_linear_code_sends_two_sums_of_what_it_was_rehearsed_with(given):
    busy = dict.fromkeys(("onebit_sgd", "local_steps", "sketched_sgd"), Busy(0.3, 0.3, 0.3))
    busy[given["name"]] = Busy(0.3, 0.3, 0.3, summed=100_000)
    found = plan(small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": given}), busy=busy)
    own = found.method(given["name"])
    assert own.run_bytes == pytest.approx(1000 * 4 * 100_000)
    assert own.step_s == pytest.approx(0.3 + 4 * 100_000 / 12.5e6 + 2 * 2e-4)


def test_local_steps_of_zero_one_adam_send_nothing():
    """After its freeze the gap between syncs grows to 4: a quarter of those steps send what 1-bit Adam sends."""
    optimizer = {"name": "zero_one_adam", "lr": 1e-3, "dense_steps": 100, "var_freeze": 100, "local_step_scaler": 1}
    spec = small_spec(**SPEC.model_dump(exclude={"optimizer"}) | {"optimizer": {**optimizer, "local_step_clipper": 4}})
    found = plan(spec)
    zero_one, bits = found.method("zero_one_adam"), found.method("onebit_adam").step_bytes
    assert zero_one.step_bytes == pytest.approx(bits / 4, rel=0.01)
    assert zero_one.step_s == pytest.approx(0.25 * (0.26 + bits / 12.5e6 + 2e-4) + 0.75 * 0.22, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 1}, "one worker sends nothing"),
        ({"link": FAST}, "the job is compute-bound"),
        (
            {"link": Link(1e-4, 1e8, ""), "busy": dict.fromkeys(COMPRESSED, Busy(9, 9, 9))},
            "the link is too fast for it",
        ),
        ({**TINY, "busy": dict.fromkeys(COMPRESSED, Busy(1e-3, 1e-3, 1e-3))}, "the model is too small"),
    ],
    ids=["alone", "compute", "fast", "small"],
)
def test_what_does_not_pay_is_not_compressed(changes, words):
    found = plan(SPEC, **changes)
    assert not found.compress
    assert found.best.startswith("dense_")
    assert found.verdict.startswith("Do not compress: ")
    assert words in found.verdict


def test_a_run_that_is_warm_up_for_the_most_part_is_too_short():
    optimizer = {"name": "onebit_adam", "warmup": 97, "full_exchange": "fp32"}
    spec = small_spec(steps=100, global_batch=64, optimizer=optimizer, lr_schedule={"warmup": 97})
    found = plan(spec)
    assert "the run is too short" in found.verdict
    assert "97 of 100" in found.verdict


def test_the_assumed_end_of_an_automatic_warmup_is_told():
    spec = small_spec(steps=1000, optimizer={"name": "onebit_adam"})
    for told, title, last in zip(plan(spec).assumed, ("1-bit Adam", "1-bit LAMB"), (600, 700), strict=False):
        assert f"{title} ends after step {last}; " in told
        assert "later steps, which bring the variance up to date, count as warm-up" in told
    long = small_spec(steps=10_000, optimizer={"name": "onebit_adam"})
    assert "the earliest that its rule allows; it may last to step" in " ".join(plan(long).assumed)
    assert "automatic" not in " ".join(plan(SPEC).assumed)


def test_a_gpu_has_cores_to_spare():
    on_gpu = plan(SPEC, cores=math.inf, device="cuda")
    assert on_gpu.cores is None
    assert on_gpu.method("dense_fp32").step_s < plan(SPEC).method("dense_fp32").step_s
    assert "on GPUs the transport costs the processor nothing" in on_gpu.assumed


def test_workers_of_one_machine_share_its_link():
    apart, together = plan(SPEC, workers=4), plan(SPEC, workers=4, per_machine=2)
    assert together.method("onebit_adam").step_s > apart.method("onebit_adam").step_s
    with pytest.raises(ValueError, match="3 ranks in boxes of 2"):
        plan(SPEC, workers=3, per_machine=2)


def test_it_is_json_even_without_a_link():
    told = json.loads(json.dumps(plan(SPEC, link=Link(0.0, math.inf, "none"), workers=1).as_json(), allow_nan=False))
    assert told["link"]["bytes_per_s"] is None
    assert told["methods"][0]["name"] == "dense_fp32"


@given(st.floats(1e5, 1e11), st.floats(1.0, 1000.0), st.integers(2, 64), st.sampled_from(COMPRESSED))
def test_a_slower_link_never_makes_compression_pay_less(bytes_per_s, times, workers, name):
    """Over the whole run, on a core that does nothing else meanwhile."""
    fast, slow = (plan(SPEC, link=Link(1e-4, rate, ""), workers=workers) for rate in (bytes_per_s, bytes_per_s / times))
    assert slow.method(name).gain_fp32 >= fast.method(name).gain_fp32 * (1 - 1e-9)
    assert slow.compress or not fast.compress


def test_the_same_figures_give_the_same_plan():
    assert plan(SPEC) == plan(SPEC, **{"busy": rehearsed().busy})
    assert plan(SPEC, link=SLOW).job == SPEC.name
