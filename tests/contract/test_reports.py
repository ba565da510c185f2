import subprocess
import sys
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from thinwire.contract.metric_names import PHASES
from thinwire.contract.reports import HEARTBEAT_S, LEASE_S, Event, Failure, Sample, Telemetry, WorkerRegistration


def sample(**changes: Any) -> Sample:
    return Sample.model_validate({"step": 1, "phase": "warmup", "time": 1.0} | changes)


def test_a_batch_survives_the_wire() -> None:
    batch = Telemetry(
        attempt=1,
        samples=[sample(loss=0.1 + 0.2, payload_bytes=2**40)],
        events=[Event(kind="resumed", step=0, time=1.0, fields={"from": 50, "why": None})],
        summary={"loss": {"train_last": 0.3}},
        failure=Failure(kind="DataError", message="what, value, what to do"),
    )
    assert Telemetry.model_validate_json(batch.model_dump_json()) == batch


@pytest.mark.parametrize("name", ["loss", "validation_loss"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_loss_that_is_not_finite_is_kept_as_none_and_survives_the_wire(name: str, value: float) -> None:
    made = sample(**{name: value})
    assert getattr(made, name) is None
    assert Sample.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize("name", ["lr", "step_seconds", "samples_per_second", "compression_ratio", "time"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_number_that_json_cannot_carry_is_refused_at_once(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        sample(**{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"phase": "frozen"},
        {"payload_bytes": -1},
        {"world_size": 0},
        {"extra": 1},
        {"seconds_by_part": {"wire": -1.0}},
    ],
)
def test_sample_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        sample(**changes)


def test_a_round_is_skipped_by_who_has_peers_and_sends_nothing() -> None:
    skipped = {"world_size": 2, "payload_bytes": 0}
    assert sample(**skipped).skipped_round
    others: list[dict[str, int]] = [{"step": 0}, {"payload_bytes": 1}, {"world_size": 1}]
    assert not any(sample(**skipped | other).skipped_round for other in others)


def test_registration_belongs_to_an_attempt() -> None:
    with pytest.raises(ValidationError):
        WorkerRegistration(address="a:1", attempt=0, pid=1, node="n")


def test_phases_are_those_of_the_metrics() -> None:
    assert get_args(Sample.model_fields["phase"].annotation) == PHASES


def test_lease_outlives_two_lost_heartbeats() -> None:
    assert LEASE_S >= 3 * HEARTBEAT_S


def test_contract_modules_import_nothing_heavy() -> None:
    program = (
        "import sys, thinwire.contract.spec, thinwire.contract.metric_names, thinwire.contract.reports; "
        "print(*({'torch', 'ray', 'numpy', 'matplotlib', 'prometheus_client'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""
