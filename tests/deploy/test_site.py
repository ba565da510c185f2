"""The site: links of the documents stay links, also to files beside docs/, and the reference has what there is."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.extras import ROOT
from tests.once import once

BUILD = ROOT / "docs/site/build.py"


def builder():
    spec = importlib.util.spec_from_file_location("site_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_has_a_place_and_the_reference_has_what_there_is():
    build = builder()
    named = [name for names in build.PARTS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= {path.stem for path in (ROOT / "docs").glob("*.md")}
    pages = build.reference()
    assert "### thinwire migrate\n" in pages["cli"]
    assert "#### thinwire lab up\n" in pages["cli"]
    assert "| `global_batch` |" in pages["jobs"]
    assert "## POST /v1/jobs" in pages["rest"]
    assert "`thinwire_step_seconds`" in pages["metrics"] or "| `thinwire_" in pages["metrics"]


def test_a_link_leads_to_a_page_of_what_it_leads_to(tmp_path, monkeypatch):
    build = builder()
    for name, text in {
        "docs/a.md": "[b](b.md#x) [code](../optim/x.py) [its folder](../optim) ![p](p.svg) [`f`](../optim/x.py#L3)\n"
        "```\n[kept](../not/there.py)\n```\n`[kept](../nor/this.py)`\n",
        "docs/b.md": "# X\n",
        "docs/p.svg": "<svg/>",
        "optim/x.py": '"""What it is."""\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    found, text = build.linked(tmp_path / "docs/a.md")
    assert {str(path.relative_to(tmp_path)) for path in found} == {"docs/b.md", "optim/x.py", "optim", "docs/p.svg"}
    assert text.startswith(
        "[b](b.md#x) [code](../optim/x.py.md) [its folder](../optim/index.md) ![p](p.svg) [`f`](../optim/x.py.md)\n"
    )
    assert "[kept](../not/there.py)\n```\n`[kept](../nor/this.py)`" in text
    (tmp_path / "docs/a.md").write_text("[gone](../optim/y.py)")
    with pytest.raises(FileNotFoundError, match=r"docs/a.md links to ../optim/y.py"):
        build.linked(tmp_path / "docs/a.md")


class Loads(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") not in ("search", "next", "prev", "index", "author", "canonical"):
            self.loaded.append(found.get("href", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="`make site` installs it")
    return Path(once(tmp_path_factory, "site", _build))


def _build(folder: Path) -> str:
    out = folder / "site"
    subprocess.run([sys.executable, str(BUILD), str(out)], check=True)
    return str(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Loads(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 100
    for path, page in pages.items():
        for one in page.loaded:
            assert "//" not in one or one.startswith("data:"), f"{path.name} loads {one}"
        for link in page.links:
            name, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if anchor and target in pages:
                assert unquote(anchor) in pages[target].ids, f"{path.relative_to(site)}: {link}"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet.name


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_person_finds_a_page_by_its_words_with_and_without_a_server(site, address):
    playwright = pytest.importorskip("playwright.sync_api")
    asked: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for start in (f"{address}/index.html", f"file://{site}/index.html"):
            page.goto(start)
            assert page.locator("h1").first.inner_text().startswith("Thinwire")
            assert page.evaluate("document.images[0].naturalWidth") > 0
            page.fill("input[name=q]", "PowerSGD")
            page.press("input[name=q]", "Enter")
            page.wait_for_selector("#search-results li a", timeout=60_000)
            page.locator("#search-results li a").first.click()
            assert page.locator("h1").first.is_visible()
        browser.close()
    assert [url for url in asked if not url.startswith((address, "file://", "data:"))] == []
