"""Compare models in llama.cpp, from GGUF files, with ours: token ids, logits, continuations.

    python benchmarks/llama_cpp_agreement.py runs/hybrid runs/llama runs/factors \
        --texts README.md LICENSE --code-points --out results/llama-cpp-agreement.json

The runs there are of 100 steps, with `--data.path data/python --schedule.tokens 204800
--schedule.warmup-tokens 20480 --schedule.decay-tokens 71680` and
- hybrid: `lrm train tiny --model.vocab-size 4160`
- llama: `lrm train tiny-llama --model.vocab-size 4160 --model.head-dim 48`
- factors: `lrm train tiny --model.vocab-size 0 --model.tie-embeddings --model.ssm-norm
  --model.ssm-groups 3 --model.head-dim 48 --model.rope-theta 1e11 --optimizer.multiplier-init one`
  with `--model.mup-embedding 2.5 --model.mup-head 0.4 --model.mup-attention-in 0.8
  --model.mup-key 1.7 --model.mup-attention-out 0.6 --model.mup-gate 1.3 --model.mup-down 0.7
  --model.mup-ssm-in 1.25 --model.mup-z 0.8 --model.mup-x 0.5 --model.mup-B 1.4 --model.mup-C 0.7
  --model.mup-dt 0.9 --model.mup-ssm-out 1.6`.

Every run is exported in each dtype to a temporary folder. Ours computes in float32 from the run's
own checkpoint, all positions at once; llama.cpp reads a text at once and then continues it token by
token, from its caches. Needs llama-cpp-python, which is compiled when installed.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import platform
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import tokenizers
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from learnable_multipliers.pretrain.data.encoding import LLAMA3_SPLIT
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer, load_tokenizer
from learnable_multipliers.pretrain.export import export
from learnable_multipliers.pretrain.gguf import file as gguf_file
from learnable_multipliers.pretrain.gguf.vocabulary import vocabulary
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from learnable_multipliers.pretrain.trainer.load import load_checkpoint, load_model

# Runs of blanks, ends of lines, digits, contractions, other scripts, marks, control characters, and
# a special token written out.
AWKWARD = (
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n\n\n\nclass A:\n\tpass  # two  blanks\n",
    "  leading, trailing  \n \n\t\t \r\n\r\n   ",
    "0 00 000 12345 1,234.5e-6 0x1F 7\u00b2 \u0661\u0662 \u2167 \u00bd",
    "It's, we'll, I'D 've ' s ''s \u2019s don't",
    "na\u00efve \u4e2d\u6587 \u0440\u0443\u0441\u0441 e\u0301 \u00a0\u3000\u2028 \U0001f600\u200d",
    "\x00\x01\x1c\x7f\x85\ufeff\ufffd<|endoftext|><|x|>",
)
# (file, cache): what llama.cpp computes with; its own default is a cache in float16.
VARIANTS = (
    ("float32", "float32"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
    ("float16", "float16"),
)
CACHE_TYPES = {"float32": 0, "float16": 1}
PROMPT, CONTINUED = 16, 50
FIRST_SURROGATE, LAST_SURROGATE, LAST_CODE_POINT = 0xD800, 0xDFFF, 0x10FFFF


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="files, one text each")
    parser.add_argument("--code-points", action="store_true", help="compare splits on all of them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts = [*AWKWARD, *(path.read_text(encoding="utf8") for path in options.texts)]
    record: dict[str, Any] = {
        "llama_cpp_python": llama_cpp.__version__,
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
        "models": [row for run in options.runs for row in compare(run, texts)],
    }
    if options.code_points:
        record["splits"] = [compare_splits(name) for name in ("GPT-2", "Llama 3")]
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


# -- models -----------------------------------------------------------------------------------


def compare(run: Path, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each file and cache."""
    checkpoint, _ = load_checkpoint(run)
    model = load_model(checkpoint).eval()
    tokenizer = load_tokenizer(run / "tokenizer.json", checkpoint.state["eos_token"])
    encoded = [tokenizer.encode(text) for text in texts]
    room = model.config.max_length
    inputs = [ids[:room] for ids in encoded]
    expected = [logits(model, ids) for ids in inputs]
    prompts = [ids[:PROMPT] for ids in encoded]
    wanted = [continued(lambda ids: logits(model, ids)[-1], prompt) for prompt in prompts]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in dict.fromkeys(dtype for dtype, _ in VARIANTS):
            export(run, Path(folder) / dtype, dtype, with_gguf=True)
        for dtype, cache in VARIANTS:
            file = Path(folder) / dtype / "model.gguf"
            rounded = rounded_model(model, dtype)
            by_weights = [logits(rounded, ids) for ids in inputs]
            with closing(opened(file, room, cache)) as engine:
                ids = [engine.tokenize(t.encode(), add_bos=False, special=False) for t in texts]
                found = [engine_logits(engine, tokens) for tokens in inputs]
                begun, on_the_way = zip(
                    *(engine_continued(engine, prompt) for prompt in prompts), strict=True
                )
                backs = [detokenized(engine, tokens) for tokens in encoded]
            whole = [[*prompt, *more][:-1] for prompt, more in zip(prompts, begun, strict=True)]
            row = {
                "model": run.name,
                "architecture": "falcon-h1" if model.config.has_ssm else "llama",
                "file": dtype,
                "cache": cache,
                "texts": len(texts),
                "same_ids": sum(a == b for a, b in zip(ids, encoded, strict=True)),
                "same_text_back": sum(a == b for a, b in zip(backs, texts, strict=True)),
                "positions": sum(map(len, inputs)),
                "largest_logit": max(np.abs(one).max().item() for one in expected),
                "largest_difference": largest(found, expected),
                "root_mean_square": root_mean_square(found, expected),
                "by_rounded_weights": largest(by_weights, expected),
                "largest_difference_continued": largest(
                    on_the_way, [logits(model, ids)[-CONTINUED:] for ids in whole]
                ),
                "distinct_tokens_continued": [len(set(more)) for more in begun],
                "same_continuations": sum(a == b for a, b in zip(begun, wanted, strict=True)),
                "same_tokens": [common(a, b) for a, b in zip(begun, wanted, strict=True)],
            }
            rows.append(row)
            print(
                f"{run.name:12} {dtype:>8} file, {cache} cache: "
                f"ids {row['same_ids']}/{len(texts)}, "
                f"text back {row['same_text_back']}/{len(texts)}, logits up to "
                f"{row['largest_logit']:.1f} within {row['largest_difference']:.1e} at "
                f"{row['positions']} positions (rounding the weights alone "
                f"{row['by_rounded_weights']:.1e}), continuations of {CONTINUED} "
                f"{row['same_continuations']}/{len(texts)}, "
                f"within {row['largest_difference_continued']:.1e}",
                flush=True,
            )
    return rows


@torch.no_grad()
def logits(model: HybridLM, ids: Sequence[int]) -> np.ndarray:
    """Return our logits at every position."""
    return model(torch.tensor([ids]))[0].numpy()


def continued(next_logits: Callable[[list[int]], np.ndarray], prompt: Sequence[int]) -> list[int]:
    """Return the most likely tokens behind a prompt, one after the other."""
    ids = list(prompt)
    for _ in range(CONTINUED):
        ids.append(int(next_logits(ids).argmax()))
    return ids[len(prompt) :]


def rounded_model(model: HybridLM, dtype: str) -> HybridLM:
    """Return the model with the matrices of a file, in float32."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    return other


def opened(file: Path, length: int, cache: str) -> llama_cpp.Llama:
    """Return the engine on a file."""
    kind = CACHE_TYPES[cache]
    return llama_cpp.Llama(
        str(file), n_ctx=length, logits_all=True, type_k=kind, type_v=kind, verbose=False
    )


def engine_logits(engine: llama_cpp.Llama, ids: Sequence[int]) -> np.ndarray:
    """Return llama.cpp's logits at every position, read at once."""
    engine.reset()
    engine.eval(ids)
    return engine.scores[: len(ids)].copy()


def engine_continued(
    engine: llama_cpp.Llama, prompt: Sequence[int]
) -> tuple[list[int], np.ndarray]:
    """Return what llama.cpp continues a prompt with, token by token, and the logits of each."""
    engine.reset()
    engine.eval(prompt)
    found: list[int] = []
    for _ in range(CONTINUED):
        if found:
            engine.eval(found[-1:])
        found.append(int(engine.scores[engine.n_tokens - 1].argmax()))
    return found, engine.scores[len(prompt) - 1 : engine.n_tokens].copy()


def detokenized(engine: llama_cpp.Llama, ids: Sequence[int]) -> str:
    """Return the text of some ids by llama.cpp's own function for all of them at once."""
    room = 1 << 16
    buffer, vocab = ctypes.create_string_buffer(room), engine._model.vocab
    tokens = (llama_cpp.llama_token * len(ids))(*ids)
    size = llama_cpp.llama_detokenize(vocab, tokens, len(ids), buffer, room, False, False)
    return buffer.raw[:size].decode()


def largest(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference."""
    return max(np.abs(a - b).max().item() for a, b in zip(found, expected, strict=True))


def root_mean_square(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the root mean square of all differences."""
    return float(np.concatenate([a - b for a, b in zip(found, expected, strict=True)]).std())


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two continuations begin with alike."""
    pairs = zip(first, second, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(first))


# -- splits -----------------------------------------------------------------------------------


def compare_splits(name: str) -> dict[str, Any]:
    """Compare where text is split into words, at every code point and in random texts.

    The tokenizer merges each of some characters with any byte beside it. So wherever one engine
    puts a border next to them and the other none, ids differ.
    """
    tokenizer = revealing_tokenizer(name)
    model = build(ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        gguf_file.write(file, model, tokenizer, "float32")
        engine = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    with closing(engine):

        def differs(text: str) -> bool:
            ids = engine.tokenize(text.encode(), add_bos=False, special=False)
            return ids != tokenizer.encode(text)

        points = [
            point
            for point in range(LAST_CODE_POINT + 1)
            if not FIRST_SURROGATE <= point <= LAST_SURROGATE
        ]
        wrong = [point for point in points if differs(around(chr(point)))]
        generator = random.Random(0)
        pool = [*"".join(AWKWARD), *"'sdtmlrve0 \n\t", "'ll", "  ", "\r\n", "\u017f"]
        drawn = ["".join(generator.choices(pool, k=generator.randint(1, 24))) for _ in range(10**5)]
        record = {
            "split": name,
            "called": vocabulary(tokenizer, tokenizer.vocab_size).pre,
            "code_points": len(points),
            "differing": len(wrong),
            "ranges": [f"{first:X}-{last:X}" for first, last in ranges(wrong)],
            "random_texts": len(drawn),
            "random_texts_differing": [ascii(text) for text in drawn if differs(text)],
        }
    print(
        f"{name}, called {record['called']}: {len(wrong):,} of {len(points):,} code points and "
        f"{len(record['random_texts_differing'])} of {len(drawn):,} random texts differ",
        flush=True,
    )
    return record


def revealing_tokenizer(name: str) -> TextTokenizer:
    """Return a tokenizer whose ids show the borders of words."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: index for index, character in enumerate(alphabet)}
    merges = []
    for mark in "as1!'\n\r ":
        ((written, _),) = whole.pre_tokenize_str(mark)
        for character in alphabet:
            for pair in ((written, character), (character, written)):
                if "".join(pair) not in tokens:
                    tokens["".join(pair)] = len(tokens)
                    merges.append(pair)
    tokenizer = Tokenizer(models.BPE(tokens, merges, ignore_merges=name == "Llama 3"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "Llama 3":
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return TextTokenizer(tokenizer, "<|endoftext|>")


def around(c: str) -> str:
    """Return a text that shows what kind of character one is."""
    return f"a{c}a1{c}1!{c}! {c}\n{c}\r{c}  {c}a  {c}1'{c}'s{c}a'{c}a  {c}"


def ranges(points: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for point in points:
        if found and point == found[-1][1] + 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return found


if __name__ == "__main__":
    main()
