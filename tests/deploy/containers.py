"""The images of deploy/images, built for real, and a container of the chart's Deployment as a node would run it.

Needs root, buildah, podman and runc (Debian's packages of these names). The base image is that of the Dockerfiles;
where no registry answers, one of Debian bookworm with its own Python 3.11 stands in for it, made by debootstrap. pip
asks in the build where it asks here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.rendering import ROOT, Object

IMAGES = ROOT / "deploy/images"
PREFIX = "localhost/thinwire-test"
STAND_IN = f"{PREFIX}-base:bookworm"
LIMITS = ("--ulimit", "nofile=2000:2000", "--ulimit", "nproc=20000:20000")
"""Below those of a machine that may not raise its own."""
_PIP_SAYS = re.compile(r"(?:global|install|:env:)\.(cert|find-links|index-url|extra-index-url|timeout)='(.*)'")


def lacks() -> str | None:
    """What is missing here, in words."""
    if os.geteuid() != 0:
        return "root runs the containers"
    absent = [name for name in ("buildah", "podman", "runc") if shutil.which(name) is None]
    return f"apt-get install {' '.join(absent)}" if absent else None


def said(*command: str | Path, **how: Any) -> str:
    """What a command prints. Raises: AssertionError with all that it said, where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def podman(*words: str | Path) -> str:
    """What `podman ...` prints."""
    return said("podman", "--runtime", "runc", *words)


def base(folder: Path) -> str:
    """The image that the Dockerfiles begin from, or what stands in for it. folder: for what makes that."""
    named = re.search(r"^ARG PYTHON=(\S+)$", (IMAGES / "service.Dockerfile").read_text(), re.MULTILINE)
    assert named is not None
    for name in (f"docker.io/library/{named[1]}", STAND_IN):
        if subprocess.run(["podman", "image", "exists", name], check=False).returncode == 0:
            return name
    pulled = subprocess.run(["podman", "pull", "-q", f"docker.io/library/{named[1]}"], capture_output=True, check=False)
    if pulled.returncode == 0:
        return f"docker.io/library/{named[1]}"
    root = folder / "rootfs"
    said("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", root)
    said("sh", "-c", f"tar -C {root} -c . | podman import -q - {STAND_IN}")
    return STAND_IN


def build(image: str, folder: Path) -> str:
    """The name of the image service or worker, built as its Dockerfile stands. folder: for what the build is given."""
    file, mounts = _pip_of_here(folder)
    name = f"{PREFIX}-{image}:0.1.0"
    options = [f"--volume={path}:{path}:ro" for path in mounts] + [f"--volume={file}:/etc/pip.conf:ro"]
    options += ["--isolation=chroot", "--network=host", f"--build-arg=PYTHON={base(folder)}"]
    said("buildah", "bud", *options, "--file", IMAGES / f"{image}.Dockerfile", "--tag", name, ROOT)
    return name


def _pip_of_here(folder: Path) -> tuple[Path, set[str]]:
    """A pip.conf that says what pip is told here, and the files and folders that it names."""
    told: dict[str, str] = {}
    for line in said(sys.executable, "-m", "pip", "config", "list").splitlines():
        if found := _PIP_SAYS.fullmatch(line):
            told[found[1]] = found[2]
    file = folder / "pip.conf"
    file.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in told.items()), ""]))
    paths = {word.removeprefix("file://") for value in told.values() for word in value.split()}
    # A simple index on disk links to the files beside it.
    return file, {str(Path(one).parent) if one.endswith("/simple") else one for one in paths if Path(one).exists()}


def as_a_node_would(
    pod: Object,
    container: Object,
    folder: Path,
    objects: Sequence[Object] = (),
    changed: Mapping[str, str] | None = None,
) -> list[str]:
    """The words after `podman run` that give this container of the pod what Kubernetes gives it.

    folder: where its claims lie, kept, and its Secrets and ConfigMaps, which are of `objects`. changed: values of
    variables in the place of the manifest's. Raises: AssertionError for a field that this does not know, for nothing
    of a manifest may be left out unseen. Left to the caller: ports, probes, hooks, the account, the time to end.
    """
    known = {"name", "image", "imagePullPolicy", "command", "args", "env", "ports", "securityContext", "resources"}
    known |= {"volumeMounts", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle"}
    assert container.keys() <= known, container.keys() - known
    of_pod, own = dict(pod["securityContext"]), dict(container["securityContext"])
    read_only = ["--read-only", "--read-only-tmpfs=false"] if own.pop("readOnlyRootFilesystem", False) else []
    assert own.pop("allowPrivilegeEscalation") is False
    assert own.pop("capabilities") == {"drop": ["ALL"]}
    assert of_pod.pop("runAsNonRoot"), "root"
    assert of_pod.pop("seccompProfile") == {"type": "RuntimeDefault"}  # podman's own default is of the same source
    of_pod.pop("fsGroupChangePolicy", None)
    user, group, files = of_pod.pop("runAsUser"), of_pod.pop("runAsGroup"), of_pod.pop("fsGroup")
    assert (of_pod, own) == ({}, {})
    words = [*LIMITS, *read_only, "--cap-drop=all", "--security-opt=no-new-privileges"]
    words += [f"--user={user}:{group}", f"--group-add={files}"]
    limits = container["resources"]["limits"]
    words += [f"--memory={limits['memory'].removesuffix('i').lower()}", f"--cpus={_cores(limits['cpu'])}"]
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    for variable in container["env"]:
        value = (changed or {}).get(variable["name"], variable.get("value"))
        if value is None:
            of = variable["valueFrom"]["secretKeyRef"]
            value = by_name["Secret", of["name"]]["stringData"][of["key"]]
        words += ["--env", f"{variable['name']}={value}"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    for mount in container["volumeMounts"]:
        mode = "ro" if mount.get("readOnly") else "rw"
        words.append(_mounted(volumes[mount["name"]], mount["mountPath"], mode, folder, by_name, files))
    return [
        *words,
        f"--entrypoint={container['command'][0]}",
        "IMAGE",
        *container["command"][1:],
        *container.get("args", []),
    ]


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _mounted(
    volume: Object, at: str, mode: str, folder: Path, by_name: Mapping[tuple[str, str], Object], group: int
) -> str:
    """One volume; claims and files are of the pod's group, as a kubelet hands them to it."""
    if "emptyDir" in volume:
        return (
            f"--mount=type=tmpfs,destination={at},tmpfs-size={_bytes(volume['emptyDir']['sizeLimit'])},tmpfs-mode=1777"
        )
    source = folder / volume["name"]
    source.mkdir(exist_ok=True)
    if "persistentVolumeClaim" in volume:
        os.chown(source, 0, group)
        source.chmod(0o2775)
        return f"--volume={source}:{at}:{mode}"
    if "secret" in volume:
        data = by_name["Secret", volume["secret"]["secretName"]]["stringData"]
        wanted = {one["path"]: data[one["key"]] for one in volume["secret"]["items"]}
    else:
        wanted = by_name["ConfigMap", volume["configMap"]["name"]]["data"]
    for name, text in wanted.items():
        (source / name).write_text(text)
        os.chown(source / name, 0, group)
        (source / name).chmod(0o440)
    return f"--volume={source}:{at}:ro"


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG])i", quantity)
    assert found is not None, quantity
    return int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]]
