r"""Compare answers in LaTeX by their normal form.

Treated as equal: spacing and brackets of any size; \dfrac, \tfrac and \frac; \frac12 and
\frac{1}{2}; \sqrt3 and \sqrt{3}; spellings of a number (1,000 and 1000; 0.50, .5, 1/2 and
\frac{2}{4}); with and without \text{...}, a unit at the end, degree, percent and dollar signs, or
x = in front. Not equal: expressions that need algebra to be compared (x+1 and 1+x, \sqrt8 and
2\sqrt2), lists in another order, mixed numbers (1\frac12), and numbers in words.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SPACING = re.compile(r"(?<!\\)\\[ !,;:]|\\(?:quad|qquad|displaystyle)(?![a-zA-Z])|~|\s+")
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_DROPPED = re.compile(r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|\\?%|\\?\$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
# After a number or an expression, with a power of the unit.
_UNIT = re.compile(r"(?<=[^\s({\[,])\s*" + _TEXT.pattern + r"(?:\^\{?\d\}?)?$")
_NAME = re.compile(r"^\\?[a-zA-Z]+(?:_\{?\w\}?)?(?:=|\\in(?![a-zA-Z]))(?=[^=]*$)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_RATIO = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}|(-?)(-?\d+)/(\d+)")
_BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
# Longer than any answer, and short enough for Python to convert.
_MOST_DIGITS = 1000
_DECIMAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")


def same(first: str, second: str) -> bool:
    """Return whether two answers have the same normal form."""
    return normal_form(first) == normal_form(second)


def normal_form(answer: str) -> str:
    """Return the normal form, which equal answers share."""
    text = _DROPPED.sub("", answer.strip().removesuffix(".")).strip()
    text = _TEXT.sub(r"\1", _UNIT.sub("", text))
    text = _SIZED.sub("", _SPACING.sub("", text)).replace("{,}", ",")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _NAME.sub("", text)
    # Arguments without braces are single characters.
    text = re.sub(r"\\sqrt([^{\[])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([^{])", r"\\frac{\1}", text)
    text = re.sub(rf"(\\frac{_BRACED})([^{{])", r"\1{\2}", text)
    number = _number(text)
    return text if number is None else str(number)


def _number(text: str) -> Fraction | None:
    """Return the value of an answer that is one number."""
    if len(text) > _MOST_DIGITS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom = (group for group in match.groups() if group is not None)
    if not int(bottom):
        return None
    return Fraction(int(top), int(bottom)) * (-1 if sign else 1)
