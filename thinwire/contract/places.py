"""How many workers find a place in a cluster: what the service admits by, and a driver once more. Torch-free.

A worker takes one of Ray's CPUs, and a GPU where its job takes GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.contract.spec import Workers


@dataclass(frozen=True, slots=True)
class Room:
    """What a cluster has for workers, and what others than this service's jobs hold of it.

    cores: of the one machine, where Ray counts more CPUs than it has.
    """

    cpus: int
    gpus: int
    others_cpus: int = 0
    others_gpus: int = 0
    cores: int | None = None


def uses_gpus(workers: Workers, gpus: float) -> bool:
    """Whether the job's workers take a GPU each, in a cluster that has so many."""
    return workers.device == "gpu" or (workers.device == "auto" and gpus >= workers.min * workers.per_box)


def never_fits(workers: Workers, room: Room) -> tuple[str, str | int, str] | None:
    """The field by which workers.min never finds its places, its value and what is allowed; None where it fits."""
    if workers.device == "gpu" and not room.gpus:
        return "workers.device", workers.device, "cpu or auto: the cluster has no GPU, as its Ray counts them"
    each = workers.per_box
    if workers.device == "gpu" and workers.min * each > room.gpus:
        takes = "one" if each == 1 else f"workers.per_box = {each}"
        words = (
            f"at most {room.gpus // each} with workers.device = gpu: the cluster has {room.gpus} GPUs, and each worker "
            f"takes {takes}"
        )
        return "workers.min", workers.min, f"{words}; lower workers.min, add machines with GPUs, or use device: cpu"
    if workers.min * each > room.cpus:
        counted = f" ({room.cores} cores)" if room.cores is not None and room.cores != room.cpus else ""
        takes = "a CPU" if each == 1 else f"workers.per_box = {each} CPUs"
        words = (
            f"at most {room.cpus // each}: each worker takes {takes} of Ray's, and the cluster has {room.cpus}{counted}"
        )
        return "workers.min", workers.min, f"{words}; lower workers.min, or add machines"
    return None
