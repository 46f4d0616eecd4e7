"""Extract answers from generated text. Needs only the standard library."""

from __future__ import annotations

import re


def marked_number(text: str) -> str | None:
    """Return the number after the first ####, as in GSM8K; lm-eval's strict-match."""
    match = re.search(r"#### (-?[\d.,]+)", text)
    return None if match is None else _plain(match[1])


def last_number(text: str) -> str | None:
    """Return the last number; lm-eval's flexible-extract, which also matches a row of dots."""
    numbers = re.findall(r"-?(?:[$\d.,]{2,}|\d+)", text)
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    return re.sub(r"[,$]", "", number).removesuffix(".")


def letter(text: str) -> str | None:
    """Return the letter after the first "answer is", with or without parentheses."""
    match = re.search(r"answer is \(?([A-J])", text)
    return None if match is None else match[1]


def concluded(text: str) -> str | None:
    """Return the rest of the line after the first "the answer is ", without a final period."""
    match = re.search(r"the answer is (.+)", text)
    return None if match is None else match[1].strip().removesuffix(".")


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if there is none or it is not closed."""
    start = text.rfind("\\boxed")
    # Written without braces, it holds a single token.
    bare = re.match(r"\\boxed\s+(\w+)", text[start:]) if start >= 0 else None
    if bare is not None:
        return bare[1]
    opening = re.match(r"\\boxed\s*\{", text[start:]) if start >= 0 else None
    if opening is None:
        return None
    depth, first = 1, start + opening.end()
    for place in range(first, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return text[first:place]
    return None
