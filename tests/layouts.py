"""Small models with the names, shapes and attributes of torchtitan, litgpt, nanochat and timm."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from families import VOCABULARY, FeedForward, RMSNorm

WIDTH, HEADS, KEY_HEADS, HEAD_DIM, HIDDEN = 12, 4, 2, 4, 20


def attend(q, k, v, causal=True):
    """Attend with q, k, v of (batch, position, head, channel); key heads may be fewer."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return y.transpose(1, 2).flatten(-2)


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


# torchtitan: projections in a module of their own, key heads outermost where they are fused.


class QKVLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HEAD_DIM
        self.wq = linear(WIDTH, HEADS * HEAD_DIM)
        self.wk = linear(WIDTH, KEY_HEADS * HEAD_DIM)
        self.wv = linear(WIDTH, KEY_HEADS * HEAD_DIM)

    def forward(self, x):
        return [w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)]


class FusedQKVLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HEAD_DIM
        self.heads_per_kv = HEADS // KEY_HEADS
        self.wqkv = linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM)

    def forward(self, x):
        by_group = self.wqkv(x).unflatten(-1, (-1, self.heads_per_kv + 2, self.head_dim))
        q, k, v = by_group.split((self.heads_per_kv, 1, 1), -2)
        return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


class GQAttention(nn.Module):
    def __init__(self, projections, qk_norm=False):
        super().__init__()
        self.qkv_linear = projections
        self.wo = linear(HEADS * HEAD_DIM, WIDTH)
        self.q_norm, self.k_norm = (RMSNorm(HEAD_DIM) if qk_norm else None for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv_linear(x)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.wo(attend(q, k, v))


class TitanLayer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.feed_forward = FeedForward(WIDTH, HIDDEN)
        self.attention_norm = RMSNorm(WIDTH)
        self.ffn_norm = RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """torchtitan's layers are a ModuleDict with numbers as names."""

    def __init__(self, projections=FusedQKVLinear, qk_norm=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({"0": TitanLayer(GQAttention(projections(), qk_norm))})
        self.norm = RMSNorm(WIDTH)
        self.lm_head = linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


# litgpt: [q | k | v] with sizes in the config; fc_1 is the gate. Its attention and nanochat's have
# one class name.


def litgpt_config(**changes):
    sizes = {"n_head": HEADS, "n_query_groups": KEY_HEADS, "head_size": HEAD_DIM, **changes}
    return SimpleNamespace(**sizes)


def litgpt_attention(qk_norm=False):
    class CausalSelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = litgpt_config()
            self.qkv = linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=True)
            self.proj = linear(HEADS * HEAD_DIM, WIDTH, bias=True)
            self.norm_q, self.norm_k = (RMSNorm(HEAD_DIM) if qk_norm else None for _ in range(2))

        def forward(self, x):
            sizes = [heads * HEAD_DIM for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
            q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)) for y in self.qkv(x).split(sizes, -1))
            if self.norm_q is not None:
                q, k = self.norm_q(q), self.norm_k(k)
            return self.proj(attend(q, k, v))

    return CausalSelfAttention()


class LLaMAMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_1 = linear(WIDTH, HIDDEN, bias=True)
        self.fc_2 = linear(WIDTH, HIDDEN, bias=True)
        self.proj = linear(HIDDEN, WIDTH, bias=True)

    def forward(self, x):
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class GptNeoxMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear(WIDTH, HIDDEN, bias=True)
        self.proj = linear(HIDDEN, WIDTH, bias=True)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class LitLayer(nn.Module):
    """Norms in front, behind, or both, as litgpt's config chooses."""

    def __init__(self, mlp, front=True, behind=False, qk_norm=False):
        super().__init__()
        self.norm_1, self.norm_2 = (RMSNorm(WIDTH) if front else nn.Identity() for _ in range(2))
        self.attn = litgpt_attention(qk_norm)
        self.mlp = mlp()
        self.post_attention_norm, self.post_mlp_norm = (
            RMSNorm(WIDTH) if behind else nn.Identity() for _ in range(2)
        )

    def forward(self, x):
        x = x + self.post_attention_norm(self.attn(self.norm_1(x)))
        return x + self.post_mlp_norm(self.mlp(self.norm_2(x)))


class Lit(nn.Module):
    def __init__(self, mlp=LLaMAMLP, **norms):
        super().__init__()
        self.lm_head = linear(WIDTH, VOCABULARY)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "h": nn.ModuleList([LitLayer(mlp, **norms)]),
                "ln_f": RMSNorm(WIDTH),
            }
        )

    def forward(self, ids):
        x = self.transformer.wte(ids)
        for layer in self.transformer.h:
            x = layer(x)
        return self.lm_head(self.transformer.ln_f(x))


# nanochat: separate projections, norms without weights, and a table added to the values.


def plain_norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def nanochat_attention(value_table):
    class CausalSelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_q = linear(WIDTH, HEADS * HEAD_DIM)
            self.c_k = linear(WIDTH, KEY_HEADS * HEAD_DIM)
            self.c_v = linear(WIDTH, KEY_HEADS * HEAD_DIM)
            self.c_proj = linear(HEADS * HEAD_DIM, WIDTH)
            self.ve_gate = linear(6, KEY_HEADS) if value_table else None

        def forward(self, x, more):
            q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.c_q, self.c_k, self.c_v))
            if more is not None:
                gate = 3 * torch.sigmoid(self.ve_gate(x[..., :6]))
                v = v + gate.unsqueeze(-1) * more.unflatten(-1, (-1, HEAD_DIM))
            return self.c_proj(attend(plain_norm(q), plain_norm(k), v))

    return CausalSelfAttention()


class SquaredMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = linear(WIDTH, HIDDEN)
        self.c_proj = linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class NanoLayer(nn.Module):
    def __init__(self, value_table):
        super().__init__()
        self.attn = nanochat_attention(value_table)
        self.mlp = SquaredMLP()

    def forward(self, x, more):
        x = x + self.attn(plain_norm(x), more)
        return x + self.mlp(plain_norm(x))


class Nano(nn.Module):
    def __init__(self, value_table=False):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "h": nn.ModuleList([NanoLayer(value_table)]),
            }
        )
        self.lm_head = linear(WIDTH, VOCABULARY)
        tables = {"0": nn.Embedding(VOCABULARY, KEY_HEADS * HEAD_DIM)} if value_table else {}
        self.value_embeds = nn.ModuleDict(tables)

    def forward(self, ids):
        x = plain_norm(self.transformer.wte(ids))
        for index, layer in enumerate(self.transformer.h):
            name = str(index)
            x = layer(x, self.value_embeds[name](ids) if name in self.value_embeds else None)
        return self.lm_head(plain_norm(x))


# timm: [q | k | v] with equal sizes. Many have a class `Attention`: timm's is known by where it is
# defined.


class Attention(nn.Module):
    def __init__(self, qk_norm=False, scale_norm=False):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        inner = HEADS * HEAD_DIM
        self.qkv = linear(WIDTH, 3 * inner, bias=True)
        self.q_norm, self.k_norm = (
            nn.LayerNorm(HEAD_DIM) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.norm = nn.LayerNorm(inner) if scale_norm else nn.Identity()
        self.proj = linear(inner, WIDTH, bias=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        return self.proj(self.norm(attend(self.q_norm(q), self.k_norm(k), v, causal=False)))


class Mlp(nn.Module):
    def __init__(self, scale_norm=False):
        super().__init__()
        self.fc1 = linear(WIDTH, HIDDEN, bias=True)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(HIDDEN) if scale_norm else nn.Identity()
        self.fc2 = linear(HIDDEN, WIDTH, bias=True)

    def forward(self, x):
        return self.fc2(self.norm(self.act(self.fc1(x))))


class SwiGLU(nn.Module):
    def __init__(self, scale_norm=False):
        super().__init__()
        self.fc1_g = linear(WIDTH, HIDDEN, bias=True)
        self.fc1_x = linear(WIDTH, HIDDEN, bias=True)
        self.act = nn.SiLU()
        self.norm = nn.LayerNorm(HIDDEN) if scale_norm else nn.Identity()
        self.fc2 = linear(HIDDEN, WIDTH, bias=True)

    def forward(self, x):
        return self.fc2(self.norm(self.act(self.fc1_g(x)) * self.fc1_x(x)))


class GluMlp(nn.Module):
    def __init__(self, scale_norm=False, gate_last=True):
        super().__init__()
        self.gate_last = gate_last
        self.fc1 = linear(WIDTH, 2 * HIDDEN, bias=True)
        self.act = nn.SiLU()
        self.norm = nn.LayerNorm(HIDDEN) if scale_norm else nn.Identity()
        self.fc2 = linear(HIDDEN, WIDTH, bias=True)

    def forward(self, x):
        first, second = self.fc1(x).chunk(2, -1)
        gate, up = (second, first) if self.gate_last else (first, second)
        return self.fc2(self.norm(self.act(gate) * up))


Attention.__module__ = "timm.layers.attention"
Mlp.__module__ = SwiGLU.__module__ = GluMlp.__module__ = "timm.layers.mlp"


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, mlp, qk_norm=False, scale_norm=False, layer_scale=False):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = Attention(qk_norm, scale_norm)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp(scale_norm=scale_norm)
        self.ls1, self.ls2 = (LayerScale() if layer_scale else nn.Identity() for _ in range(2))

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class ResPostBlock(Block):
    def forward(self, x):
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class Vit(nn.Module):
    def __init__(self, mlp=Mlp, block=Block, **norms):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, WIDTH, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.Sequential(block(mlp, **norms))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = linear(WIDTH, 7, bias=True)

    def forward(self, images):
        x = self.patch_embed.proj(images).flatten(2).mT
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


LAYOUTS = {
    "torchtitan": Titan,
    "torchtitan-separate": lambda: Titan(QKVLinear),
    "torchtitan-qk-norm": lambda: Titan(qk_norm=True),
    "litgpt": Lit,
    "litgpt-neox": lambda: Lit(GptNeoxMLP),
    "litgpt-qk-norm": lambda: Lit(qk_norm=True),
    "litgpt-sandwich": lambda: Lit(behind=True),
    "litgpt-behind": lambda: Lit(front=False, behind=True),
    "nanochat": Nano,
    "nanochat-values": lambda: Nano(value_table=True),
    "timm": Vit,
    "timm-swiglu": lambda: Vit(SwiGLU),
    "timm-packed": lambda: Vit(lambda **norms: GluMlp(gate_last=False, **norms)),
    "timm-glu": lambda: Vit(GluMlp),
    "timm-norms": lambda: Vit(SwiGLU, qk_norm=True, scale_norm=True),
    "timm-layer-scale": lambda: Vit(layer_scale=True),
    "timm-behind": lambda: Vit(block=ResPostBlock),
}


def build(layout):
    """Return a small model in float64, with norms and biases off their neutral start."""
    torch.manual_seed(1)
    model = LAYOUTS[layout]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def inputs(model):
    """Return images, or sequences without a repeated token."""
    generator = torch.Generator().manual_seed(2)
    if isinstance(model, Vit):
        return torch.randn(24, 3, 4, 4, generator=generator, dtype=torch.float64)
    return torch.randperm(VOCABULARY, generator=generator)[:-1].view(5, 12)
