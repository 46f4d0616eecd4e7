"""Load models to evaluate from local files: a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from learnable_multipliers._checksum import file_sha256
from learnable_multipliers._hugging_face import hugging_face_errors
from learnable_multipliers.evaluate.generation import Decoder, UncachedDecoder
from learnable_multipliers.evaluate.requests import Encoder
from learnable_multipliers.evaluate.scoring import Model
from learnable_multipliers.evaluate.token_bytes import token_bytes
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.manifest import MANIFEST
from learnable_multipliers.pretrain.data.shards import Manifest, is_dataset, verify_sha256
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer, load_tokenizer
from learnable_multipliers.pretrain.model.hybrid import HybridLM
from learnable_multipliers.pretrain.trainer.load import (
    is_run,
    load_checkpoint,
    load_model,
    tokenizer_of,
)
from learnable_multipliers.pretrain.trainer.run_folder import checkpoint_folder

Dtype = Literal["float32", "bfloat16"]
_SCORE = "learnable_multipliers.evaluate.scoring.score"


@dataclass(frozen=True)
class Loaded:
    """A model that can be scored."""

    model: Model
    make_decoder: Callable[[], Decoder]
    """Makes the decoder of a batch of prompts."""
    vocab_size: int
    max_length: int | None
    """Maximum length in tokens; None if unknown."""
    tokenizer: str | None
    """SHA-256 of the tokenizer.json it was trained with, if known."""
    step: int | None = None
    notes: tuple[str, ...] = ()


def check_model_folder(source: Path) -> None:
    """Raise a ValueError for a folder that is neither a run, a checkpoint nor Hugging Face's."""
    if not is_run(source) and not is_hugging_face(source):
        raise ValueError(
            f"{source} is neither a run, nor a checkpoint, nor a Hugging Face folder, nor one of "
            "results: give what lrm train (--out) or lrm export wrote, or a folder with a "
            "config.json"
        )


def is_hugging_face(source: Path) -> bool:
    """Return whether a folder is Hugging Face's; a run has a config.json too, and checkpoints."""
    return (source / "config.json").is_file() and not is_run(source)


def results_folder(source: Path, loaded: list[int], **settings: int | str | None) -> Path:
    """Return the folder of the results: below the run, or below the Hugging Face folder.

    `settings` that are not None become part of its name, since they change the results.
    """
    parts = [f"step-{loaded[-1]:08d}"] if loaded else ["model"]
    parts += [f"last-{len(loaded)}"] * (len(loaded) > 1)
    parts += [f"{name}-{value}" for name, value in settings.items() if value is not None]
    # Nothing is written into a published checkpoint.
    inside = (source / MANIFEST).is_file()
    home = source.resolve().parent.parent if inside else source
    return home / "evaluations" / "-".join(parts)


def load_encoder(source: Path) -> tuple[Encoder, str | None]:
    """Return the tokenizer of a model, and the SHA-256 of its tokenizer.json if it has one.

    Prepared data hold the tokenizer of the runs trained on them.
    """
    if is_dataset(source):
        manifest = Manifest.load(source)
        path, expected = source / manifest.tokenizer_file, manifest.tokenizer_sha256
        verify_sha256(path, expected)
        return _RunEncoder(load_tokenizer(path, manifest.eos_token)), expected
    check_model_folder(source)
    if is_hugging_face(source):
        return _HuggingFaceEncoder(source), _fingerprint(source)
    checkpoint, _ = load_checkpoint(source)
    path, eos, expected = tokenizer_of(source, checkpoint)
    if path is None:
        raise ValueError(
            f"no tokenizer.json was found beside {source}: copy it from the data the run was "
            "trained on, or score requests made elsewhere (--requests)"
        )
    return _RunEncoder(load_tokenizer(path, eos)), expected


def load_models(
    source: Path, *, last: int = 1, device: torch.device, dtype: Dtype
) -> Iterator[Loaded]:
    """Yield the model of a folder, or the models of a run's last checkpoints in turn."""
    check_model_folder(source)
    if is_hugging_face(source):
        if last != 1:
            raise ValueError(f"{source} is one model: only a run has checkpoints to average")
        yield _hugging_face(source, device, dtype)
        return
    if last == 1:
        checkpoint, notes = load_checkpoint(source)
        yield _of_checkpoint(checkpoint, device, dtype, tuple(notes))
        return
    if (source / MANIFEST).is_file():
        raise ValueError(f"{source} is one checkpoint: give the run's folder to average several")
    for checkpoint in checkpoints.load_last(checkpoint_folder(source), last):
        yield _of_checkpoint(checkpoint, device, dtype)


def _of_checkpoint(
    checkpoint: checkpoints.Checkpoint,
    device: torch.device,
    dtype: Dtype,
    notes: tuple[str, ...] = (),
) -> Loaded:
    model = load_model(checkpoint).to(device, getattr(torch, dtype)).eval()
    return from_model(model, checkpoint.state.get("tokenizer"), checkpoint.step, notes)


def from_model(
    model: HybridLM, tokenizer: str | None, step: int | None = None, notes: tuple[str, ...] = ()
) -> Loaded:
    """Return a model of `lrm train` as one that can be scored."""
    config = model.config
    make_decoder = lambda: UncachedDecoder(model)  # noqa: E731
    return Loaded(model, make_decoder, config.vocab_size, config.max_length, tokenizer, step, notes)


def _hugging_face(folder: Path, device: torch.device, dtype: Dtype) -> Loaded:
    with hugging_face_errors(folder, _SCORE):
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
    model = model.to(device).eval()
    # Names of the maximum length in model configs.
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    lengths = [value for name in names if (value := getattr(model.config, name, None))]

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    size = model.get_input_embeddings().weight.shape[0]
    length = lengths[0] if lengths else None
    takes = inspect.signature(model.forward).parameters
    if {"past_key_values", "logits_to_keep"} <= set(takes):
        return Loaded(logits, lambda: _CachedDecoder(model), size, length, _fingerprint(folder))
    note = f"{folder} does not support past_key_values: generation is slower"
    make_decoder = lambda: UncachedDecoder(logits)  # noqa: E731
    return Loaded(logits, make_decoder, size, length, _fingerprint(folder), notes=(note,))


class _CachedDecoder:
    """A Hugging Face model with its own cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Append tokens (batch, length) and return the logits after the last."""
        output = self._model(
            input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        # Meant for beam search; unlike batch_select_indices it handles the states of mixers too.
        self._cache.reorder_cache(rows)


def _fingerprint(folder: Path) -> str | None:
    path = folder / "tokenizer.json"
    return file_sha256(path) if path.is_file() else None


class _RunEncoder:
    """The tokenizer of a run: encodes texts like the training data."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.prefix_id: int | None = tokenizer.eos_id
        self.end_ids = (tokenizer.eos_id,)
        self._tokenizer = tokenizer

    def token_bytes(self) -> tuple[bytes, ...]:
        return token_bytes(self._tokenizer.tokenizer)

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        # Training data contain no special tokens that a tokenizer adds.
        return self._tokenizer.encode(text)


class _HuggingFaceEncoder:
    """The tokenizer of a Hugging Face folder, with the special tokens that it adds."""

    def __init__(self, folder: Path) -> None:
        with hugging_face_errors(folder, _SCORE):
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            self.end_ids = _end_ids(folder, tokenizer.eos_token_id)
        first = tokenizer.bos_token_id
        self.prefix_id: int | None = tokenizer.eos_token_id if first is None else first
        self._tokenizer = tokenizer

    def token_bytes(self) -> tuple[bytes, ...]:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ValueError(
                "the tokenizer is not from the `tokenizers` library, so generated tokens cannot be "
                "decoded: leave out the generation tasks"
            )
        return token_bytes(fast)

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        return self._tokenizer.encode(text, **({"add_special_tokens": False} if bare else {}))


def _end_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Return the end tokens named by the tokenizer and by generation_config.json."""
    ids = [] if eos is None else [eos]
    path = folder / "generation_config.json"
    if path.is_file():
        named = json.loads(path.read_text(encoding="utf8")).get("eos_token_id")
        ids += named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(index for index in ids if type(index) is int))
