"""Train a small language model in a loop of your own, byte by byte, with learnable multipliers.

    python examples/own_loop.py                             # learns Python's standard library
    python examples/own_loop.py --text book.txt --compile   # any file; --resume goes on

The optimizer is the one line that differs from a loop with torch.optim.AdamW.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import learnable_multipliers as lrm


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, num_heads: int = 4):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    def __init__(self, width: int):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.mlp_norm, self.act = nn.RMSNorm(width), nn.GELU()
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down_proj(self.act(self.up_proj(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """A transformer that returns the loss of predicting each next byte, in nats."""

    def __init__(self, width: int, length: int, num_layers: int = 2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for matrix in (weight for weight in self.parameters() if weight.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--text", type=Path, help="file to learn (default: Python's library)")
parser.add_argument("--out", type=Path, default=Path("own_loop.pt"), help="checkpoint")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
parser.add_argument("--placement", default="full", help="none: train without multipliers")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--every", type=int, default=100, help="steps between evaluations and saves")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
parser.add_argument("--accumulate", type=int, default=2, help="batches of 8 for each step")
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--weight-decay", type=float, default=1.0)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

files = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
train_data, valid_data = data.tensor_split([len(data) * 9 // 10])
device = "cuda" if torch.cuda.is_available() else "cpu"
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def batch(source: Tensor, number: int) -> Tensor:
    """Return random pieces of the text: the same for a number, also after a resume."""
    generator = torch.Generator().manual_seed(number)
    begin = torch.randint(len(source) - args.length, (8, 1), generator=generator)
    return source[begin + torch.arange(args.length + 1)].long().to(device)


def learning_rate(step: int) -> float:
    """Warm up over a twentieth of the steps, then follow a cosine to a tenth of the rate."""
    warmup = max(args.steps // 20, 1)
    progress = max(step - warmup, 0) / max(args.steps - warmup, 1)
    return args.lr * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def valid_loss() -> float:
    """Return the loss on the part of the text that is not trained on."""
    with autocast:
        return sum(forward(batch(valid_data, number)).item() for number in range(20)) / 20


torch.manual_seed(0)
model = LanguageModel(args.width, args.length).to(device)
# Plain: torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
optimizer = lrm.AdamW.from_model(
    model, args.placement, lr=args.lr, weight_decay=args.weight_decay, max_grad_norm=1.0
)
print(optimizer.plan)
start = lrm.diagnose(optimizer)  # where the weights start, for the prediction at the end
first = 0
if args.resume:
    saved = torch.load(args.out, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # raw weights, multipliers, moments
    first = saved["step"]
forward = torch.compile(model) if args.compile else model  # the optimizer keeps the plain names

for step in range(first, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    for micro in range(args.accumulate):
        with autocast:
            loss = forward(batch(train_data, step * args.accumulate + micro))
        (loss / args.accumulate).backward()
    optimizer.step()  # it clips, too: by the norm of the raw gradients
    optimizer.zero_grad()
    if (done := step + 1) % args.every == 0 or done == args.steps:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, partial := args.out.with_suffix(".partial"))
        os.replace(partial, args.out)  # a kill while saving leaves the last checkpoint whole
        print(f"step {done}: validation loss {valid_loss():.5f}", flush=True)

for name, parts in lrm.multipliers(optimizer).items():
    print(f"{name:35}", *(f"{axis} {m.min():.2f} to {m.max():.2f}  " for axis, m in parts.items()))
print(lrm.diagnose(optimizer, lrs=[learning_rate(step) for step in range(args.steps)], start=start))
