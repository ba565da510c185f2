"""Nodes of Kubernetes are examined by a RayJob of so many pods: the template of jobs, with the doctor in it.

The pods are placed as those of a job would be, so what is found is what a job would find. What the doctor prints goes
to the head's own output as well, which the Kubernetes API gives to everybody who may read logs of pods. The RayJob is
removed at the end, whatever that is.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from thinwire.contract.spec import JobSpec, read_spec
from thinwire.service.launch.kuberay.kube import Kube, KubeError
from thinwire.service.launch.kuberay.manifest import Attempt, TemplateRefused, rayjob, read_template
from thinwire.service.launch.kuberay.pods import Object
from thinwire.service.launch.kuberay.states import cluster_of, is_over, status_of, why_waiting
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.tools.doctor.clusters import POLL_S, NotExamined, Order, read
from thinwire.tools.doctor.examination import Examination

KEPT_S: Final = 600
"""The pods stay for so long after the doctor's end: its log is in one of them."""
MOST_LOG_BYTES: Final = 16 << 20
LOG_TRIES: Final = 5

T = TypeVar("T")


def examine_pods(
    kube: Kube,
    pods: int,
    order: Order,
    *,
    spec: JobSpec | None,
    template: Path | None,
    image: str | None,
    added: Path | None = None,
) -> Examination:
    """Run the doctor in `pods` worker pods and the head.

    spec: of the job that they are to be like. added: a file with what is added to the pods.
    Raises: NotExamined.
    """
    like = {"name": "doctor", "steps": 1, "global_batch": pods, "optimizer": {"name": "adam"}}
    try:
        made = rayjob(
            read_template(template, image, added),
            Attempt(
                service_id="doctor",
                submission_id=f"doctor-{secrets.token_hex(4)}",
                # Of the head's first process: what the container prints. The exit status is the doctor's.
                entrypoint=f"bash -c {shlex.quote(f'set -o pipefail; {order.program()} | tee /proc/1/fd/1')}",
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
            return _seen(kube, name, order)
        finally:
            try:
                kube.delete("rayjobs", name)
            except KubeError as error:  # what was found is worth more
                sys.stderr.write(f"the RayJob {name} is left ({error}); remove it by: kubectl delete rayjob {name}\n")
    except (TemplateRefused, LauncherError) as error:
        raise NotExamined(str(error)) from error


def _seen(kube: Kube, name: str, order: Order) -> Examination:
    """Wait for the end, and read what was said."""
    what = f"the RayJob {name}"
    known, reason, job = LaunchState.PENDING, None, None

    def look() -> tuple[LaunchState, str | None]:
        nonlocal known, reason, job
        try:
            job = kube.get("rayjobs", name)
            if job is None:
                raise NotExamined(f"{what} of the doctor was deleted by somebody else")
            status = status_of(job)
            if is_over(job):
                return status.state, None
            # The end that Ray has said, and KubeRay has not noted yet, comes with the next look.
            known = status.state
            if known is not LaunchState.RUNNING:
                reason = _reason(kube, job) or reason
        except KubeError as error:
            if not _passes(error):
                raise
            reason = str(error)
        return known, reason

    state = order.wait(look, what)
    assert job is not None
    hint = f": {status_of(job).message}. The image must have thinwire in it."
    return read(_patiently(lambda: _log(kube, job), order.sleep), state, what, hint)


def _patiently(call: Callable[[], T], sleep: Callable[[float], None]) -> T:
    """Again a few times where the API server does not answer. Raises KubeError."""
    for _ in range(LOG_TRIES - 1):
        try:
            return call()
        except KubeError as error:
            if not _passes(error):
                raise
            sleep(POLL_S)
    return call()


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
    """Of the head."""
    heads = kube.pods(f"ray.io/cluster={cluster_of(found)},ray.io/node-type=head")
    if not heads:
        return ""
    return kube.log(heads[0]["metadata"]["name"], "ray-head", MOST_LOG_BYTES)
