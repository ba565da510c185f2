"""Nodes of Kubernetes are examined by a RayJob of so many pods: the template of jobs, with the doctor in it.

The pods are placed as those of a job would be, so what is found is what a job would find. What the doctor prints goes
to the head's own output as well, which the Kubernetes API gives to whoever may read logs of pods. The RayJob is removed
at the end, whatever that is.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from thinwire.cli.screen import note
from thinwire.contract.spec import JobSpec, read_spec
from thinwire.service.launch.driver import PYTHON
from thinwire.service.launch.kuberay.kube import Kube, KubeError
from thinwire.service.launch.kuberay.manifest import Attempt, Object, TemplateRefused, rayjob, read_template
from thinwire.service.launch.kuberay.reasons import why_waiting
from thinwire.service.launch.kuberay.states import cluster_of, is_over, status_of
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.tools.doctor.examination import LOG_MARK, Examination, Say
from thinwire.tools.doctor.facts import Questions

POLL_S: Final = 1.0
KEPT_S: Final = 600
"""The pods stay for so long after the doctor's end: its log is in one of them."""
MOST_LOG_BYTES: Final = 16 << 20
LOG_TRIES: Final = 5


class PodsNotExamined(Exception):
    """No examination came back; the message says why, and what to do."""


def examine_pods(
    kube: Kube,
    pods: int,
    questions: Questions,
    *,
    spec: JobSpec | None,
    template: Path | None,
    image: str | None,
    ports: Sequence[int],
    seconds: float,
    limit_s: float,
    say: Say,
    sleep: Callable[[float], None] = time.sleep,
) -> Examination:
    """Run the doctor in `pods` worker pods and the head. spec: of the job that they are to be like. limit_s: for all.

    Raises: PodsNotExamined.
    """
    asked = ["--questions", questions.model_dump_json(), "--seconds", f"{seconds:g}"]
    asked += ["--ports", ",".join(map(str, ports))]
    program = f"{PYTHON} -m thinwire.tools.doctor.on_ray {shlex.join(asked)}"
    like = {"name": "doctor", "steps": 1, "global_batch": pods, "optimizer": {"name": "adam"}}
    try:
        made = rayjob(
            read_template(template, image),
            Attempt(
                service_id="doctor",
                submission_id=f"doctor-{secrets.token_hex(4)}",
                # Of the head's first process: what the container prints. The exit status is the doctor's.
                entrypoint=f"bash -c {shlex.quote(f'set -o pipefail; {program} | tee /proc/1/fd/1')}",
                metadata={},
                spec=spec or read_spec({**like, "workers": {"min": pods, "max": pods}}),
                least=pods,
                most=pods,
                namespace=kube.namespace,
            ),
        )
        made["spec"]["ttlSecondsAfterFinished"] = KEPT_S
        name = made["metadata"]["name"]
        try:
            kube.create("rayjobs", made)
        except KubeError as error:
            if error.status is None:  # it may have been made
                with contextlib.suppress(KubeError):
                    kube.delete("rayjobs", name)
            raise
        try:
            return _seen(kube, name, limit_s, say, sleep)
        finally:
            try:
                kube.delete("rayjobs", name)
            except KubeError as error:  # what was found is worth more
                note(f"the RayJob {name} could not be removed ({error}); do it by: kubectl delete rayjob {name}")
    except (TemplateRefused, LauncherError) as error:
        raise PodsNotExamined(str(error)) from error


def _seen(kube: Kube, name: str, limit_s: float, say: Say, sleep: Callable[[float], None]) -> Examination:
    """Wait for the end, and read what was said."""
    until, reason, state = time.monotonic() + limit_s, None, LaunchState.PENDING
    while True:
        try:
            found = kube.get("rayjobs", name)
            if found is None:
                raise PodsNotExamined(f"the RayJob {name} of the doctor was deleted by somebody else")
            if is_over(found):
                break
            state = status_of(found).state
            if state is not LaunchState.RUNNING:
                reason = _reason(kube, found) or reason
        except KubeError as error:
            if not _passes(error):
                raise
            reason = str(error)
        left_s = until - time.monotonic()
        if left_s <= 0:
            why = f" ({reason})" if reason else ""
            raise PodsNotExamined(f"the RayJob {name} of the doctor is {state} after {limit_s:.0f} s{why}")
        say(f"the RayJob {name} is {state}" + (f": {reason}" if reason else ""), max(0.0, 1.0 - left_s / limit_s))
        sleep(POLL_S)
    say("", 1.0)
    log = _log(kube, found)
    said = [line for line in log.splitlines() if line.startswith(LOG_MARK)]
    status = status_of(found)
    if status.state is not LaunchState.SUCCEEDED or not said:
        last = "\n".join(log.splitlines()[-5:])
        raise PodsNotExamined(
            f"the RayJob {name} of the doctor ended as {status.state}: {status.message}. The image must have thinwire "
            f"in it. The end of the head's output:\n{last}"
        )
    return Examination.model_validate_json(said[-1].removeprefix(LOG_MARK))


def _passes(error: KubeError) -> bool:
    """May the API server answer otherwise a little later? So it is with no answer, with 429 and with its own faults."""
    return error.status is None or error.status == 429 or error.status >= 500


def _reason(kube: Kube, found: Object) -> str | None:
    """What its pods wait for, as far as one may ask."""
    try:
        cluster = cluster_of(found)
        pods = [] if cluster is None else kube.pods(f"ray.io/cluster={cluster}")
        return why_waiting(found, pods, kube.warnings(), [], time.time())
    except KubeError:
        return None


def _log(kube: Kube, found: Object) -> str:
    """Of the head, asked for a few times where the API server does not answer. Raises KubeError."""
    for _ in range(LOG_TRIES - 1):
        try:
            return _log_once(kube, found)
        except KubeError as error:
            if not _passes(error):
                raise
            time.sleep(POLL_S)
    return _log_once(kube, found)


def _log_once(kube: Kube, found: Object) -> str:
    heads = kube.pods(f"ray.io/cluster={cluster_of(found)},ray.io/node-type=head")
    if not heads:
        return ""
    return kube.log(heads[0]["metadata"]["name"], "ray-head", MOST_LOG_BYTES)
