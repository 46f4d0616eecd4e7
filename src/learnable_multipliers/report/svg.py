"""A figure as an SVG element that lives in a page: text as text, colours as CSS variables."""

from __future__ import annotations

import io
import re
import warnings
from xml.etree import ElementTree

from matplotlib.figure import Figure

from learnable_multipliers.report.theme import LIGHT, settings

_VARIABLES = {value: f"var(--{name})" for name, value in LIGHT.items()}


def svg(figure: Figure, *, slug: str, label: str) -> str:
    """Return a figure as an SVG element; equal figures give equal bytes.

    `slug` goes before every id, which must be unique on a page; `label` is read out to those who
    do not see the figure.
    """
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with settings(), warnings.catch_warnings():
        # The reader's browser sets the text, and it has more letters than the font at hand.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata=nothing)
    # Elements rather than text: a run may be called `#852d02`, or `id="`.
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith("}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({k: _for_page(k, v, slug) for k, v in attributes.items()})
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib.update({"role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode")


def _for_page(key: str, value: str, slug: str) -> str:
    if key == "id":
        return f"{slug}-{value}"
    if key == "style":
        value = re.sub("#[0-9a-f]{6}", lambda m: _VARIABLES.get(m[0], m[0]), value)
        return re.sub("font-family: [^;]*;? ?", "", value)
    return re.sub("^(url\\()?#", lambda m: f"{m[1] or ''}#{slug}-", value)
