"""What counting alone reaches on the demo's held-out text: 5-grams of bytes and of tokens.

python benchmarks/ngrams.py                  # the data of `lrm demo`
python benchmarks/ngrams.py --data DATA --max-tokens 0
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from learnable_multipliers.pretrain.baseline import kneser_ney_loss
from learnable_multipliers.pretrain.data.training_data import TrainingData
from learnable_multipliers.pretrain.recipes import RECIPES


def main() -> None:
    """Print the loss of both models, in nats per token and bits per byte."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="default: the Python standard library")
    parser.add_argument("--order", type=int, default=5)
    tiny = RECIPES["tiny"][1]
    parser.add_argument("--max-tokens", type=int, default=tiny.log.evaluate_tokens)
    options = parser.parse_args()
    vocab_size = 0 if options.data else tiny.model.vocab_size
    data = TrainingData.open(replace(tiny.data, path=options.data), vocab_size, tiny.seed)
    num_tokens = data.num_held_out(options.max_tokens)
    bits = num_tokens / data.held_out_bytes(num_tokens) / math.log(2)
    for unit in ("bytes", "tokens"):
        loss = kneser_ney_loss(data, options.order, unit, max_tokens=options.max_tokens)
        print(f"{options.order}-gram of {unit}: {loss:.4f} nats per token, {loss * bits:.4f} bpb")


if __name__ == "__main__":
    main()
