"""The sample a tokenizer is trained on: bounded, from all over, the same in any order."""

import random
import tracemalloc

import pytest

from learnable_multipliers.pretrain.data.tokenizer import TextSample

# Of every length from nothing to several pieces.
TEXTS = [f"{n} " + "na\u00efve line\n" * (n * n % 1500) for n in range(400)] + [""]


def sampled(texts, num_characters):
    sample = TextSample(num_characters)
    for text in texts:
        sample.add(text)
    return list(sample)


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
def test_sample_is_a_function_of_the_set_of_texts(size):
    found = sampled(TEXTS, size)
    assert sum(map(len, found)) == size
    generator = random.Random(0)
    for _ in range(5):
        again = [*TEXTS, *generator.sample(TEXTS, 50)]
        generator.shuffle(again)
        assert sampled(again, size) == found


def test_text_that_fits_is_taken_whole():
    texts = [f"{n}" * n for n in range(1, 500)]
    assert sorted(sampled(texts, 10**9)) == sorted(texts)


def test_every_text_has_the_same_chance():
    letters = "abcdefgh"
    texts = [f"{letter}{n:05d}" + "-" * 94 for letter in letters for n in range(1000)]
    found = sampled(texts, 200_000)
    # Binomial(2000, 1/8): 250 +- 4 standard deviations.
    for letter in letters:
        assert 190 < sum(text[0] == letter for text in found) < 310


@pytest.mark.parametrize("end", ["\n", " "], ids=["lines", "one line"])
def test_one_long_text_gives_pieces_from_all_over_it(end):
    text = "".join(f"word{n}{end}" for n in range(1_000_000))
    numbers = [
        int(word.removeprefix("word"))
        for piece in sampled([text], 400_000)
        # The first and the last word of a piece may be torn.
        for word in piece.split()[1:-1]
    ]
    tenths = [sum(n // 100_000 == tenth for n in numbers) / len(numbers) for tenth in range(10)]
    # 100 pieces: 10 +- 4 standard deviations of 3.
    assert min(tenths) > 0
    assert max(tenths) < 0.22


def test_lines_are_not_torn():
    text = "".join(f"{n} one two three\n" for n in range(10_000))
    assert set("".join(sampled([text], 10**9)).splitlines()) == set(text.splitlines())


def test_memory_is_bounded_by_the_sample():
    tracemalloc.start()
    sample = TextSample(100_000)
    for n in range(20_000):
        sample.add(f"{n} " + "x" * 2000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, sample)) == 100_000
    assert peak < 400_000
