"""Generated answers: what is generated, where it ends, and what is read in it."""

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import nn

from evaluation_files import write_files
from learnable_multipliers.evaluate import results
from learnable_multipliers.evaluate.evaluation import evaluate
from learnable_multipliers.evaluate.generation import UncachedDecoder, generate, num_truncated
from learnable_multipliers.evaluate.items import evenly, with_examples
from learnable_multipliers.evaluate.models import Loaded
from learnable_multipliers.evaluate.requests import (
    Prompt,
    Vocabulary,
    build_set,
    read_requests,
    vocabulary_of,
    write_requests,
)
from learnable_multipliers.evaluate.tasks import SETS, TASKS
from learnable_multipliers.evaluate.token_bytes import token_bytes
from learnable_multipliers.pretrain.data.tokenizer import train_tokenizer
from test_evaluate import VOCAB, Bytes, Recurrent

WRITTEN = [task.name for task in TASKS.values() if task.generation is not None]
PIECES = (b"", *(bytes([byte]) for byte in range(256)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("sets"), 12)


def ids(text):
    return tuple(Bytes().encode(text))


def asked(folder, name, **settings):
    return build_set({name: TASKS[name].items(folder, **settings)}, Bytes())


class Scribe:
    """A decoder that knows what to generate for each prompt."""

    def __init__(self, texts):
        self.texts, self.rows = texts, None

    def forward(self, tokens):
        new = tokens.tolist()
        self.rows = (
            new if self.rows is None else [a + b for a, b in zip(self.rows, new, strict=True)]
        )
        logits = torch.zeros(len(new), VOCAB)
        for logit, row in zip(logits, self.rows, strict=True):
            for prompt, text in self.texts.items():
                written = (*prompt, *text, 0)
                if len(prompt) <= len(row) < len(written) and written[: len(row)] == tuple(row):
                    logit[written[len(row)]] = 9.0
        return logits

    def select_rows(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]


def result_of(built, texts):
    """Return the result of a model that answers item n with the n-th text."""
    known = {p.prompt: ids(text) for p, text in zip(built.prompts, texts, strict=True)}
    loaded = Loaded(Recurrent(), lambda: Scribe(known), VOCAB, None, None)
    found = evaluate(loaded, built, batch_tokens=20_000)
    (result,) = found.results.values()
    return result


SAYS = {
    "mmlu_pro": " Because of this the answer is ({}).",
    "bbh": "Because of that. So the answer is {}.",
    "gsm8k": " It is {0}.\n#### {0}",
    "math500": " We see that it is $\\boxed{{{}}}$.",
}


# -- models that are made up ------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_that_knows_every_answer_scores_one(folder, name):
    built = asked(folder, name)
    stop = TASKS[name].generation.stops[0]
    # It goes on after its answer, as models do, with a wrong one.
    texts = [SAYS[name].format(p.answer) + f" {stop} {SAYS[name].format(7)}" for p in built.prompts]
    result = result_of(built, texts)
    assert result.metrics["accuracy"] == results.Estimate(1.0, 0.0)
    assert {metric: e.value for metric, e in result.metrics.items()} == {
        "accuracy": 1.0,
        **({"by group": 1.0} if name in ("bbh", "mmlu_pro") else {}),
        **({"flexible": 1.0} if name == "gsm8k" else {}),
    }
    assert result.shots == 0
    assert len(result.accuracy) == (18 if name == "bbh" else 12)


def test_a_model_that_guesses_letters_is_at_chance(tmp_path):
    built = asked(write_files(tmp_path, 300, seed=1), "mmlu_pro", shots=0)
    draw = random.Random(2)
    result = result_of(built, [f" the answer is ({draw.choice('ABCDEFGHIJ')})" for _ in range(300)])
    assert result.chance == pytest.approx(0.1)
    estimate = result.metrics["accuracy"]
    assert 0 < abs(estimate.value - 0.1) < 3 * estimate.error


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "mmlu_pro"])
def test_a_model_that_writes_nothing_of_use_scores_zero(folder, name):
    built = asked(folder, name)
    result = result_of(built, ["so it goes"] * len(built.prompts))
    assert (result.metrics["accuracy"].value, result.chance) == (0.0, None)


# -- tokens -----------------------------------------------------------------------------------


def by_hand(model, prompt, count, max_length=None):
    """Return `count` greedy tokens behind one prompt, without a batch."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


def letters(tokens):
    return "".join(chr(0x4E00 + token) for token in tokens)


def made_up(count=9, most=24):
    """Return prompts of many lengths, and a vocabulary in which every token shows."""
    draw = random.Random(3)
    lengths = [1 + draw.randrange(30) for _ in range(count)]
    prompts = [
        Prompt(
            "gsm8k", n, tuple(draw.randrange(VOCAB) for _ in range(length)), (), most - n % 3, ""
        )
        for n, length in enumerate(lengths)
    ]
    return prompts, Vocabulary(tuple(chr(0x4E00 + token).encode() for token in range(VOCAB)))


def test_batches_of_mixed_lengths_write_what_one_by_one_writes():
    torch.manual_seed(1)
    model = Recurrent().double()
    prompts, vocabulary = made_up()
    expected = [letters(by_hand(model, p.prompt, p.max_new_tokens)) for p in prompts]
    assert len(set(expected)) == len(prompts)
    for batch_tokens in (1, 100, 200, 100_000):
        for order in (1, -1):
            found = generate(
                lambda: UncachedDecoder(model),
                prompts[::order],
                vocabulary,
                batch_tokens=batch_tokens,
            )
            assert found == expected[::order]


@pytest.mark.gpu
def test_a_gpu_writes_what_the_cpu_writes():
    torch.manual_seed(1)
    model = Recurrent().double()
    prompts, vocabulary = made_up()
    expected = [letters(by_hand(model, p.prompt, p.max_new_tokens)) for p in prompts]
    model.cuda()
    found = generate(lambda: UncachedDecoder(model), prompts, vocabulary, device="cuda")
    assert found == expected


def test_rows_that_are_done_are_dropped_and_the_others_continue():
    torch.manual_seed(1)
    model = Recurrent().double()
    prompts, vocabulary = made_up()
    prompts = [replace(p, max_new_tokens=1 + 5 * n) for n, p in enumerate(prompts)]
    sizes = []

    def watched(tokens):
        sizes.append(len(tokens))
        return model(tokens)

    found = generate(lambda: UncachedDecoder(watched), prompts, vocabulary, batch_tokens=100_000)
    assert found == [letters(by_hand(model, p.prompt, p.max_new_tokens)) for p in prompts]
    assert sizes[0] == len(prompts)
    assert sizes[-1] == 1


def test_a_long_prompt_loses_its_first_tokens():
    model = Recurrent().double()
    (prompt,), vocabulary = made_up(1)
    prompt = replace(prompt, prompt=tuple(range(1, 40)))
    short = replace(prompt, prompt=prompt.prompt[-6:])
    most = prompt.max_new_tokens
    make_decoder = lambda: UncachedDecoder(model)  # noqa: E731
    assert generate(make_decoder, [prompt], vocabulary, max_length=most + 6) == generate(
        make_decoder, [short], vocabulary
    )
    assert num_truncated([prompt, short], most + 6) == 1
    with pytest.raises(ValueError, match=r"gsm8k: an answer may have 24 tokens.*--max-new-tokens"):
        generate(make_decoder, [prompt], vocabulary, max_length=most)


def test_a_diverged_model_is_named():
    prompts, vocabulary = made_up(2)
    with pytest.raises(ValueError, match="gsm8k, item [01]: the model's logits are not finite"):
        generate(
            lambda: UncachedDecoder(lambda tokens: torch.full((*tokens.shape, 5), torch.nan)),
            prompts,
            vocabulary,
        )


# -- ends -------------------------------------------------------------------------------------


def written(pieces, stops, most=100, end=99):
    """Return what is read of a model that writes these pieces one after the other."""
    vocabulary = Vocabulary((b"?", *pieces), (end,))

    class Decoder:
        place = 0

        def forward(self, tokens):
            self.place += 1
            # Behind its last piece, the token that ends documents.
            best = self.place if self.place <= len(pieces) else 99
            return torch.nn.functional.one_hot(torch.tensor([best]), 100).double()

    (text,) = generate(Decoder, [Prompt("bbh", 0, (0,), stops, most, "x")], vocabulary)
    return text


def token_by_token(pieces, stops, most=100):
    text = b""
    for piece in pieces[:most]:
        text += piece
        # Search the whole text after every token.
        ends = [text.find(stop.encode()) for stop in stops if stop.encode() in text]
        if ends:
            return text[: min(ends)].decode(errors="replace")
    return text.decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        ([b"It is 4.", b"\n", b"\n", b"Q: next"], ("\n\n",), "It is 4."),
        ([b"It is 4. ST", b"O", b"P", b": next"], ("STOP:",), "It is 4. "),
        ([b"a STO a STOP", b"S STOP:"], ("STOP:",), "a STO a STOPS "),
        ([b"4 </s> 5 Q"], ("Q", "</s>"), "4 "),
        ([b"Quite"], ("Q",), ""),
        ([b"na\xc3", b"\xafve\xe2", b"\x82", b"\xac5"], ("\u20ac",), "na\u00efve"),
        ([b"cut \xe2\x82"], ("Q",), "cut \ufffd"),
        ([b"no end"], ("Q",), "no end"),
    ],
)
def test_a_stop_ends_an_answer_where_it_begins_also_across_tokens(pieces, stops, text):
    assert written(pieces, stops) == text == token_by_token(pieces, stops)


def test_stops_are_found_wherever_the_tokens_are_cut():
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("abQ\n", (4, 4, 1, 1), k=40)).encode()
        cuts = sorted({0, len(text), *(draw.randrange(40) for _ in range(20))})
        pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        stops = draw.choice((("Qa", "\n\n"), ("abab", "Q"), ("ab\nb",), ("bb", "bba")))
        most = draw.choice((5, 100))
        assert written(pieces, stops, most) == token_by_token(pieces, stops, most)


def test_an_answer_ends_with_the_document():
    assert written([b"a", b"b"], ()) == "ab"
    # A token that the tokenizer does not have is nothing.
    assert written([b"a", b"b"], (), most=30, end=98) == "ab"


# -- requests ---------------------------------------------------------------------------------


def test_prompts_survive_their_file(folder, tmp_path):
    built = build_set(
        {name: TASKS[name].items(folder) for name in ("gsm8k", "piqa", "bbh")},
        Bytes(),
        "abc",
        {"gsm8k": 5, "bbh": 3},
    )
    assert built.vocabulary == Vocabulary(PIECES, (0,))
    path = tmp_path / "requests.jsonl"
    write_requests(path, built)
    assert read_requests(path) == built
    lines = path.read_text().splitlines(keepends=True)
    for name, value, why in (
        ("prompt", [], "prompt is not a list of token ids"),
        ("stops", [""], "stops is not a list of strings"),
        ("max_new_tokens", 0, "max_new_tokens is not a count"),
        ("answer", 3, "answer is not a string"),
    ):
        damaged = json.dumps(json.loads(lines[-1]) | {name: value})
        path.write_text("".join((*lines[:-1], damaged)))
        with pytest.raises(ValueError, match=rf"requests.jsonl, line {len(lines)}: .*{why}"):
            read_requests(path)


def test_a_tokenizer_that_changes_texts_is_rejected():
    class Lower(Bytes):
        def encode(self, text, *, bare=False):
            return super().encode(text.lower())

    assert vocabulary_of(Bytes(), "Two \u20ac.").token_bytes == PIECES
    with pytest.raises(ValueError, match="does not decode to the text that it encoded"):
        vocabulary_of(Lower(), "Two.")


def test_other_lengths_and_examples_are_other_items(folder):
    def result(**settings):
        built = asked(folder, "gsm8k", **settings)
        return result_of(built, ["#### 1"] * len(built.prompts))

    first = result(shots=1)
    assert results.difference(first, result(shots=1))["accuracy"].value == 0
    for other in (result(shots=2), result(shots=1, max_new_tokens=9), result(shots=1, limit=3)):
        with pytest.raises(ValueError, match="were evaluated on different items of gsm8k"):
            results.difference(first, other)


def test_differences_are_paired_by_item(folder):
    built = asked(folder, "gsm8k", shots=0)
    right = [f"#### {p.answer}" for p in built.prompts]
    first, second = result_of(built, right), result_of(built, [*right[:9], "", "", ""])
    found = results.difference(first, second)
    expected = results.mean([0.0] * 9 + [1.0] * 3)
    assert found == {"accuracy": expected, "flexible": expected}


def test_subtasks_count_the_same_whatever_their_size(folder):
    built = asked(folder, "bbh", shots=0)
    sizes = {g: [p.group for p in built.prompts].count(g) for g in ("navigate", "word_sorting")}
    assert sizes == {"navigate": 12, "word_sorting": 6}
    texts = [SAYS["bbh"].format(p.answer) if p.group == "navigate" else "" for p in built.prompts]
    metrics = result_of(built, texts).metrics
    assert metrics["accuracy"].value == pytest.approx(12 / 18)
    assert metrics["by group"] == results.Estimate(0.5, 0.0)


# -- examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.examples])
def test_examples_are_the_first_of_another_file_and_never_asked(folder, name):
    task = TASKS[name]
    bare, shown = task.items(folder, shots=0), task.items(folder, shots=2)
    examples = task.examples(folder)
    questions = {item.question.removeprefix(item.preamble) for item in bare}
    assert not questions & {example.question for example in examples}
    for before, after in zip(bare, shown, strict=True):
        mine = [e.as_example for e in examples if e.group == before.group][:2]
        question = before.question.removeprefix(before.preamble)
        assert after.question == before.preamble + "\n\n".join((*mine, question))


def test_what_has_no_examples_says_so(folder):
    with pytest.raises(ValueError, match=r"hellaswag takes no examples.*arc_challenge, mmlu_cloze"):
        TASKS["hellaswag"].items(folder, shots=5)
    with pytest.raises(ValueError, match="bbh: 4 examples about navigate were requested"):
        TASKS["bbh"].items(folder, shots=4)
    items = TASKS["gsm8k"].items(folder, shots=0)
    with pytest.raises(ValueError, match="one of the examples is also asked"):
        with_examples(items, items[3:], 1)


def test_the_papers_benchmarks_are_one_name():
    assert SETS["paper"] == (
        "hellaswag",
        "arc_challenge",
        "mmlu",
        "mmlu_pro",
        "bbh",
        "gsm8k",
        "math500",
    )
    assert not any(TASKS[name].shots or TASKS[name].generation for name in SETS["quick"])


def test_prompts_are_those_of_lm_eval(folder):
    (item,) = evenly(TASKS["mmlu"].items(folder, shots=0), 1)
    lines = item.choices[2].context.split("\n")
    assert lines[0] == "The following are multiple choice questions (with answers) about s0."
    assert [line[:3] for line in lines[3:7]] == ["A. ", "B. ", "C. ", "D. "]
    assert (lines[7], item.choices[2].continuation) == ("Answer:", " C")
    item = TASKS["gsm8k"].items(folder, shots=1)[0]
    first, second = item.prompt.split("\n\n")
    assert first.startswith("Question: ")
    assert "\nAnswer: " in first
    assert "\n#### " in first
    assert second.endswith("?\nAnswer:")
    item = TASKS["bbh"].items(folder, shots=1)[0]
    assert item.prompt.startswith("About navigate.\n\nQ: ")
    assert item.prompt.endswith("\nA: Let's think step by step.\n")
    item = TASKS["mmlu_pro"].items(folder, shots=1)[0]
    assert 'finish your answer with "the answer is (X)" where X is the correct' in item.prompt
    assert item.prompt.endswith("\nAnswer: Let's think step by step.")
    assert item.prompt.count("\n\nQuestion:\n") == 1


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("gsm8k", '{"question": "q", "answer": "5"}', "answer has no number after ####"),
        ("math500", '{"question": "q", "answer": "5"}', r"answer has no \\boxed"),
        (
            "mmlu_pro",
            '{"question": "q", "options": ["a"], "answer_index": 1, "category": "c"}',
            "1",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path, name, line, why):
    path = write_files(tmp_path, 3) / TASKS[name].file
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"{path.name}, line 4: .*{why}"):
        TASKS[name].items(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("bbh/navigate.json", "{", r"navigate.json: .*Expecting"),
        ("bbh/navigate.json", '{"examples": [{"input": "q"}]}', "navigate.json: no field 'target'"),
        ("bbh/navigate.json", '{"examples": [{"input": "q", "target": ""}]}', "example 1: .*empty"),
        ("cot-prompts/navigate.txt", "nothing", "navigate.txt has no examples"),
        ("cot-prompts/navigate.txt", "-----\nd\n\nQ: a\nA: b", "has no step-by-step answer"),
    ],
)
def test_a_malformed_subtask_is_named(tmp_path, file, text, why):
    (write_files(tmp_path, 3) / "bbh" / file).write_text(text)
    with pytest.raises(ValueError, match=why):
        TASKS["bbh"].items(tmp_path)


# -- Hugging Face's caches --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "falcon_h1"])
def test_a_model_with_a_cache_writes_what_it_writes_without(kind):
    transformers = pytest.importorskip("transformers")
    from learnable_multipliers.evaluate.models import _CachedDecoder

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.5,
    }
    if kind == "falcon_h1":
        shape |= {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "head_dim": 8}
        config = transformers.FalconH1Config(**shape)
    else:
        config = transformers.LlamaConfig(**shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    prompts, vocabulary = made_up(7, 12)
    expected = [
        letters(by_hand(lambda t: model(t, use_cache=False).logits, p.prompt, p.max_new_tokens))
        for p in prompts
    ]
    assert len(set(expected)) == len(prompts)
    for batch_tokens in (1, 120, 100_000):
        found = generate(
            lambda: _CachedDecoder(model), prompts, vocabulary, batch_tokens=batch_tokens
        )
        assert found == expected


def test_the_model_is_not_asked_for_more_than_the_last_logits():
    class Counting(nn.Module):
        def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
            assert (use_cache, logits_to_keep) == (True, 1)
            read = (past_key_values or 0) + input_ids.shape[1]
            logits = torch.zeros(len(input_ids), 1, 10)
            logits[..., read % 10] = 1
            return type("Output", (), {"logits": logits, "past_key_values": read})

    from learnable_multipliers.evaluate.models import _CachedDecoder

    vocabulary = Vocabulary(tuple(str(n).encode() for n in range(10)))
    prompts = [Prompt("bbh", n, (0,) * (n + 3), (), 4, "x") for n in range(2)]
    found = generate(lambda: _CachedDecoder(Counting()), prompts, vocabulary, batch_tokens=1)
    assert found == ["3456", "4567"]


# -- texts of tokens --------------------------------------------------------------------------

TEXTS = ["Two \u20ac and na\u00efve \U0001f600.", "a  b\n\n c\t", "Question: 4 < 5?\nAnswer:"]


def joined(tokenizer, text):
    pieces = token_bytes(tokenizer)
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    return b"".join(pieces[index] for index in encoded).decode()


@pytest.mark.parametrize("size", [257, 320])
def test_byte_level_pieces_give_back_any_text(size):
    tokenizer = train_tokenizer(TEXTS * 20, size)
    for text in TEXTS:
        assert joined(tokenizer.tokenizer, text) == text
    # Special tokens are not text.
    assert token_bytes(tokenizer.tokenizer)[tokenizer.eos_id] == b""


def test_pieces_with_marked_spaces_give_back_any_text():
    characters = sorted({c for text in TEXTS[2:] for c in text} - {" "} | {"\u2581", "a"})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<unk>", *byte_tokens, *characters, "\u2581a", "<|extra|>"]
    model = models.BPE(
        {name: place for place, name in enumerate(names)},
        [("\u2581", "a")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(["<|extra|>"])
    for text in (*TEXTS, " a<|extra|> a"):
        assert joined(tokenizer, text) == text
        encoded = tokenizer.encode(text).ids
        assert tokenizer.decode(encoded) == text


def test_an_unknown_kind_of_tokenizer_is_named():
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"the tokenizer's decoder \(WordPiece\) is not supported"):
        token_bytes(tokenizer)
