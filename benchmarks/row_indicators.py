"""Row and column indicators from moments, against those of the row and column gradients themselves.

    python benchmarks/row_indicators.py

trains a small Llama on Python source with torch.optim.AdamW, averages the gradients that
multipliers would have step by step, and prints both for every hidden matrix.
"""

import ast
import inspect
import statistics
import typing
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import learnable_multipliers as lrm
from learnable_multipliers.equilibrium import noise_ratio

STEPS, BATCH, LENGTH, LR, BETAS = 600, 8, 32, 4e-3, (0.9, 0.95)


def main() -> None:
    """Print the table and the medians."""
    torch.manual_seed(0)
    content = b"".join(Path(m.__file__).read_bytes() for m in (ast, inspect, typing))
    used, numbers = torch.tensor(list(content)).unique(return_inverse=True)
    config = LlamaConfig(
        vocab_size=len(used),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1.0, betas=BETAS)
    hidden = {n: p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2}
    averages = {
        (name, dim): torch.zeros(2, p.shape[1 - dim], dtype=torch.float64)
        for name, p in hidden.items()
        for dim in (1, 0)
    }
    for _ in range(STEPS):
        starts = torch.randint(0, len(numbers) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([numbers[i : i + LENGTH] for i in starts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        for (name, dim), (first, second) in averages.items():
            weight = hidden[name]
            sums = (weight.detach() * weight.grad).double().sum(dim)
            first.lerp_(sums, 1 - BETAS[0])
            second.lerp_(sums.square(), 1 - BETAS[1])
        optimizer.step()
    gains = lrm.diagnose(optimizer, model, lrs=LR).gains
    ratio = noise_ratio(*BETAS, STEPS)
    found = []
    print(f"{'':40} {'row':>7} {'itself':>7} {'col':>7} {'itself':>7}")
    for name in hidden:
        row, col = (
            (first.square().mean() / second.mean() / ratio).item()
            for first, second in (averages[name, 1], averages[name, 0])
        )
        found.append((gains[name].row_indicator, row, gains[name].col_indicator, col))
        print(f"{name:40} " + " ".join(f"{value:7.2f}" for value in found[-1]))
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    print(f"{'median':40} " + " ".join(f"{value:7.2f}" for value in medians))


if __name__ == "__main__":
    main()
