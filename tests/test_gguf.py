"""A GGUF file holds the model: every tensor to the bit, every setting, the tokenizer as it is."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from learnable_multipliers.pretrain.data.encoding import LLAMA3_SPLIT
from learnable_multipliers.pretrain.data.tokenizer import TextTokenizer, train_tokenizer
from learnable_multipliers.pretrain.gguf import file as gguf_file
from learnable_multipliers.pretrain.gguf.tensors import paired, row_factors, tensors
from learnable_multipliers.pretrain.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    vocabulary,
)
from learnable_multipliers.pretrain.model.attention import apply_rotary, rotary_table
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import HybridLM, build
from runs import HYBRID, LLAMA, small_run, trained

gguf = pytest.importorskip("gguf")

# Powers of two: a product with them is exact, and so is its inverse.
FACTORS = {
    "mup_attention_in": 0.5,
    "mup_key": 8.0,
    "mup_attention_out": 0.25,
    "mup_gate": 2.0,
    "mup_down": 0.125,
}
INSIDE = {
    "mup_ssm_in": 4.0,
    "mup_z": 0.5,
    "mup_x": 0.25,
    "mup_B": 2.0,
    "mup_C": 16.0,
    "mup_dt": 0.125,
    "mup_ssm_out": 0.5,
}
ENDS = {"mup_embedding": 2.0, "mup_head": 0.5}
SIZES = {"vocab_size": 320, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "norm_eps": 1e-6}
BIG_HYBRID = replace(
    HYBRID, **SIZES, ssm_size=64, ssm_groups=2, rope_theta=1e11, max_length=777, ssm_conv_size=3
)
MODELS = {
    "hybrid": BIG_HYBRID,
    "hybrid tied": replace(BIG_HYBRID, tie_embeddings=True),
    "hybrid mup": replace(BIG_HYBRID, ssm_norm=True, **FACTORS, **INSIDE, **ENDS),
    "hybrid mup tied": replace(BIG_HYBRID, tie_embeddings=True, **FACTORS, **INSIDE, **ENDS),
    "llama": replace(LLAMA, **SIZES),
    "llama tied": replace(LLAMA, **SIZES, tie_embeddings=True),
    "llama mup": replace(LLAMA, **SIZES, **FACTORS, **ENDS),
}
TEXTS = [f"{n} times {n + 1} is {n * n + n},\n  or nearly so. \u00e9\u4e2d" for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def made(config: ModelConfig) -> HybridLM:
    """Return a model in which no vector is constant, so that a wrong place shows."""
    model, generator = build(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def written(folder: Path, model: HybridLM, tokenizer: TextTokenizer, dtype="float32"):
    gguf_file.write(folder / "model.gguf", model, tokenizer, dtype)
    return gguf.GGUFReader(folder / "model.gguf")


def values(reader) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, by name."""
    found = {}
    for tensor in reader.tensors:
        # The file has the fastest axis first.
        shape = tuple(reversed(tensor.shape.tolist()))
        data = torch.from_numpy(np.array(tensor.data))
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            data = data.view(torch.bfloat16)
        found[tensor.name] = data.reshape(shape)
    return found


def back(found: dict[str, torch.Tensor], model: HybridLM) -> dict[str, torch.Tensor]:
    """Return our parameters from the tensors of a file, by the inverse of every step."""
    config = model.config
    hybrid = config.has_ssm
    state = {
        "model.embed_tokens.weight": found["token_embd.weight"] / config.mup_embedding,
        "model.final_layernorm.weight": found["output_norm.weight"],
    }
    head = found.get("output.weight", found["token_embd.weight"])
    state["lm_head.weight"] = head / config.mup_head
    half = config.head_dim // 2
    order = torch.stack((torch.arange(half), torch.arange(half) + half), 1).flatten()

    def ours(weight: torch.Tensor, heads: int) -> torch.Tensor:
        if hybrid:
            return weight
        # Row 2i of a head in the file is row i, row 2i + 1 is row i + half.
        split = weight.reshape(heads, config.head_dim, -1)
        result = torch.empty_like(split)
        result[:, order] = split
        return result.reshape(weight.shape)

    for index in range(config.num_layers):

        def at(name: str, index: int = index) -> torch.Tensor:
            return found[f"blk.{index}.{name}"]

        into = config.mup_attention_in
        layer = {
            "input_layernorm.weight": at("attn_norm.weight"),
            "self_attn.q_proj.weight": ours(at("attn_q.weight"), config.num_heads) / into,
            "self_attn.k_proj.weight": ours(at("attn_k.weight"), config.num_kv_heads)
            / (into * config.mup_key),
            "self_attn.v_proj.weight": at("attn_v.weight") / into,
            "self_attn.o_proj.weight": at("attn_output.weight") / config.mup_attention_out,
            "pre_ff_layernorm.weight": at("ffn_norm" if hybrid else "ffn_norm.weight"),
            "feed_forward.gate_proj.weight": at("ffn_gate.weight") / config.mup_gate,
            "feed_forward.up_proj.weight": at("ffn_up.weight"),
            "feed_forward.down_proj.weight": at("ffn_down.weight") / config.mup_down,
        }
        if hybrid:
            z, x, B, C, dt = at("ssm_in.weight").split(config.ssm_block_sizes)  # noqa: N806
            blocks = (
                z / config.mup_z,
                x / config.mup_x,
                B / config.mup_B,
                C / config.mup_C,
                dt / config.mup_dt,
            )
            layer |= {
                "mamba.in_proj.weight": torch.cat(blocks) / config.mup_ssm_in,
                "mamba.conv1d.weight": at("ssm_conv1d.weight")[:, None],
                "mamba.conv1d.bias": at("ssm_conv1d.bias"),
                "mamba.dt_bias": at("ssm_dt.bias"),
                "mamba.D": at("ssm_d")[:, 0],
                "mamba.out_proj.weight": at("ssm_out.weight") / config.mup_ssm_out,
            }
            if config.ssm_norm:
                layer["mamba.norm.weight"] = at("ssm_norm.weight").flatten()
        state |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    return state


# -- tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_comes_back_to_the_bit(tmp_path, tokenizer, name):
    model = made(MODELS[name])
    found = values(written(tmp_path, model, tokenizer))
    recovered = back(found, model)
    for parameter, value in model.state_dict().items():
        if parameter.endswith("A_log"):
            # A logarithm does not come back to the bit; what the forward pass takes of it does.
            decay = found[f"blk.{parameter.split('.')[2]}.ssm_a"]
            assert torch.equal(decay, -torch.exp(value)[:, None])
        else:
            assert torch.equal(recovered[parameter], value), parameter
    kept = len({id(p) for p in model.parameters()})
    # With two factors, a tied matrix is written twice.
    assert len(found) == kept + (name == "hybrid mup tied")


def test_dividing_by_a_factor_is_the_inverse_only_of_the_right_one():
    config = replace(MODELS["hybrid mup"], mup_B=4.0)
    model = made(config)
    recovered = back(tensors(model), made(MODELS["hybrid mup"]))
    name = "model.layers.0.mamba.in_proj.weight"
    changed = (recovered[name] != model.state_dict()[name]).any(1)
    assert changed.sum() == config.ssm_block_sizes[2]


def test_factors_that_are_no_powers_of_two_are_rounded_once():
    model = made(replace(HYBRID, vocab_size=320, mup_attention_in=0.3, mup_key=1.7))
    weight = model.state_dict()["model.layers.1.self_attn.k_proj.weight"]
    expected = (weight.double() * (0.3 * 1.7)).float()
    assert torch.equal(tensors(model)["blk.1.attn_k.weight"], expected)
    assert set(row_factors(model)) == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qkv"
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["hybrid mup", "llama"])
def test_matrices_are_rounded_once_and_the_rest_is_float32(tmp_path, tokenizer, name, dtype):
    model = made(MODELS[name])
    exact, found = tensors(model), values(written(tmp_path, model, tokenizer, dtype))
    assert list(found) == list(exact)
    # Attention, MLP, embedding and head; a mixer has two more in each layer.
    matrices = 2 + 2 * (7 + (2 if "hybrid" in name else 0))
    assert sum(value.dtype != torch.float32 for value in found.values()) == matrices
    for key, value in exact.items():
        is_vector = min(value.shape[-1], value.shape[0]) < 16 or value.ndim == 1
        assert (found[key].dtype == torch.float32) == is_vector, key
        assert torch.equal(found[key], value.to(found[key].dtype)), key


def test_a_value_beyond_float16_is_rejected_by_name(tmp_path, tokenizer):
    model = made(replace(MODELS["llama"], mup_gate=1e6))
    with pytest.raises(ValueError, match=r"ffn_gate\.weight has values up to .* bfloat16 or"):
        written(tmp_path, model, tokenizer, "float16")


def test_names_are_those_of_the_package(tokenizer):
    for name in ("hybrid mup", "llama"):
        model = made(MODELS[name])
        kind = gguf.MODEL_ARCH.FALCON_H1 if "hybrid" in name else gguf.MODEL_ARCH.LLAMA
        known = gguf.get_tensor_name_map(kind, model.config.num_layers)
        theirs = set()
        for parameter in model.state_dict():
            asked = parameter.replace("dt_bias", "dt_proj.bias")
            if "llama" in name:
                asked = asked.replace("pre_ff_layernorm", "post_attention_layernorm")
            theirs.add(known.get_name(asked, try_suffixes=(".weight", ".bias")))
        found = set(tensors(model))
        if "hybrid" in name:
            # The package has a suffix here that llama.cpp does not look for.
            theirs = {n.replace("ffn_norm.weight", "ffn_norm") for n in theirs}
        assert found == theirs


def test_paired_rows_rotated_as_neighbours_are_ours_rotated_as_halves():
    heads, head_dim, length = 3, 8, 5
    weight = torch.randn(heads * head_dim, 6, dtype=torch.float64)
    x = torch.randn(1, length, 6, dtype=torch.float64)
    rotary = rotary_table(length, head_dim, 1e4, torch.device("cpu"))
    ours = apply_rotary((x @ weight.T).unflatten(-1, (heads, head_dim)), rotary)
    even, odd = (x @ paired(weight, head_dim).T).unflatten(-1, (heads, -1, 2)).unbind(-1)
    cos, sin = (part[:, None].double() for part in rotary)
    torch.testing.assert_close(ours[..., : head_dim // 2], even * cos - odd * sin)
    torch.testing.assert_close(ours[..., head_dim // 2 :], odd * cos + even * sin)


# -- settings ---------------------------------------------------------------------------------

SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_length",
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
SSM_SETTINGS = {
    "ssm.conv_kernel": "ssm_conv_size",
    "ssm.inner_size": "ssm_size",
    "ssm.state_size": "ssm_state_size",
    "ssm.time_step_rank": "num_ssm_heads",
    "ssm.group_count": "ssm_groups",
}


@pytest.mark.parametrize("name", ["hybrid", "llama"])
def test_every_setting_is_that_of_the_model(tmp_path, tokenizer, name):
    config = MODELS[name]
    reader = written(tmp_path, made(config), tokenizer, "bfloat16")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    prefix = "falcon-h1" if name == "hybrid" else "llama"
    assert fields["general.architecture"] == prefix
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16
    expected = SETTINGS | (SSM_SETTINGS if name == "hybrid" else {})
    own = {key for key in fields if key.startswith(prefix)}
    assert own == {f"{prefix}.{key}" for key in expected}
    for key, ours in expected.items():
        value = getattr(config, ours)
        wanted = np.float32(value) if isinstance(value, float) else value
        assert fields[f"{prefix}.{key}"] == wanted, key


# -- tokenizer --------------------------------------------------------------------------------


def test_the_tokenizer_of_the_file_is_that_of_the_run(tmp_path, tokenizer):
    size = tokenizer.vocab_size + 20
    model = made(replace(MODELS["llama"], vocab_size=size))
    reader = written(tmp_path, model, tokenizer)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    assert (len(tokens), len(types), len(set(tokens))) == (size, size, size)
    known = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    assert {token: tokens.index(token) for token in known} == known
    assert [kind for kind in types if kind != NORMAL] == [CONTROL] + [UNUSED] * 20
    assert types[tokenizer.eos_id] == CONTROL
    for name in ("bos", "eos"):
        assert fields[f"tokenizer.ggml.{name}_token_id"] == tokenizer.eos_id
        assert fields[f"tokenizer.ggml.add_{name}_token"] is False
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "trillion"
    # A tokenizer of the file's tokens and merges gives the same ids.
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    described = json.loads(tokenizer.tokenizer.to_str())
    described["model"] |= {
        "vocab": {t: i for i, t in enumerate(tokens) if types[i] != UNUSED},
        "merges": merges,
    }
    again = Tokenizer.from_str(json.dumps(described))
    for text in (*TEXTS, "  blanks\n\n\t 12345 it's \U0001f600"):
        assert again.encode(text).ids == tokenizer.encode(text)


def test_a_tokenizer_of_bytes_has_one_merge_that_no_text_uses(tmp_path):
    model = made(replace(MODELS["llama"], vocab_size=257))
    reader = written(tmp_path, model, train_tokenizer((), 257))
    (merge,) = reader.fields["tokenizer.ggml.merges"].contents()
    # Symbols of more than one byte come from merges alone.
    assert [len(symbol) > 1 for symbol in merge.split(" ")] == [True, True]


def changed(tokenizer: TextTokenizer, change) -> TextTokenizer:
    other = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    change(other)
    return TextTokenizer(other, tokenizer.eos_token)


def split_like_llama(tokenizer: Tokenizer, pattern: str = LLAMA3_SPLIT) -> None:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])


def test_added_tokens_are_found_in_text_unless_they_are_special(tokenizer):
    def change(other):
        other.add_tokens([AddedToken("two words")])
        other.add_special_tokens(["<|user|>", "<unused 303>"])

    words = vocabulary(changed(tokenizer, change), 304)
    assert words.tokens[300:] == ("two words", "<|user|>", "<unused 303>", "<unused 303>>")
    assert words.types[300:] == (USER_DEFINED, CONTROL, CONTROL, UNUSED)


def test_an_end_of_document_among_the_words_of_a_model_is_special_all_the_same(tokenizer):
    described = json.loads(tokenizer.tokenizer.to_str())
    plain = Tokenizer.from_str(json.dumps(described | {"added_tokens": []}))
    words = vocabulary(TextTokenizer(plain, tokenizer.eos_token), 300)
    assert [index for index, kind in enumerate(words.types) if kind == CONTROL] == [words.eos]


def test_llama_3_splits_under_its_own_name(tokenizer):
    def change(other):
        split_like_llama(other)
        other.model.ignore_merges = True

    assert vocabulary(changed(tokenizer, change), 320).pre == "llama-bpe"


def set_normalizer(other):
    other.normalizer = normalizers.NFC()


def set_prefix(other):
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def set_whole_words(other):
    other.model.ignore_merges = True


def add_neighbour(other):
    other.add_tokens([AddedToken("word", single_word=True)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_normalizer, r"it normalizes text \(NFC\), and llama.cpp does not"),
        (set_prefix, "it splits text in another way than GPT-2 and Llama 3"),
        (split_like_llama, "its ignore_merges is False, and .* llama-bpe.* takes True"),
        (set_whole_words, "its ignore_merges is True, and .* takes False"),
        (add_neighbour, "its token 'word' is found only with certain neighbours"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_rejected(tokenizer, change, why):
    with pytest.raises(ValueError, match=why):
        vocabulary(changed(tokenizer, change), 320)


def test_other_kinds_of_tokenizers_are_rejected(tokenizer):
    described = json.loads(tokenizer.tokenizer.to_str())
    for change, why in (
        ({"byte_fallback": True}, "it is no byte-level BPE"),
        ({"vocab": {"a": 0, "b": 1}, "merges": []}, "it has no token for some bytes"),
        ({"vocab": described["model"]["vocab"] | {"\u4e2d": 300}}, "'\u4e2d' stands for no bytes"),
    ):
        text = json.dumps(described | {"model": described["model"] | change})
        with pytest.raises(ValueError, match=why):
            vocabulary(TextTokenizer(Tokenizer.from_str(text), tokenizer.eos_token), 320)


def test_a_tokenizer_larger_than_the_model_is_rejected(tokenizer):
    with pytest.raises(ValueError, match="has 300 tokens, and the model has rows for 299"):
        vocabulary(tokenizer, 299)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    config = small_run(data, tmp_path_factory.mktemp("gguf") / "run", steps=3)
    return trained(config).config.out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_file_lies_beside_the_weights_and_holds_the_same(ask, run, dtype):
    code, _, complaints = ask("export", run, "out", "--gguf", "--dtype", dtype)
    assert (code, complaints) == (0, "")
    weights = load_file("out/model.safetensors")
    assert {value.dtype for value in weights.values()} == {getattr(torch, dtype)}
    found = values(gguf.GGUFReader("out/model.gguf"))
    for index in (0, 1):
        mine = weights[f"model.layers.{index}.feed_forward.up_proj.weight"]
        assert torch.equal(found[f"blk.{index}.ffn_up.weight"], mine)
    assert ask("export", run, "plain")[0] == 0
    assert not Path("plain/model.gguf").exists()


def test_without_the_package_one_line_says_what_to_install(ask, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, _, complaints = ask("export", run, "out", "--gguf")
    assert code == 1
    (line,) = complaints.splitlines()
    assert line.endswith("needs the package gguf: pip install 'learnable-multipliers[gguf]'")
    assert not Path("out").exists()
    assert ask("export", run, "out")[0] == 0


def test_a_checkpoint_without_its_tokenizer_gives_no_file(ask, run):
    shutil.copytree(run / "checkpoints" / "step-00000003", "alone")
    code, _, complaints = ask("export", "alone", "out", "--gguf")
    assert code == 1
    assert "a GGUF file holds one: export the run's folder, or without --gguf" in complaints
    assert not Path("out").exists()


def test_a_failed_write_leaves_nothing(ask, run, monkeypatch):
    monkeypatch.setattr(gguf_file, "little_endian", lambda value: (_ for _ in ()).throw(OSError))
    assert ask("export", run, "out", "--gguf")[0] == 1
    assert list(Path.cwd().iterdir()) == []
