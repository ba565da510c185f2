"""What a job file asks of the boxes that it is to run on."""

from __future__ import annotations

from thinwire.contract.spec import ScriptSpec, TextFile, TrainSpec
from thinwire.tools.doctor.facts import Questions
from thinwire.tools.doctor.finding import Wishes


def asked_by(spec: TrainSpec | ScriptSpec) -> tuple[Questions, Wishes]:
    """What each box is to be asked for the job's sake, and what the boxes must have."""
    files = (spec.data.path,) if isinstance(spec, TrainSpec) and isinstance(spec.data, TextFile) else ()
    store = spec.checkpoint.store
    if store is not None and store.startswith("file://"):
        store = store.removeprefix("file://")
    questions = Questions(
        files=files,
        folders=(store,) if store is not None and "://" not in store else (),
        stores=(store,) if store is not None and "://" in store else (),
    )
    return questions, Wishes(interface=spec.network.interface, workers=spec.workers.min, device=spec.workers.device)
