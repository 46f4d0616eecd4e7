"""A model and its tokenizer in one GGUF file; the only module that needs the package gguf."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer
from learnable_multipliers.pretrain.gguf.tensors import (
    architecture,
    is_matrix,
    settings,
    tensors,
)
from learnable_multipliers.pretrain.gguf.vocabulary import vocabulary
from learnable_multipliers.pretrain.model.hugging_face import ExportDtype, cast
from learnable_multipliers.pretrain.model.hybrid import HybridLM

# Numbers of the format: of a tensor's type, and of a file whose matrices have it.
_TENSOR_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}


def write(path: Path, model: HybridLM, tokenizer: TextTokenizer, dtype: ExportDtype) -> None:
    """Write a file that llama.cpp loads.

    Matrices have the given dtype, the rest is float32. The fixed factors are in the weights.
    """
    gguf = package()
    words, weights = vocabulary(tokenizer, model.config.vocab_size), tensors(model)
    writer = gguf.GGUFWriter(path, architecture(model.config))
    writer.add_type("model")
    writer.add_file_type(_FILE_TYPES[dtype])
    for key, value in settings(model.config).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.eos)
    writer.add_eos_token_id(words.eos)
    # Encoding adds no token to a text here either.
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    dtypes: dict[str, ExportDtype] = {
        name: dtype if is_matrix(name) else "float32" for name in weights
    }
    for name, value in weights.items():
        kind = gguf.GGMLQuantizationType(_TENSOR_TYPES[dtypes[name]])
        num_bytes = value.numel() * getattr(torch, dtypes[name]).itemsize
        writer.add_tensor_info(name, tuple(value.shape), np.dtype("f4"), num_bytes, kind)
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (file,) = writer.fout
        # The writer's own method does not say why a write failed.
        for name, value in weights.items():
            writer.write_padding(file, file.tell())
            file.write(little_endian(cast(name, value, dtypes[name])).data)
        writer.write_padding(file, file.tell())


def little_endian(value: Tensor) -> np.ndarray:
    """Return the bytes of a tensor in the order of a file; bfloat16 has no dtype in numpy."""
    plain = value.contiguous()
    bits = plain.view(torch.int16 if plain.element_size() == 2 else torch.int32).numpy()
    return bits.astype(f"<i{plain.element_size()}", copy=False)


def package() -> Any:
    """Return the package gguf; raise if it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a GGUF file needs the package gguf: pip install 'learnable-multipliers[gguf]'"
        ) from error
    return gguf
