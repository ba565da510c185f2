"""The site: the documents as they are, and a reference made of what there is. `make site` calls it.

    python docs/site/build.py OUT

Sphinx with MyST reads the documents in the tree that the repository has, so that links among them are those that GitHub
follows. What they name beside themselves is laid out too: a file of code becomes a page, a folder a list of its files.
The reference is of this version's own declarations: commands, job files, REST, metrics. Nothing is loaded from
elsewhere, and the search works from a folder. A link that leads nowhere fails the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
PARTS = {
    "Beginning": ("first-steps", "choosing", "when-not-to-compress", "glossary"),
    "Moving over": ("own-loop", "from-deepspeed", "from-ddp-hooks", "from-torchft"),
    "Training": ("your-script", "what-you-may-do", "integrations", "fine-tuning", "torchtitan", "sharded", "gpu"),
    "Running": ("submitting", "page", "operations", "own-machines", "plain-boxes", "kubernetes", "upgrades"),
    "How it works": ("architecture", "algorithms", "local-steps", "elasticity", "ledger", "speed", "gpu-kernels"),
    "Measuring": ("claims", "plan", "what-if", "doctor", "lab", "papers"),
}
"""Of the documents in docs/, in the order of the menu; what is in none comes last."""
REFERENCE = ("cli", "jobs", "rest", "metrics")
FIRST = (ROOT / "README.md", ROOT / "CHANGELOG.md")
"""Pages with a place in the menu that are not in docs/."""
LONGEST = 200_000
"""Characters of a file that is shown as a page; a longer one is a file to load down."""


def main(out: Path) -> int:
    """Make the site in the folder `out`, in the place of what is there. Returns the exit code of Sphinx."""
    from sphinx.cmd.build import main as sphinx

    with tempfile.TemporaryDirectory(prefix="thinwire-site-") as folder:
        source, made = Path(folder) / "source", Path(folder) / "made"
        lay_out(source)
        code = sphinx(
            ["-b", "html", "-W", "--keep-going", "-q", "-c", str(Path(__file__).parent), str(source), str(made)]
        )
        if code:
            return int(code)
        shutil.rmtree(made / ".doctrees", ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)
    return 0


def lay_out(source: Path) -> None:
    """All pages, in Markdown, below `source`, where the repository has them."""
    waiting, seen = [*sorted((ROOT / "docs").glob("*.md")), *FIRST], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        at = source / path.relative_to(ROOT)
        if path.is_dir():
            _write(at / "index.md", _listing(path), in_menu=False)
            waiting += [one for one in _files(path) if one.suffix == ".md"]
        elif path.suffix == ".md":
            found, text = linked(path)
            waiting += found
            _write(
                at,
                text,
                in_menu=path.parent == ROOT / "docs"
                or (path.name in ("README.md", "CHANGELOG.md") and path.parent == ROOT),
            )
        elif path.suffix == ".svg" or not _is_shown(path):
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, at)
        else:
            _write(at.with_name(at.name + ".md"), _code(path), in_menu=False)
    for name, text in reference().items():
        _write(source / "reference" / f"{name}.md", text)
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    _write(source / "index.md", _index(documents))


def linked(document: Path) -> tuple[list[Path], str]:
    """What a document links to in the tree, and its text with those links as the site has them.

    Raises: FileNotFoundError for a link that leads nowhere.
    """
    found: list[Path] = []

    def turned(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        name, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:") or not name:
            return match[0]
        path = Path(os.path.normpath(document.parent / name))
        if not path.exists() or not path.is_relative_to(ROOT):
            raise FileNotFoundError(f"{document.relative_to(ROOT)} links to {link}, which is not there")
        path = ROOT / path.resolve().relative_to(ROOT)  # thinwire/comm is a link to comm
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if path != ROOT:
            found.append(path)
        target = os.path.relpath(path, document.parent)
        if path == ROOT:
            target = os.path.relpath(ROOT / "README.md", document.parent)
        elif path.is_dir():
            target += "/index.md"
        elif path.suffix != ".md" and not mark and path.suffix != ".svg" and _is_shown(path):
            target, anchor = target + ".md", ""
        return f"{mark}[{words}]({target}{'#' + anchor if anchor else ''})"

    pieces = FENCE.split(document.read_text())
    # What stands between marks of code is kept; but a link may have code in its words.
    text, code = "", [piece for piece in pieces if FENCE.fullmatch(piece)]
    text = "".join(f"\x00{code.index(piece)}\x00" if FENCE.fullmatch(piece) else piece for piece in pieces)
    text = LINK.sub(turned, text)
    return found, re.sub(r"\x00(\d+)\x00", lambda match: code[int(match[1])], text)


def _is_shown(path: Path) -> bool:
    try:
        return len(path.read_text()) <= LONGEST
    except UnicodeDecodeError:
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith((".", "__")))


def _listing(folder: Path) -> str:
    lines = [f"# {folder.relative_to(ROOT)}/", ""]
    for path in _files(folder):
        about = _about(path)
        lines.append(f"* `{path.name}`" + (f": {about}" if about else ""))
    return "\n".join(lines) + "\n"


def _about(path: Path) -> str:
    """The first line of a docstring, as text."""
    if path.suffix != ".py":
        return ""
    match = re.match(r'\s*"""(.*?)(?:"""|$)', path.read_text(), flags=re.MULTILINE)
    return re.sub(r"([\[\]*_<>`\\$])", r"\\\1", match[1].strip()) if match else ""


def _code(path: Path) -> str:
    fence = "`" * 12
    return f"# {path.relative_to(ROOT)}\n\n{fence}text\n{path.read_text()}\n{fence}\n"


def _write(path: Path, text: str, *, in_menu: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if in_menu else f"---\norphan: true\n---\n\n{text}")


def _tree(head: str, pages: list[str]) -> str:
    return f"```{{toctree}}\n:caption: {head}\n:maxdepth: 1\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def _index(documents: set[str]) -> str:
    """The first page: what it is, and the menu."""
    known = {name for names in PARTS.values() for name in names}
    missing = known - documents
    if missing:
        raise FileNotFoundError(f"docs/ has no {sorted(missing)}, which PARTS names")
    trees = [_tree(head, [f"docs/{name}" for name in names]) for head, names in PARTS.items()]
    trees.append(_tree("Reference", [f"reference/{name}" for name in REFERENCE]))
    trees.append(_tree("More", [*(f"docs/{name}" for name in sorted(documents - known)), "README", "CHANGELOG"]))
    heads = [
        f"* **{head}:** " + ", ".join(f"[{name}](docs/{name}.md)" for name in names) for head, names in PARTS.items()
    ]
    text = (
        "# Thinwire\n\nThinwire trains PyTorch models over ordinary Ethernet: its optimizers send one bit for each "
        "value where DistributedDataParallel sends 32, and send what one bit leaves out in later steps.\n\n"
        "![A job goes to the service, which has Ray start a worker on each machine](docs/overview.svg)\n\n"
    )
    return (
        text
        + "\n".join(heads)
        + "\n* **Reference:** [commands](reference/cli.md), [job files](reference/jobs.md), "
        + ("[REST](reference/rest.md), [metrics](reference/metrics.md)\n\n" + "\n".join(trees))
    )


def reference() -> dict[str, str]:
    """The pages of the reference, by name."""
    makers: dict[str, Callable[[], str]] = {"cli": _commands, "jobs": _jobs, "rest": _rest, "metrics": _metrics}
    return {name: makers[name]() for name in REFERENCE}


def _commands() -> str:
    from thinwire.cli import exit_codes
    from thinwire.cli.main import app

    lines = ["# Commands", "", *_command(typer.main.get_command(app), "thinwire")]
    lines += ["## Exit codes", "", "| code | |", "|---|---|"]
    lines += [f"| {code} | {_cell(meaning)} |" for code, meaning in exit_codes.MEANINGS.items()]
    return "\n".join(lines) + "\n"


def _command(command: Any, name: str, level: int = 2) -> Iterator[str]:
    """Of a command of click, or of the click that typer has in itself: so it is known by what it can do."""
    context = command.context_class(command, info_name=name)
    yield f"{'#' * level} {name}"
    yield ""
    yield (command.help or "").replace("\b", "").strip()
    yield ""
    rows = [param for param in command.params if not getattr(param, "hidden", False) and param.name != "help"]
    if rows:
        yield "| | |"
        yield "|---|---|"
        for param in rows:
            words = ", ".join(f"`{one}`" for one in (*param.opts, *param.secondary_opts))
            shown = f"`{param.name.upper()}`" if param.param_type_name == "argument" else words
            yield f"| {shown} | {_cell(getattr(param, 'help', None) or '')} |"
        yield ""
    for inner in command.list_commands(context) if hasattr(command, "list_commands") else []:
        _, found, _ = command.resolve_command(context, [inner])  # as it is called: what a list shows knows no options
        if not found.hidden:
            yield from _command(found, f"{name} {inner}", min(level + 1, 4))


def _cell(text: str) -> str:
    """Text as one cell of a table."""
    return " ".join(re.sub(r"([|<>\[\]*_\\])", r"\\\1", text).split())


def _jobs() -> str:
    from pydantic import TypeAdapter

    from thinwire.contract.spec import AnySpec

    schema = TypeAdapter(AnySpec).json_schema()
    parts = schema["$defs"]
    lines = [
        "# Job files",
        "",
        "Each field of a job file, which is YAML or JSON, as this version checks it. A `TrainSpec` is of a recipe of "
        "thinwire, a `ScriptSpec` of a script of one's own ([submitting](../docs/submitting.md)).",
        "",
    ]
    first = ["TrainSpec", "ScriptSpec"]
    for name in [*first, *sorted(set(parts) - set(first))]:
        if "properties" in parts[name]:
            lines += [f"## {name}", "", _cell(parts[name].get("description", "").split("\n\n")[0]), ""]
            lines += ["| field | type | default | |", "|---|---|---|---|"]
            lines += [_field(field, one, parts[name]) for field, one in parts[name]["properties"].items()]
            lines.append("")
    return "\n".join(lines) + "\n"


def _field(name: str, one: dict[str, Any], of: dict[str, Any]) -> str:
    default = f"`{json.dumps(one['default'])}`" if "default" in one else ""
    if name in of.get("required", []):
        default = "required"
    return f"| `{name}` | {_type(one)} | {default} | {_cell(one.get('description', ''))} |"


def _type(one: dict[str, Any]) -> str:
    """In words: other objects by link, ranges as the schema has them."""
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in one:
        return f"`{json.dumps(one['const'])}`"
    if "enum" in one:
        return ", ".join(f"`{json.dumps(value)}`" for value in one["enum"])
    for key in ("anyOf", "oneOf"):
        if key in one:
            return " or ".join(dict.fromkeys(_type(inner) for inner in one[key]))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {_number(one[key])}" for key, sign in signs.items() if key in one)
    kind = one.get("type", "anything")
    if kind == "array" and isinstance(one.get("items"), dict):
        kind = f"list of {_type(one['items'])}"
    return kind + (f" `{limits}`" if limits else "")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _rest() -> str:
    from thinwire.service.config import Settings
    from thinwire.service.main import create_app
    from thinwire.service.server import make_launcher

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder), launcher="fake")
        document = create_app(settings, make_launcher(settings)).openapi()
    lines = ["# REST", "", "Of the OpenAPI document, which a service shows at `/openapi.json` and `/docs`.", ""]
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            lines += [f"## {method.upper()} {path}", "", _plain(one.get("description") or one.get("summary", "")), ""]
            rows = [(p["name"], p["in"], p.get("description", "")) for p in one.get("parameters", [])]
            if rows:
                lines += ["| parameter | in | |", "|---|---|---|"]
                lines += [f"| `{name}` | {where} | {_cell(about)} |" for name, where, about in rows] + [""]
            lines += ["| answer | |", "|---|---|"]
            lines += [f"| {code} | {_cell(a.get('description', ''))} |" for code, a in one["responses"].items()] + [""]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return re.sub(r"([<>\[\]*_\\])", r"\\\1", text)


def _metrics() -> str:
    from thinwire.contract.metric_names import METRICS

    lines = ["# Metrics", "", "What a worker exports to Prometheus; those of the service are in", ""]
    lines[-2] += " [operations](../docs/operations.md#prometheus)."
    lines += ["| name | kind | unit | labels | scope | |", "|---|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        cells = (
            f"`{metric.name}`",
            metric.kind,
            metric.unit or "-",
            labels,
            str(metric.scope.value),
            _cell(metric.help),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site/build.py OUT")
    sys.exit(main(Path(sys.argv[1])))
