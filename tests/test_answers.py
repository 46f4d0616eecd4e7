"""What is read in a model's text, and when two answers are the same."""

import pytest

from learnable_multipliers.evaluate.answers import (
    boxed,
    concluded,
    last_number,
    letter,
    marked_number,
)
from learnable_multipliers.evaluate.latex import same


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,250.\n#### 9", "1250", "9"),
        ("She has $1,250.", None, "1250"),
        ("It is -3.5", None, "-3.5"),
        ("####7 or so", None, "7"),
        ("#### $7", None, "7"),
        ("none at all", None, None),
        # As lm-eval reads it.
        ("7 and so on ...", None, ".."),
    ],
)
def test_a_number_is_read_strictly_and_flexibly(text, strict, flexible):
    assert (marked_number(text), last_number(text)) == (strict, flexible)


def test_a_letter_is_the_first_that_is_called_the_answer():
    assert letter(" A is wrong. The answer is (C). The answer is (D).") == "C"
    assert letter("so the answer is B") == "B"
    assert letter("The answer is (K).") is None
    assert letter("C") is None


def test_a_conclusion_ends_with_its_line():
    assert concluded("Thus. So the answer is (B).\nthe answer is no") == "(B)"
    assert concluded("So the answer is ] ) >.") == "] ) >"
    assert concluded("So the answer is valid") == "valid"
    assert concluded("The answer is 4.") is None


def test_the_last_box_counts_with_all_braces_in_it():
    assert boxed(r"\boxed{1} then $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    assert boxed(r"$\boxed 5$") == "5"
    assert boxed(r"\boxed{\frac{1}{2}") is None
    assert boxed("5") is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", r"\dfrac{1}{2}"),
        (r"\frac{2}{4}", "1/2"),
        (r"-\frac{3}{4}", r"\frac{-3}{4}"),
        ("10{,}080", r"10,\!080"),
        ("1,000,000", "1000000"),
        (".5", "0.50"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"x = 5", "5"),
        (r"x \in [-2,7]", "[-2,7]"),
        (r"5 \text{ cm}^2", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(A)}", "(A)"),
        (r"2\sqrt3", r"2\sqrt{3}"),
        (r"90^\circ", "90"),
        (r"\$18.90", "18.9"),
        (r"50\%", "50"),
        ("7.", "7"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\frac{\sqrt{2}}3", r"\frac{\sqrt{2}}{3}"),
    ],
)
def test_spellings_of_one_answer_are_the_same(first, second):
    assert same(first, second)
    assert same(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1", "2"),
        ("(1,2)", "(2,1)"),
        ("[1,2)", "(1,2)"),
        ("0,1", "01"),
        ("1,23", "123"),
        (r"\frac{1}{3}", "0.33"),
        ("12_3", "12"),
        (r"x+1", "1+x"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"1\frac{1}{2}", r"\frac{3}{2}"),
        ("two", "2"),
        (r"\frac{1}{0}", "1"),
        ("", "0"),
        # More digits than Python turns into a number.
        ("1" * 5000, "1"),
    ],
)
def test_other_answers_are_not(first, second):
    assert not same(first, second)
