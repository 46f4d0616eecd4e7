"""Small random models: Hugging Face families without downloads, and hand-written ones."""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_SSM = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

FAMILIES = {
    "llama": ("Llama", _GROUPED),
    "llama-tied": ("Llama", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _GROUPED),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3", {**_GROUPED, "head_dim": 8}),
    "phi3": ("Phi3", _GROUPED),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt-neox": ("GPTNeoX", _SIZES),
    "olmo2": ("Olmo2", _GROUPED),
    "falcon-h1": ("FalconH1", {**_GROUPED, **_SSM, "head_dim": 8, "mamba_rms_norm": False}),
    "falcon-h1-inner-norm": (
        "FalconH1",
        {**_GROUPED, **_SSM, "head_dim": 8, "mamba_rms_norm": True},
    ),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 8,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
# Not asked for by name, but the same code must read them.
MORE_FAMILIES = {
    "bloom": (
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    ),
    "falcon-7b": ("Falcon", {**_SIZES, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-40b": (
        "Falcon",
        {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-rw": ("Falcon", {**_SIZES, "multi_query": False, "new_decoder_architecture": False}),
    "gpt-bigcode": (
        "GPTBigCode",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "codegen": (
        "CodeGen",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "rotary_dim": 4,
        },
    ),
    "mpt": (
        "Mpt",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    ),
    "opt": (
        "OPT",
        {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    ),
    "glm4": ("Glm4", {**_GROUPED, "head_dim": 8}),
    "olmo": ("Olmo", _GROUPED),
    "bamba": (
        "Bamba",
        {
            **_GROUPED,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "attn_layer_indices": [1],
        },
    ),
    "nemotron": ("Nemotron", _GROUPED),
}


def build(family: str, *, dtype: torch.dtype = torch.float32, **overrides) -> nn.Module:
    """Return a small random model of a Hugging Face family, in eval mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    name, sizes = {**FAMILIES, **MORE_FAMILIES}[family]
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    model_name = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    config = getattr(transformers, config_name)(**{**sizes, **overrides})
    torch.manual_seed(1)
    # The grouped kernels for experts have no float64.
    config._experts_implementation = "eager"
    model = getattr(transformers, model_name)(config).to(dtype).eval()
    # Matrices of a trained size, norms and biases off their neutral start: mistakes show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(15.0)
    return model


def token_ids(batch: int = 2, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def logits(model: nn.Module, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        out = model(token_ids(), **kwargs)
    return out if isinstance(out, torch.Tensor) else out.logits


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.ffn_norm = RMSNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class HandWritten(nn.Module):
    """A Llama as people write it by hand."""

    def __init__(self, width: int = 16, heads: int = 4, hidden: int = 24, layers: int = 2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class FusedAttention(nn.Module):
    """q, k, v in one matrix of an order no name tells."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(4))
        return self.proj(y.transpose(1, 2).flatten(-2))


class FusedBlock(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.norm1 = nn.LayerNorm(width)
        self.attn = FusedAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, width)
        )
        self.final = nn.LayerNorm(width)
        self.to_tokens = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.emb(ids)
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.to_tokens(self.final(x))
