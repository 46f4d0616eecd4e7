"""The site: the documents of this folder, and an API reference made from docstrings."""

import re

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import learnable_multipliers as lrm

project = "Learnable Multipliers"
version = release = lrm.__version__
html_title = project
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
default_role = "code"
smartquotes = False
# Blocks without a language are output or commands.
highlight_language = "none"

autodoc_member_order = "bysource"
# The adapters of these are read without them.
autodoc_mock_imports = ["lightning", "torchtitan"]
python_maximum_signature_line_length = 88

nitpicky = True
# Types of others, whose sites a build without a network cannot link to, and our private ones.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|torch|nn|torchtitan)\..*"),
    ("py:.*", r"learnable_multipliers\.(\w+\.)*_\w+\..*"),
    ("py:class", "Proxy"),
]

# Documents outside of this folder that are pages of the site.
PAGES = {"../results/README.md": "claims.md"}


def link_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links that leave this folder lead to pages of the site."""
    for path, page in PAGES.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")


def read_docstring(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Link the public names in a docstring and read its `Args:`.

    Those of attributes have none, and napoleon would take what is before a colon for their type.
    """
    names, link = "|".join(lrm.__all__), r":py:obj:`lrm.\1 <learnable_multipliers.\1>`"
    lines[:] = [re.sub(rf"`lrm\.({names})`", link, line) for line in lines]
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, found).lines()


def setup(app: Sphinx) -> None:
    """Register both."""
    app.connect("source-read", link_pages)
    app.connect("autodoc-process-docstring", read_docstring)
