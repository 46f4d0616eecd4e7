"""What a model answered: the part of its text that counts. Needs the standard library alone."""

from __future__ import annotations

import re


def marked_number(text: str) -> str | None:
    """Return the number behind the first ####, where GSM8K has it; lm-eval's strict-match."""
    found = re.search(r"#### (-?[\d.,]+)", text)
    return None if found is None else _plain(found[1])


def last_number(text: str) -> str | None:
    """Return the last number; lm-eval's flexible-extract, to which a row of dots is one too."""
    found = re.findall(r"-?(?:[$\d.,]{2,}|\d+)", text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    return re.sub(r"[,$]", "", number).removesuffix(".")


def letter(text: str) -> str | None:
    """Return the letter behind the first "answer is", in parentheses or not."""
    found = re.search(r"answer is \(?([A-J])", text)
    return None if found is None else found[1]


def concluded(text: str) -> str | None:
    """Return what follows the first "the answer is " on its line, without a final period."""
    found = re.search(r"the answer is (.+)", text)
    return None if found is None else found[1].strip().removesuffix(".")


def boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{...}; None if there is none or it does not end."""
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
