"""Tasks, requests, scores and results: what a model that knows, guesses or errs is given."""

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from evaluation_files import write_files
from learnable_multipliers.evaluate import prompts, requests, results, scoring
from learnable_multipliers.evaluate.evaluation import check
from learnable_multipliers.evaluate.generation import UncachedDecoder
from learnable_multipliers.evaluate.items import Choice, Item, checksum, evenly
from learnable_multipliers.evaluate.models import Loaded
from learnable_multipliers.evaluate.requests import Request, build, encode_pair
from learnable_multipliers.evaluate.results import (
    difference,
    mean,
    ratio,
    summarize,
    tie_aware_accuracy,
)
from learnable_multipliers.evaluate.scoring import Score, score
from learnable_multipliers.evaluate.tasks import TASKS, named
from learnable_multipliers.pretrain.data.tokenizer import train_tokenizer

VOCAB = 300
CHOSEN = [task.name for task in TASKS.values() if task.generation is None]
"""Tasks that are scored by log-likelihood."""


class Bytes:
    """A tokenizer of single bytes, or of words with the space before them."""

    prefix_id: int | None = 0
    end_ids = (0,)

    def token_bytes(self):
        return (b"", *(bytes([byte]) for byte in range(256)))

    def encode(self, text, *, bare=False):
        return [byte + 1 for byte in text.encode()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("sets"))


def asked(folder, name):
    return build(name, TASKS[name].items(folder), Bytes())


def result_of(found, scores, name):
    return summarize(found, scores, items="", normalized=TASKS[name].normalized)


# -- models that are made up ------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_that_knows_every_answer_scores_one(folder, name):
    found = asked(folder, name)
    known = {(*r.context, *r.continuation) for r in found if r.right}

    def model(tokens):
        """Give certainty to the way a right answer goes on, and spread the rest evenly."""
        logits = torch.zeros(*tokens.shape, VOCAB)
        for row, ids in enumerate(tokens.tolist()):
            for whole in known:
                # Positions of the right text, as far as this row has followed it.
                for place in range(min(len(whole) - 1, len(ids))):
                    if tuple(ids[: place + 1]) != whole[: place + 1]:
                        break
                    logits[row, place, whole[place + 1]] = 50.0
        return logits

    result = result_of(found, score(model, found, batch_tokens=4096), name)
    metrics = result.metrics
    assert metrics["accuracy"] == results.Estimate(1.0, 0.0)
    assert metrics.get("normalized", metrics["accuracy"]).value == 1.0
    assert len(result.bytes) == (80 if name == "blimp" else 40)


@pytest.mark.parametrize("name", [name for name in CHOSEN if name != "lambada"])
def test_a_model_that_guesses_is_at_chance(tmp_path, name):
    found = asked(write_files(tmp_path, 400, seed=1), name)
    draw = random.Random(name)
    scores = [Score(-draw.random(), False) for _ in found]
    # The same length for all: dividing a guess by a length is not a guess any more.
    result = result_of([replace(r, characters=7) for r in found], scores, name)
    assert result.chance == pytest.approx(
        statistics.mean(1 / len(item.choices) for item in TASKS[name].items(tmp_path))
    )
    for estimate in (mean(result.accuracy), mean(result.normalized or result.accuracy)):
        assert abs(estimate.value - result.chance) < 3 * estimate.error


def test_a_model_that_guesses_never_writes_the_last_word(folder):
    found = asked(folder, "lambada")

    def model(tokens):
        # A function of the tokens alone, and of no help.
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        return torch.randn(*tokens.shape, VOCAB, generator=generator)

    result = result_of(found, score(model, found), "lambada")
    assert (result.metrics["accuracy"].value, result.chance) == (0.0, None)


def test_equal_likelihoods_share_the_credit(folder):
    found = [replace(r, characters=5) for r in asked(folder, "blimp")]
    result = result_of(found, [Score(-1.0, False)] * len(found), "blimp")
    # The right sentence always stands first: the first of equals would score 1.
    assert result.metrics["accuracy"].value == 0.5
    assert tie_aware_accuracy([-1.0, -1.0, -2.0], 1) == 0.5
    assert tie_aware_accuracy([-1.0, -1.0, -2.0], 2) == 0.0


# -- log-likelihoods --------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A small causal model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.mixer = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens):
        return self.head(self.mixer(self.embedding(tokens))[0])


def by_hand(model, request):
    """Return nats and greediness of one request, token by token and without a batch."""
    tokens, total, greedy = list(request.context), 0.0, True
    for target in request.continuation:
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1]
        total += (logits[target] - logits.exp().sum().log()).item()
        greedy &= logits.argmax().item() == target
        tokens.append(target)
    return total, greedy


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_log_likelihoods_of_items_are_those_computed_by_hand(folder, dtype, close):
    model = Recurrent().to(dtype)
    found = asked(folder, "arc_challenge")
    found = [request for request in found if request.item < 20]
    assert len({r.item for r in found}) == 20
    for got, request in zip(score(model, found), found, strict=True):
        expected, greedy = by_hand(model, request)
        assert got.log_likelihood == pytest.approx(expected, abs=close)
        assert got.greedy == greedy


def test_neither_batch_size_nor_order_nor_padding_changes_a_score(folder):
    model = Recurrent().double()
    found = [r for name in ("piqa", "blimp", "lambada") for r in asked(folder, name)]
    expected = score(model, found, batch_tokens=1)
    for batch_tokens in (100, 1000, 100_000):
        got = score(model, found, batch_tokens=batch_tokens)
        assert [s.greedy for s in got] == [s.greedy for s in expected]
        for mine, other in zip(got, expected, strict=True):
            assert mine.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-13)
    # Bit for bit where the batches are the same.
    assert score(model, found, batch_tokens=1000) == score(model, found, batch_tokens=1000)
    assert (
        score(model, found[::-1], batch_tokens=1000) == score(model, found, batch_tokens=1000)[::-1]
    )


@pytest.mark.gpu
def test_scores_on_a_gpu_are_those_of_the_cpu(folder):
    model = Recurrent().double()
    found = asked(folder, "hellaswag")
    expected = score(model, found)
    model.cuda()
    for batch_tokens in (1, 2000):
        got = score(model, found, device="cuda", batch_tokens=batch_tokens)
        assert [s.greedy for s in got] == [s.greedy for s in expected]
        for mine, other in zip(got, expected, strict=True):
            assert mine.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-12)


def test_padding_is_never_read(folder):
    found = asked(folder, "piqa")

    def model(tokens):
        """Be exact in any arithmetic: integers, of the last two tokens."""
        before = torch.cat((tokens[:, :1], tokens[:, :-1]), 1)
        return ((tokens * 7 + before * 3)[..., None] * torch.arange(VOCAB) % 11).double()

    assert score(model, found, batch_tokens=1) == score(model, found, batch_tokens=100_000)


def test_a_long_context_loses_its_first_tokens():
    model = Recurrent().double()
    request = Request("piqa", 0, 0, True, tuple(range(1, 30)), (40, 41, 42), 3, 3)
    short = replace(request, context=request.context[-6:])
    # Eight tokens are read: the last of nine is only predicted.
    assert score(model, [request], max_length=8) == score(model, [short])
    assert scoring.num_truncated([request, short], 8) == 1
    with pytest.raises(ValueError, match="piqa, item 0: choice 0 has 3 tokens, and the model re"):
        score(model, [request], max_length=2)


def test_a_diverged_model_is_named():
    request = Request("piqa", 3, 0, True, (1,), (2,), 1, 1)
    with pytest.raises(ValueError, match="piqa, item 3: the model's logits are not finite"):
        score(lambda tokens: torch.full((*tokens.shape, 5), math.nan), [request])


def test_equal_inputs_are_read_once():
    asked_for = []

    def model(tokens):
        asked_for.append(tokens.shape)
        return torch.zeros(*tokens.shape, 10)

    found = [Request("mmlu_cloze", 0, n, n == 0, (1, 2, 3), (n,), 1, 1) for n in range(4)]
    scores = score(model, found)
    assert asked_for == [(1, 3)]
    assert [s.log_likelihood for s in scores] == pytest.approx([-math.log(10)] * 4)


# -- tokens -----------------------------------------------------------------------------------


def test_trailing_whitespace_of_the_context_goes_to_the_continuation():
    context, continuation = encode_pair("a b \n", "c", Bytes())
    assert context == tuple(byte + 1 for byte in b"a b")
    assert continuation == tuple(byte + 1 for byte in b" \nc")
    assert encode_pair("", " c", Bytes()) == ((0,), (33, 100))


def test_a_token_over_the_border_belongs_to_neither_alone():
    """The whole is encoded at once, and cut behind as many tokens as the context has."""
    texts = ["the stone the stone. the river " * 20]
    tokenizer = train_tokenizer(texts, 280)

    class Encoder:
        prefix_id = tokenizer.eos_id

        def encode(self, text, *, bare=False):
            return tokenizer.encode(text)

    for context, continuation in (("the ", "stone"), ("the sto ", "ne. the"), ("the", " river")):
        whole = tokenizer.encode(context + continuation)
        before = tokenizer.encode(context.rstrip())
        first, second = encode_pair(context, continuation, Encoder())
        assert list(second) == whole[len(before) :]
        assert list(first) == before


def test_a_prefix_that_the_tokenizer_writes_is_not_doubled():
    class Encoder(Bytes):
        def encode(self, text, *, bare=False):
            return [0, *super().encode(text)]

    assert encode_pair("", "c", Encoder()) == ((0,), (100,))


@pytest.mark.parametrize(
    ("encoder", "context", "why"),
    [
        (type("E", (Bytes,), {"prefix_id": None})(), "", "has neither a BOS nor an EOS token"),
        (
            type("E", (Bytes,), {"encode": lambda self, text, bare=False: [1][: len(text) - 2]})(),
            "ab",
            "no token to the context at 'c'",
        ),
        (
            type("E", (Bytes,), {"encode": lambda self, text, bare=False: [1]})(),
            "ab",
            "no token to the continuation at 'c'",
        ),
    ],
)
def test_a_tokenizer_without_the_needed_ids_is_rejected(encoder, context, why):
    with pytest.raises(ValueError, match=why):
        encode_pair(context, "c", encoder)


def test_requests_survive_their_file(folder, tmp_path):
    built = requests.build_set(
        {n: TASKS[n].items(folder) for n in ("mmlu_cloze", "blimp")}, Bytes(), "abc"
    )
    path = tmp_path / "requests.jsonl"
    requests.write_requests(path, built)
    assert requests.read_requests(path) == built
    loaded = Loaded(Recurrent(), lambda: UncachedDecoder(Recurrent()), 256, None, "abc")
    check(built, loaded, "model")
    with pytest.raises(ValueError, match="hold token 1[0-9]+, but the model's vocabulary has 90"):
        check(built, replace(loaded, vocab_size=90), "model")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(
        ValueError, match="is incomplete: it holds 319 requests, and should hold 320"
    ):
        requests.read_requests(path)
    path.write_text("".join((*lines[:2], lines[2].replace('"context":[', '"context":["a",'))))
    with pytest.raises(ValueError, match=r"requests.jsonl, line 3: .*context is not a list of tok"):
        requests.read_requests(path)
    for damaged in ("", "[]", '{"format": 7}'):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"line 1: not a request file of lrm"):
            requests.read_requests(path)


# -- prompts ----------------------------------------------------------------------------------


def test_prompts_are_those_of_lm_eval():
    def parse(name, **line):
        item = getattr(prompts, name)(line)
        return [(c.context, c.continuation) for c in item.choices], item.right

    both = {"question": " Why? ", "choices": ["a", "bc"], "label": 1}
    assert parse("answered", **both) == (
        [("Question:  Why? \nAnswer:", x) for x in (" a", " bc")],
        1,
    )
    assert parse("mmlu_cloze", subject="s", **both)[0][0] == ("Question: Why?\nAnswer:", " a")
    assert parse("openbookqa", **both)[0][1] == (" Why? ", " bc")
    line = {"activity_label": "Swimming", "ctx": "A dog", "endings": ["x.", "y."], "label": 0}
    assert parse("hellaswag", **line) == (
        [("Swimming: A dog", " x."), ("Swimming: A dog", " y.")],
        0,
    )
    line = {"sentence": "So _ won it. ", "option1": "Ann", "option2": "Bo", "answer": 2}
    assert parse("winogrande", **line) == ([("So Ann", " won it."), ("So Bo", " won it.")], 1)
    line = {"sentence_good": "It is.", "sentence_bad": "It are.", "UID": "u"}
    assert parse("blimp", **line) == ([("", " It is."), ("", " It are.")], 0)
    assert parse("lambada", text="so it  goes on") == ([("so it  goes", " on")], 0)
    assert parse("piqa", goal="g", sol1="s", sol2="t")[0][0] == ("Question: g\nAnswer:", " s")


def test_normalization_divides_by_characters_of_the_answer_alone():
    item = Item((Choice("q", " a", 1), Choice("q", " \u00e9bcd", 4)), 1)
    found = build("arc_easy", [item], Bytes())
    assert [(r.bytes, r.characters) for r in found] == [(2, 1), (6, 4)]
    result = result_of(found, [Score(-2.0, False), Score(-4.0, False)], "arc_easy")
    assert (result.accuracy, result.normalized) == ((0.0,), (1.0,))
    assert result.bits == pytest.approx((4 / math.log(2),))


# -- statistics -------------------------------------------------------------------------------


def test_errors_are_those_of_the_textbook():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    error = statistics.stdev(values) / math.sqrt(5)
    assert mean(values) == results.Estimate(0.6, pytest.approx(error))
    assert math.isnan(mean([1.0]).error)


def test_the_error_of_a_ratio_is_what_resampling_gives():
    draw = random.Random(3)
    sizes = [draw.randrange(1, 30) for _ in range(200)]
    bits = [size * draw.uniform(0.5, 2) for size in sizes]
    found = ratio(bits, sizes)
    assert found.value == pytest.approx(sum(bits) / sum(sizes))
    again = []
    for _ in range(2000):
        chosen = draw.choices(range(200), k=200)
        again.append(sum(bits[i] for i in chosen) / sum(sizes[i] for i in chosen))
    assert found.error == pytest.approx(statistics.stdev(again), rel=0.1)


def test_paired_differences_are_smaller_than_unpaired_ones(folder):
    found = asked(folder, "piqa")
    draw = random.Random(5)
    base = [draw.gauss(0, 1) for _ in found]
    near = [value + draw.gauss(0, 0.05) for value in base]
    first, second = (
        result_of(found, [Score(value - 9, False) for value in values], "piqa")
        for values in (base, near)
    )
    paired = difference(first, second)
    for metric in ("accuracy", "bits per byte"):
        one, two = first.metrics[metric], second.metrics[metric]
        assert paired[metric].value == pytest.approx(one.value - two.value, abs=1e-12)
        assert paired[metric].error < 0.6 * math.hypot(one.error, two.error)
    with pytest.raises(ValueError, match="were evaluated on different items of piqa"):
        difference(first, replace(second, items="other"))


def test_scores_of_checkpoints_are_averaged_by_item(folder):
    found = asked(folder, "sciq")
    each = [
        replace(result_of(found, [Score(-draw.random(), False) for _ in found], "sciq"), steps=(n,))
        for n, draw in enumerate((random.Random(0), random.Random(1)))
    ]
    both = results.averaged(each)
    assert both.steps == (0, 1)
    for metric, estimate in both.metrics.items():
        values = [result.metrics[metric].value for result in each]
        assert estimate.value == pytest.approx(statistics.mean(values))


def test_results_survive_their_file(folder, tmp_path):
    found = asked(folder, "mmlu_cloze")
    draw = random.Random(0)
    result = result_of(found, [Score(-draw.random(), False) for _ in found], "mmlu_cloze")
    results.write_result(tmp_path, result)
    (tmp_path / "other.json").write_text("{}")
    read = results.read_results(tmp_path)
    assert replace(read["mmlu_cloze"], bits=result.bits) == result
    assert read["mmlu_cloze"].bits == pytest.approx(result.bits, rel=1e-6)
    assert set(read["mmlu_cloze"].groups) == {"s0", "s1", "s2"}
    path = tmp_path / "mmlu_cloze.json"
    path.write_text(path.read_text().replace('"bytes":[', '"bytes":[3,'))
    with pytest.raises(ValueError, match="mmlu_cloze.json is damaged .*evaluate again"):
        results.read_results(tmp_path)


def test_a_limit_takes_items_from_all_over_the_file(folder):
    assert evenly(range(10), 4) == [0, 2, 5, 7]
    assert evenly(range(3), 9) == [0, 1, 2]
    items = TASKS["blimp"].items(folder)
    assert {item.group for item in evenly(items, 4)} == {"agreement", "island"}
    assert checksum(items) != checksum(items[1:])


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "line", "why"),
    [
        ("arc_easy", "{", "not JSON"),
        ("arc_easy", "[]", "not an object"),
        ("arc_easy", '{"question": "q", "label": 0}', "no field 'choices' .there is label, quest"),
        (
            "arc_easy",
            '{"question": "q", "choices": ["a"], "label": "0"}',
            "label is '0', not a who",
        ),
        ("arc_easy", '{"question": "q", "choices": ["a"], "label": 1}', "choice 1, counted from 0"),
        ("arc_easy", '{"question": "q", "choices": ["a", ""], "label": 0}', "choice 1 is empty"),
        (
            "arc_easy",
            '{"question": 3, "choices": ["a"], "label": 0}',
            "question is 3, not a string",
        ),
        ("lambada", '{"text": "one"}', "text is a single word"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, task, line, why):
    path = write_files(tmp_path, 3) / TASKS[task].file
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"{path.name}, line 5: .*{why}"):
        TASKS[task].items(tmp_path)


def test_files_that_are_missing_are_named(tmp_path):
    for task in TASKS.values():
        with pytest.raises(ValueError, match=r"--eval-data|leave the task out with --tasks"):
            task.items(tmp_path)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        TASKS["piqa"].items(tmp_path / "nowhere")
    labels = write_files(tmp_path, 3) / "piqa/valid-labels.lst"
    labels.write_text("0\n1\n")
    with pytest.raises(ValueError, match="valid-labels.lst has 2 labels for 3 items"):
        TASKS["piqa"].items(tmp_path)
    labels.write_text("0\n1\n2\n")
    with pytest.raises(ValueError, match="valid-labels.lst, label 3 .'2'.: the right answer is"):
        TASKS["piqa"].items(tmp_path)


def test_an_unknown_task_gets_the_closest_name():
    assert [task.name for task in named(("piqa", "sciq", "piqa"))] == ["piqa", "sciq"]
    with pytest.raises(ValueError, match="no task 'HelaSwag'; did you mean hellaswag"):
        named(("HelaSwag",))
    with pytest.raises(ValueError, match="no task 'xyz'; there are hellaswag, "):
        named(("xyz",))
