"""The site of `make docs`: the pages of this folder, and the API from the docstrings of the public names."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from redislock_fast import __version__

project = "redislock_fast"
project_copyright = "2026, the maintainers of redislock_fast"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
smartquotes_action = "D"  # dashes alone: the text of an error is searched for with its quotes
html_theme = "furo"
html_title = f"redislock_fast {version}"
html_copy_source = False
html_favicon = "favicon.svg"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_extra_path = ["_extra"]  # contention.html: made by the bench, as the page on performance says

copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # what a program prints is not pasted

# GitHub's anchors, so that links work there, too.
myst_heading_anchors = 4

# In docstrings, `name` is code, as on the pages.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# The repository's own files: a test finds them in the tree.
linkcheck_ignore = [r"https://github\.com/redislock-fast/redislock_fast/.*"]


def mark_code(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Make what a docstring indents after an empty line a block of code: our docstrings do without the `::`."""
    marked: list[str] = []
    for line in lines:
        if line.startswith("    ") and marked[-2:] and not marked[-1] and not marked[-2].startswith("    "):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app: Sphinx) -> None:
    """Let `mark_code` see the docstrings before the extensions do."""
    app.connect("autodoc-process-docstring", mark_code, priority=100)
