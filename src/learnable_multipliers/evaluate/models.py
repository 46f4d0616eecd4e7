"""What can be evaluated, from local files: a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from learnable_multipliers.evaluate.requests import Encoder
from learnable_multipliers.evaluate.scoring import Model
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.manifest import MANIFEST, file_sha256
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer, load_tokenizer
from learnable_multipliers.pretrain.export import load_model, tokenizer_of
from learnable_multipliers.pretrain.trainer.run_folder import checkpoint_folder, load_checkpoint
from learnable_multipliers.pretrain.trainer.run_state import parse_state

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Loaded:
    """A model ready to be scored."""

    model: Model
    vocab_size: int
    max_length: int | None
    """Tokens it reads at once; None if it does not say."""
    tokenizer: str | None
    """SHA-256 of the tokenizer.json it was trained with, where that is known."""
    step: int | None = None
    notes: tuple[str, ...] = ()


def is_hugging_face(source: Path) -> bool:
    """Return whether a folder is Hugging Face's; a run has a config.json too, and checkpoints."""
    is_run = (source / MANIFEST).is_file() or checkpoint_folder(source).is_dir()
    is_model = (source / "config.json").is_file()
    if not is_run and not is_model:
        raise ValueError(
            f"{source} is neither a run, nor a checkpoint, nor a Hugging Face folder, nor one of "
            "results: give what lrm train (--out) or lrm export wrote, or a folder with a "
            "config.json"
        )
    return is_model and not is_run


def results_folder(source: Path, loaded: list[int], limit: int) -> Path:
    """Return where results go: below the run, or below the Hugging Face folder."""
    parts = [f"step-{loaded[-1]:08d}"] if loaded else ["model"]
    parts += [f"last-{len(loaded)}"] * (len(loaded) > 1) + [f"limit-{limit}"] * bool(limit)
    # A checkpoint never changes after it was published, so nothing is written into it.
    inside = (source / MANIFEST).is_file()
    home = source.resolve().parent.parent if inside else source
    return home / "evaluations" / "-".join(parts)


def load_encoder(source: Path) -> tuple[Encoder, str | None]:
    """Return the tokenizer of a model, and the SHA-256 of its tokenizer.json if it has one."""
    if is_hugging_face(source):
        return _HuggingFaceEncoder(source), _fingerprint(source)
    checkpoint, _ = load_checkpoint(source)
    eos, expected = (
        parse_state(checkpoint, str, checkpoint.state.get(key), f"state.json.{key}")
        for key in ("eos_token", "tokenizer")
    )
    path = tokenizer_of(source, expected)
    if path is None:
        raise ValueError(
            f"no tokenizer.json was found beside {source}: copy it from the data the run was "
            "trained on, or score requests made elsewhere (--requests)"
        )
    return _RunEncoder(load_tokenizer(path, eos)), expected


def load_models(
    source: Path, *, last: int = 1, device: torch.device, dtype: Dtype
) -> Iterator[Loaded]:
    """Yield the model of a folder, or those of a run's last checkpoints one after the other."""
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
    tokenizer = checkpoint.state.get("tokenizer")
    config = model.config
    return Loaded(model, config.vocab_size, config.max_length, tokenizer, checkpoint.step, notes)


def _hugging_face(folder: Path, device: torch.device, dtype: Dtype) -> Loaded:
    with _errors_of(folder):
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
    model = model.to(device).eval()
    # What models call the length they were made for.
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    lengths = [found for name in names if (found := getattr(model.config, name, None))]

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    size = model.get_input_embeddings().weight.shape[0]
    return Loaded(logits, size, lengths[0] if lengths else None, _fingerprint(folder))


def _fingerprint(folder: Path) -> str | None:
    path = folder / "tokenizer.json"
    return file_sha256(path) if path.is_file() else None


class _RunEncoder:
    """The tokenizer of a run: texts are encoded as its training data were."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.prefix_id: int | None = tokenizer.eos_id
        self._tokenizer = tokenizer

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        # Training data never hold tokens that a tokenizer adds by itself.
        return self._tokenizer.encode(text)


class _HuggingFaceEncoder:
    """The tokenizer of a Hugging Face folder, with the special tokens it adds by itself."""

    def __init__(self, folder: Path) -> None:
        with _errors_of(folder):
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        first = tokenizer.bos_token_id
        self.prefix_id: int | None = tokenizer.eos_token_id if first is None else first
        self._tokenizer = tokenizer

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        return self._tokenizer.encode(text, **({"add_special_tokens": False} if bare else {}))


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Make one line of whatever transformers raises for a folder that it cannot use."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "evaluating a Hugging Face folder needs transformers: "
            "pip install 'learnable-multipliers[transformers]'"
        ) from error
    except (MemoryError, RecursionError):
        raise
    # Any other error, by what the files say and which kind of model it is.
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder} gives no model and tokenizer: {why}") from error
