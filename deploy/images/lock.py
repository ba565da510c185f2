"""Write what the tests and the images are installed from: the versions below the line in constraints.txt, and for each
image its lock, the same versions with the hashes of their files.

    pip install uv
    python deploy/images/lock.py              what pyproject.toml asks for, else the versions that there are
    python deploy/images/lock.py --upgrade    the newest that the bounds above the line allow

Then install constraints.txt (`make` does) and run the tests: one fails where other versions are installed than the
images have. For Linux on x86-64, and Python 3.11. torch has a lock of its own for each device: its CUDA build brings
NVIDIA's packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

IMAGES = Path(__file__).parent
ROOT = IMAGES.parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
LINE = "# Written by deploy/images/lock.py: what the images have, and so what the tests run with.\n"
TOOLS = ("cyclonedx-bom", "setuptools>=77")
"""What makes an image and stays outside of it: OWASP's own tool, which writes what is in it as CycloneDX, and what
builds the wheel of thinwire."""
EXTRAS = {"service": ("service", "postgresql", "kubernetes", "oidc"), "worker": ("worker", "s3")}
CPU_HASHES = {"2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}
"""Of torch for CPUs, by version: the sha256 that PyTorch's own index names for CPython 3.11 on Linux on x86-64. PyPI,
which the other hashes are of, does not have that build."""
OF_TORCH = ("torch", "triton", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit")
"""And all that begins with nvidia-."""


def compiled(source: str, options: Sequence[str], pins: str) -> str:
    """What uv resolves, as a list of requirements. pins: kept where nothing asks for others."""
    with tempfile.TemporaryDirectory() as folder:
        output, asked = Path(folder) / "out.txt", Path(folder) / "asked.in"
        output.write_text(pins)
        asked.write_text(source)
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"]
        command += ["--python-platform", "x86_64-manylinux_2_28", "--output-file", str(output), *options]
        subprocess.run([*command, str(asked) if source else str(ROOT / "pyproject.toml")], check=True, cwd=ROOT)
        return output.read_text()


def of_torch(line: str) -> bool:
    """Is it of one device's build?"""
    name = line.partition("==")[0]
    return name in OF_TORCH or name.startswith("nvidia-")


def entries(text: str) -> list[str]:
    """The requirements of a list, each with the lines of its hashes."""
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith((" ", "\t")):
            found[-1] += line
        elif line.strip() and not line.startswith("#"):
            found.append(line)
    return found


def main(upgrade: Sequence[str]) -> None:
    """Write all of them."""
    bounds, _, pins = CONSTRAINTS.read_text().partition(LINE)
    with tempfile.TemporaryDirectory() as folder:
        bound = Path(folder) / "bounds.txt"
        bound.write_text(bounds)
        extras = [word for names in EXTRAS.values() for name in names for word in ("--extra", name)]
        chosen = entries(compiled("", [*extras, *upgrade, "--constraint", str(bound)], pins))
        bound.write_text(bounds + "".join(chosen))
        CONSTRAINTS.write_text(
            bounds + LINE + "".join(line for line in chosen if not of_torch(line) or "torch=" in line)
        )
        locked = {}
        for image, names in EXTRAS.items():
            extras = [word for name in names for word in ("--extra", name)]
            locked[image] = entries(compiled("", [*extras, "--generate-hashes", "--constraint", str(bound)], ""))
    write("service", locked["service"], f"thinwire[{','.join(EXTRAS['service'])}]")
    write("worker", [one for one in locked["worker"] if not of_torch(one)], "thinwire[worker,s3] without torch")
    write("torch-cuda", list(filter(of_torch, locked["worker"])), "torch as PyPI has it, for CUDA")
    (cpu,) = (one.split(" ")[0] for one in locked["worker"] if one.startswith("torch=="))
    write("torch-cpu", [of_cpu(cpu.partition("==")[2])], "torch as PyTorch's own index has it, for CPUs")
    tools = (IMAGES / "tools.lock").read_text() if (IMAGES / "tools.lock").exists() else ""
    options = ["--generate-hashes", *upgrade]
    write("tools", entries(compiled("\n".join(TOOLS), options, tools)), " and ".join(TOOLS))


def of_cpu(version: str) -> str:
    """The entry of torch for CPUs. Raises: SystemExit where nobody has looked its hash up."""
    if version not in CPU_HASHES:
        raise SystemExit(
            f"torch {version}: PyPI does not have the build for CPUs. Look up the sha256 of torch-{version}+cpu-cp311-"
            "cp311-manylinux_2_28_x86_64.whl at https://download.pytorch.org/whl/cpu/torch/ (it is in the link), and "
            "add it to CPU_HASHES in deploy/images/lock.py"
        )
    return f"torch=={version} \\\n    --hash=sha256:{CPU_HASHES[version]}\n"


def write(name: str, lines: Sequence[str], what: str) -> None:
    """One lock."""
    (IMAGES / f"{name}.lock").write_text(f"# Written by lock.py: {what}.\n{''.join(lines)}")


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if word == "--upgrade"])
