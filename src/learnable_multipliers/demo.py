"""A small honest run of the library: the same model trained without and with multipliers.

The text is the source of the Python standard library on this machine, byte by byte; the model
is a two-layer transformer. It shows what the library does to a model, not what multipliers are
worth: a minute of training is far from the equilibrium they are made for.
"""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnable_multipliers.optim import AdamW, multipliers, param_groups
from learnable_multipliers.plan import plan

_WIDTH, _HEADS, _HIDDEN, _LAYERS = 64, 4, 160, 2
_BATCH, _LENGTH = 16, 64
_LR, _WEIGHT_DECAY = 4e-3, 0.1


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.k_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.v_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.o_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down_proj = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(_WIDTH)
        self.attention = _Attention()
        self.mlp_norm = nn.RMSNorm(_WIDTH)
        self.mlp = _MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(_LAYERS))
        self.norm = nn.RMSNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for each position."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def run(steps: int, seed: int = 0) -> None:
    """Train without and with multipliers from the same start, and print what happened."""
    # A model this small is fastest on one core.
    torch.set_num_threads(1)
    text = standard_library_text()
    train, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    torch.manual_seed(seed)
    plain = ByteTransformer()
    carrying = copy.deepcopy(plain)

    full = plan(carrying, "full")
    print(full, "\n")
    print(
        f"Training both on {len(train):,} bytes of Python's standard library: {steps} steps of "
        f"{_BATCH}x{_LENGTH} bytes, AdamW, lr {_LR:g}, weight decay {_WEIGHT_DECAY:g}, seed {seed}."
    )
    settings = {"lr": _LR, "betas": (0.9, 0.95)}
    groups = [param_groups(model, full, weight_decay=_WEIGHT_DECAY) for model in (plain, carrying)]
    optimizer = AdamW(groups[1], **settings)
    runs = (
        ("without multipliers", plain, torch.optim.AdamW(groups[0], **settings)),
        ("with multipliers", carrying, optimizer),
    )
    print(f"\n{'':24}{'held-out loss':>15}   (nats per byte)")
    for name, model, one in runs:
        _train(model, one, train, steps, seed)
        print(f"{name:24}{_held_out_loss(model, held_out, seed):15.4f}", flush=True)
    _print_learned(optimizer)
    same = list(carrying.state_dict()) == list(plain.state_dict())
    print(
        f"\nThe model itself is still a plain {type(carrying).__name__} of "
        f"{len(carrying.state_dict())} tensors under {'their own' if same else 'OTHER'} names: "
        "nothing to merge."
    )


def standard_library_text() -> Tensor:
    """Return some of the standard library's own sources, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return torch.frombuffer(bytearray(b"\n".join(sources)), dtype=torch.uint8).long()


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, steps: int, seed: int
) -> None:
    for inputs, targets in _batches(text, steps, seed):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batches(text: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - _LENGTH - 1, (_BATCH, 1), generator=generator)
        window = text[starts + torch.arange(_LENGTH + 1)]
        yield window[:, :-1], window[:, 1:]


@torch.no_grad()
def _held_out_loss(model: nn.Module, text: Tensor, seed: int) -> float:
    losses = [
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        for inputs, targets in _batches(text, 20, seed)
    ]
    return torch.stack(losses).mean().item()


def _print_learned(optimizer: AdamW) -> None:
    print(f"\n{'learned multipliers':32}{'smallest':>10}{'median':>10}{'largest':>10}")
    for name, values in multipliers(optimizer).items():
        if "layers.1" not in name and "embedding" not in name:
            continue
        for kind, value in values.items():
            label = f"{name.removesuffix('.weight')} {kind}"
            numbers = (value.min(), value.median(), value.max())
            print(f"{label:32}" + "".join(f"{number.item():10.3f}" for number in numbers))
