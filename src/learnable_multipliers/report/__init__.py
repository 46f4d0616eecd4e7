"""Reads run folders and writes one self-contained HTML page about them; it never trains.

The only part of the package that imports matplotlib and Jinja2.
"""

from learnable_multipliers.report.page import write_page
from learnable_multipliers.report.records import Run

__all__ = ["Run", "write_page"]
