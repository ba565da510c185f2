"""How Sphinx makes the site: docs/site/build.py calls it, on the tree that it has laid out."""

from __future__ import annotations

from importlib.metadata import version as installed

project = "Thinwire"
copyright = "Apache-2.0"
version = release = installed("thinwire")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []
# As GitHub: an anchor for each heading, and https:// alone where no link is marked.
myst_heading_anchors = 6
myst_enable_extensions = ["tasklist"]
# A document of the tree may begin with any heading, as in the repository.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
html_theme = "furo"
html_title = f"Thinwire {version}"
html_show_sphinx = False
html_copy_source = False
html_static_path: list[str] = []
