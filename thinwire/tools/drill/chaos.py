"""The chaos drill: whatever may happen to a job happens, and each step of it is checked against an undisturbed run.

The job is traced (workers/telemetry/trace.py), disturbed by a seeded schedule (faults.py), then run again undisturbed
up to the same step; the verdict is made from both traces (verdict.py).

With root each worker has a host of its own, and the network between them is cut too. The lab around the drill:

    host 0      Ray's head, the membership, the driver, and the drill itself
    host 1...   a Ray node each, with room for one worker

There is one network, as in a cluster: a cut takes Ray's own traffic as well as the job's. Ray is set to tolerate it, as
docs/operations.md asks of everybody who starts it. Process numbers and addresses are the lab's, so the drill runs
inside, and asks for cuts over a pipe, since only the lab's owner can make them: a JSON object a line on its stdout, and
for those that ask for something a line on its stdin when it is done. When the owner ends, all ends.

    python -m thinwire.tools.drill.chaos WHAT       inside; WHAT: the fields of Chaos, and all addresses
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from thinwire.contract.reports import EventKind, Sample
from thinwire.tools.drill.asked import Chaos, DrillFailed, Found, Say, Verdict
from thinwire.tools.drill.cuts import HEAD, Cuts, Direction, Later, Network
from thinwire.tools.drill.faults import TICK_S, Faults
from thinwire.tools.drill.job import START_S, Job, Left, made_by, own_ray, small_gpt
from thinwire.tools.drill.run import local_steps_lost
from thinwire.tools.drill.survivors import Survivors, has_committed, lives
from thinwire.tools.drill.verdict import judge, read
from thinwire.tools.lab import Lab, LabError, LabSpec
from thinwire.tools.lab.lab import require_machine
from thinwire.tools.lab.processes import HostProcess, readable
from thinwire.workers.telemetry.trace import FOLDER

logger = logging.getLogger(__name__)

FIGURES_NAME = "chaos.json"
SETTLE_S = 120.0
"""After the last fault: so long at most until the next step. More than a lease, which all may have to wait for."""
STEPS_AFTER = 20
OFTEN = {"overlap": True, "checkpoint": {"every_steps": 50}, "evaluation": {"every_steps": 100, "windows": 64}}
"""Beside what every drill's job is: a short run, too, is to be disturbed in saves, and to go on from one."""
RATE_MBIT = 10_000.0
"""Not what is tried here: a rate that no worker of a drill comes near."""
PATIENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",  # as service/launch has it
    "RAY_health_check_failure_threshold": "20",  # times the 3 s between two checks
}
"""How long Ray tolerates a node that is cut off: longer than the lease of a member, and than the longest cut."""
HURRY_S = 45
"""So long each host goes before all else on this machine, where the kernel shares it out by sessions: a node ends where
its agent is not there after 15 s, which Ray lets nobody change, and a loaded machine takes longer."""
RAY_FOLDER = "/tmp/ray"
"""Where Ray keeps what is of one machine: each host has a folder of its own there."""


_BEGIN = f"""
if echo -15 > /proc/self/autogroup; then (sleep {HURRY_S}; echo 0 > /proc/$$/autogroup) & fi 2> /dev/null
mount --bind "$0" {RAY_FOLDER} && exec "$@"
"""
"""What a host does first. The folder is mounted there for this host alone, until the lab ends."""


def run(chaos: Chaos, say: Say) -> Found:
    """Run both jobs; figures and run folders are in chaos.out. Takes about twice chaos.minutes, or with `beside` once.

    Raises: DrillFailed where the job ended, or makes no step any more; OSError.
    """
    without = why_no_cuts()
    if without is None:
        found, words = _in_a_lab(chaos, say)
    else:
        with own_ray(chaos.workers) as address:
            found, words = disturb_and_judge(chaos, say, address)
    found = replace(found, without_cuts=without)
    whole = {
        "chaos": {**asdict(chaos), "out": "", "beside": chaos.beside and chaos.beside.name},
        **made_by(),
        "figures": found.as_json(),
        "faults": words,
    }
    (chaos.out / FIGURES_NAME).write_text(json.dumps(whole, indent=2) + "\n")
    return found


def disturb_and_judge(chaos: Chaos, say: Say, address: str, network: Network | None = None) -> tuple[Found, list[str]]:
    """On the Ray at that address. What was found, and each fault in words with its second. Raises: as run()."""
    spec = small_gpt(chaos.workers, chaos.optimizer, shadow=chaos.shadow) | OFTEN
    other = None if chaos.beside is None else undisturbed_in(chaos.beside, spec)
    job = _traced(Job(chaos.out / f"chaos-{time.time_ns() // 10**6}", spec, address))
    later = Later()
    cuts = None if network is None else Cuts(network, range(chaos.workers + 1), later)
    faults = Faults(job, chaos.workers, chaos.seed, later, cuts, kill_all=chaos.kill_all)
    survivors = Survivors()
    with job:
        living = _disturb(chaos, job, faults, survivors, say)
    traces = read(job.run_dir / FOLDER)
    last = max((one["step"] for process in traces for one in process.commits), default=0)
    if other is None:
        with _traced(Job(chaos.out / f"undisturbed-{time.time_ns() // 10**6}", spec, address)) as other:
            other.until_step(last, say)
    verdict = judge(traces, read(other.run_dir / FOLDER), faults.touches, living)
    found = _found(chaos, job, other, faults, survivors, verdict)
    return found, [f"{at - faults.done[0][0]:.1f} s: {words}" for at, words in faults.done]


def undisturbed_in(folder: Path, spec: dict[str, Any]) -> Left:
    """The longest undisturbed run there of the same job; whether replicas of server errors are kept changes nothing.

    Raises: DrillFailed where there is none.
    """
    found = [Left(file.parent) for file in sorted(folder.glob(f"undisturbed-*/{FOLDER}/"))]
    same = []
    for run in found:
        try:
            if _without_shadow(run.spec) == _without_shadow(spec):
                same.append(run)
        except (OSError, ValueError) as error:
            logger.warning("undisturbed_unreadable path=%s reason=%s", run.run_dir, error)
    if not same:
        raise DrillFailed(
            f"{folder} holds no undisturbed run of this job ({len(found)} of others): name the --out of an earlier "
            "--chaos with the same --workers and --optimizer, or leave --beside out to train one"
        )
    return max(same, key=lambda run: max((sample.step for sample in run.samples()), default=0))


def _without_shadow(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "workers": {**spec["workers"], "shadow": None}}


def _traced(job: Job) -> Job:
    (job.run_dir / FOLDER).mkdir()
    return job


def _disturb(chaos: Chaos, job: Job, faults: Faults, survivors: Survivors, say: Say) -> list[int]:
    """Returns the pids that are alive at the end."""
    job.until_all_train(chaos.workers, say)
    began = time.monotonic()
    until = began + 60 * chaos.minutes
    try:
        while (now := time.monotonic()) < until:
            job.check()
            if (done := faults.look()) is not None:
                logger.info("fault %s", done)
                say(done, (now - began) / (60 * chaos.minutes))
            survivors.look(lambda: _training(job))
            time.sleep(TICK_S)
    finally:
        faults.end()
    _goes_on(job, faults, say)
    return _alive(job)


def _goes_on(job: Job, faults: Faults, say: Say) -> None:
    """Raises: DrillFailed where no step is made after the last fault: the job has come to a standstill."""
    before = seen = _last_step(job)
    until = time.monotonic() + SETTLE_S
    while seen < before + STEPS_AFTER:
        job.check()
        if (now := _last_step(job)) != seen:  # fewer, where it has begun again from a checkpoint
            seen, until = now, time.monotonic() + SETTLE_S
        if time.monotonic() > until:
            last = faults.done[-1][1] if faults.done else "none"
            raise DrillFailed(
                f"the job stands still: no step in {SETTLE_S:g} s after the last fault ({last}), or after step {seen}; "
                f"the membership says {job.members()}"
            )
        say("after the last fault", 1.0)
        time.sleep(0.5)


def _last_step(job: Job) -> int:
    samples = job.samples()
    return samples[-1].step if samples else 0


def _alive(job: Job) -> list[int]:
    """The processes of the trace that have not ended."""
    pids = [int(file.stem) for file in (job.run_dir / FOLDER).glob("*.jsonl")]
    return [pid for pid in pids if lives(pid)]


def _training(job: Job) -> list[int]:
    """Those of them that have committed a step: before that, a process grows by what it still loads and connects."""
    return [pid for pid in _alive(job) if has_committed(job.run_dir / FOLDER / f"{pid}.jsonl")]


def _found(chaos: Chaos, job: Job, other: Left, faults: Faults, survivors: Survivors, verdict: Verdict) -> Found:
    ours, theirs = _losses(job.samples()), _losses(other.samples())
    last, events = max(set(ours) & set(theirs), default=None), job.events()
    violations = tuple(f"seed {chaos.seed}: {words}" for words in verdict.violations)
    return Found(
        **(asdict(verdict) | {"violations": violations}),
        minutes=chaos.minutes,
        faults=dict(sorted(faults.counts.items())),
        resumes=sum(event.kind == EventKind.RESUMED for event in events),
        local_steps_lost=local_steps_lost(events),
        loss=None if last is None else ours[last],
        loss_undisturbed=None if last is None else theirs[last],
        grown=survivors.grown(),
    )


def _losses(samples: list[Sample]) -> dict[int, float]:
    return {one.step: one.validation_loss for one in samples if one.validation_loss is not None and one.step > 0}


def why_no_cuts() -> str | None:
    """Why the network cannot be cut here, in words; None where it can."""
    try:
        require_machine()
        with Lab(LabSpec(hosts=1, rate_mbit=RATE_MBIT)):
            return None
    except LabError as error:
        return str(error)


def _in_a_lab(chaos: Chaos, say: Say) -> tuple[Found, list[str]]:
    """The drill, in a lab: what it found, and its faults in words. Raises: DrillFailed; OSError."""
    try:
        with Lab(LabSpec(hosts=chaos.workers + 1, rate_mbit=RATE_MBIT)) as lab, ExitStack() as files:
            return _Hosts(lab, chaos, say, files).serve()
    except LabError as error:
        raise DrillFailed(f"the lab of the drill: {error}") from error


class _Hosts:
    """Serves what the drill inside asks for."""

    def __init__(self, lab: Lab, chaos: Chaos, say: Say, files: ExitStack) -> None:
        self._lab, self._chaos, self._say, self._files = lab, chaos, say, files
        self._environment = _environment(os.environ)
        self._nodes: dict[int, HostProcess] = {}
        self._restarts: list[str] = []
        self._folder = chaos.out.resolve() / "hosts"
        self._folder.mkdir()
        os.makedirs(RAY_FOLDER, mode=0o777, exist_ok=True)
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        beside = None if chaos.beside is None else str(chaos.beside.resolve())
        paths = {"out": str(chaos.out.resolve()), "beside": beside}
        words = json.dumps({**asdict(chaos), **paths, "addresses": lab.addresses})
        self._drill = self._start(
            HEAD, [sys.executable, "-m", "thinwire.tools.drill.chaos", words], stdin=answered, stdout=ask
        )
        os.close(ask)
        os.close(answered)
        self._asked = asked
        self._answer = self._files.enter_context(os.fdopen(answer, "w"))
        self._files.callback(os.close, asked)

    def serve(self) -> tuple[Found, list[str]]:
        """Until it has found what it finds. Raises: DrillFailed."""
        for asked in self._questions():
            match asked:
                case {"say": [words, done]}:
                    self._say(words, done)
                case {"join": host, "head": address}:
                    self._head = address
                    self._nodes[host] = self._node(host)
                case {"deliver": directions, "arrives": arrives}:
                    self._lab.deliver([(a, b) for a, b in directions], arrives=arrives)
                    print("done", file=self._answer, flush=True)
                case {"failed": words}:
                    raise DrillFailed(words)
                case {"found": found, "faults": faults}:
                    return Found.of(found), [*faults, *self._restarts]
        raise DrillFailed(f"the drill inside the lab ended with {self._drill.wait()}:\n{self._end_of_log(HEAD)}")

    def _questions(self) -> Iterator[Any]:
        """Meanwhile a node that ends is started again."""
        text = b""
        while True:
            nodes = {process.fileno(): host for host, process in self._nodes.items()}
            ready = readable([self._asked, *nodes], None)
            for fd in ready & nodes.keys():
                host = nodes[fd]
                if (code := self._nodes[host].poll()) is not None:
                    words = f"Ray's node of host {host} ended with {code}, and is started again"
                    logger.warning("%s", words)
                    self._restarts.append(words)
                    self._nodes[host] = self._node(host)
            if self._asked not in ready:
                continue
            read = os.read(self._asked, 1 << 16)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            yield from map(json.loads, lines)

    def _node(self, host: int) -> HostProcess:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={self._head}"]
        # Every host sees all GPUs of the machine: that many workers would share them. So the drill is on CPUs here.
        how = f"--num-cpus=1 --num-gpus=0 --object-store-memory={100 * 2**20} --disable-usage-stats"
        return self._start(host, [*command, f"--node-ip-address={self._lab.addresses[host]}", *how.split()])

    def _start(self, host: int, command: list[str], stdin: int | None = None, stdout: int | None = None) -> HostProcess:
        own = self._folder / str(host)
        own.mkdir(exist_ok=True)
        begin = ["sh", "-c", _BEGIN, str(own)]
        with self._log(host).open("ab") as log:
            return self._lab.start(
                host,
                [*begin, *command],
                self._environment,
                stdin=stdin,
                stdout=log.fileno() if stdout is None else stdout,
                stderr=log.fileno(),
            )

    def _log(self, host: int) -> Path:
        return self._folder / f"{host}.log"

    def _end_of_log(self, host: int) -> str:
        return "\n".join(self._log(host).read_text(errors="replace").splitlines()[-15:])


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    """Of a Ray of the drill's own, whatever else this machine runs."""
    return {
        **{name: value for name, value in base.items() if not name.startswith("RAY_")},
        **PATIENT,
        "RAY_AUTH_MODE": "token",  # where a user has a token, ray.init() takes it and ray start does not
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Both are 30 s by default, which a loaded two-core machine may exceed.
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_agent_register_timeout_ms": "120000",
    }


class _Outside:
    """The owner of the lab. Any thread may call. The network of the drill."""

    def __init__(self, says: TextIO, hears: TextIO, addresses: Sequence[str]) -> None:
        self._says, self._hears, self._addresses = says, hears, list(addresses)
        self._lock = threading.Lock()

    def number_of(self, address: str) -> int:
        """The host that has this address."""
        return self._addresses.index(address)

    def deliver(self, directions: Collection[Direction], *, arrives: bool) -> None:
        """Cut these directions, or mend them. Raises: DrillFailed where nobody does it."""
        with self._lock:
            self._write(deliver=sorted(directions), arrives=arrives)
            if not self._hears.readline():
                raise DrillFailed("the owner of the lab is gone: look at what it said")

    def say(self, words: str, done: float) -> None:
        """To the person who waits for the drill."""
        self.send(say=[words, done])

    def send(self, **words: Any) -> None:
        """Something that has no answer."""
        with self._lock:
            self._write(**words)

    def _write(self, **words: Any) -> None:
        self._says.write(json.dumps(words) + "\n")
        self._says.flush()


def main() -> None:
    """The drill inside the lab, on the head's host. What is printed otherwise goes to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    fields = json.loads(sys.argv[1])
    addresses = fields.pop("addresses")
    paths = {name: Path(fields[name]) for name in ("out", "beside") if fields[name] is not None}
    chaos = Chaos(**{**fields, **paths})
    outside = _Outside(os.fdopen(os.dup(1), "w"), sys.stdin, addresses)
    os.dup2(2, 1)
    try:
        with own_ray(0, addresses[HEAD]) as address:
            for host in range(HEAD + 1, len(addresses)):  # one by one: each takes all of a core to start
                outside.send(join=host, head=address)
                _wait_for_nodes(host + 1)
            found, faults = disturb_and_judge(chaos, outside.say, address, outside)
    except DrillFailed as error:
        outside.send(failed=str(error))
    else:
        outside.send(found=asdict(found), faults=faults)


def _wait_for_nodes(number: int) -> None:
    import ray

    until = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < number:
        if time.monotonic() > until:
            raise DrillFailed(
                f"fewer than {number} nodes of Ray in {START_S:g} s: see hosts/*.log in the drill's folder"
            )
        time.sleep(0.2)


if __name__ == "__main__":
    main()
