"""What the page is made of: nothing from elsewhere, nothing that reads HTML, and vendored files as they came."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.service.control_plane_harness import Service

STATIC = Path(__file__).parents[2] / "service" / "web" / "static"
OURS = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".html", ".css"))


@pytest.mark.parametrize("folder", [STATIC / "vendor", Path(__file__).parent / "vendor"], ids=["page", "tests"])
def test_vendored_files_are_as_they_came(folder: Path) -> None:
    sources = json.loads((folder / "SOURCES.json").read_text())
    named = {name: integrity for one in sources.values() for name, integrity in one["files"].items()}
    assert set(named) == {path.name for path in folder.iterdir()} - {"SOURCES.json"}
    for name, integrity in named.items():
        digest = hashlib.sha512((folder / name).read_bytes()).digest()
        assert integrity == f"sha512-{base64.b64encode(digest).decode()}", name


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_nothing_reads_html_runs_text_or_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    reads = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextual"
    assert not re.search(reads, text)
    assert not re.search(r"(?:https?:)?//[a-z0-9]", re.sub(r"^\s*//.*$|/\*\*.*?\*/", "", text, flags=re.M | re.S))
    # The name of the project that was chosen is no secret; nothing else is where a script could read it.
    stored = re.sub(r'sessionStorage\.(?:get|set|remove)Item\("thinwire project"[,)]', "", text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", stored)
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
        assert not re.search(r'(?:src|href)="/', text), (
            "behind a proxy's prefix an address from the root leads elsewhere"
        )


def test_every_module_that_is_imported_and_every_example_is_there(shared_service: Service) -> None:
    for path in OURS:
        for name in re.findall(r'(?:from|import\()\s*"\./([^"]+)"', path.read_text()):
            assert (STATIC / name).is_file(), (path.name, name)
    shared_service.client.headers.pop("Authorization", None)
    listed = re.search(r"const EXAMPLES = (\[.*?\]);", (STATIC / "submit.js").read_text())
    assert listed is not None
    assert sorted(json.loads(listed[1])) == sorted(path.stem for path in (STATIC / "examples").iterdir())
    for name in json.loads(listed[1]):
        answer = shared_service.client.get(f"/web/examples/{name}.yaml")
        assert answer.status_code == 200
        assert answer.text == (STATIC / "examples" / f"{name}.yaml").read_text()


def test_files_of_the_page_are_asked_for_anew_and_lead_nowhere_else(shared_service: Service) -> None:
    shared_service.client.headers.pop("Authorization", None)
    first = shared_service.client.get("/web/app.js")
    assert first.headers["cache-control"] == "no-cache"
    assert first.headers["content-type"].startswith(("text/javascript", "application/javascript"))
    assert shared_service.client.get("/web/app.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    for path in ("/web/../router.py", "/web/..%2frouter.py", "/web/%2e%2e/router.py", "/web/examples/"):
        assert shared_service.client.get(path).status_code in (401, 404), path
