"""The difference between our logits and those of transformers' own classes, in float32.

python benchmarks/parity.py --out results/parity.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from learnable_multipliers.pretrain.model import hugging_face
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS

FACTORS = {
    name: value for name, value in PRESETS["falcon-h1-0.5b"].mup_factors.items() if value != 1.0
}
HYBRID, LLAMA = replace(PRESETS["tiny"], **FACTORS), PRESETS["tiny-llama"]
SHAPES = {
    "hybrid": HYBRID,
    "hybrid, tied": replace(HYBRID, tie_embeddings=True),
    "hybrid, inner norm": replace(HYBRID, ssm_norm=True),
    "Llama": LLAMA,
    "Llama, tied": replace(LLAMA, tie_embeddings=True),
}
# Matrices this much larger than at their usual start, where a model is nearly linear.
LOUD = 10.0


def main() -> None:
    """Print the largest differences, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'':20} {'difference':>10} {'largest logit':>14}")
    for name, config in SHAPES.items():
        difference, largest = compare(config)
        rows.append({"model": name, "to": difference, "largest_logit": largest})
        print(f"{name:20} {difference:10.1e} {largest:14.2f}")
    if options.out:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.out.write_text(json.dumps({**versions, "models": rows}, indent=1) + "\n")


@torch.no_grad()
def compare(config: ModelConfig) -> tuple[float, float]:
    """Return the largest difference, with our weights in their class, and the largest logit."""
    tokens = torch.randint(config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    ours = louder(build(config))
    peer = theirs(config)
    peer.load_state_dict(hugging_face.to_state_dict(ours), strict=False)
    logits = peer(tokens).logits
    return (ours(tokens) - logits).abs().max().item(), logits.abs().max().item()


def theirs(config: ModelConfig) -> Any:
    """Return transformers' model of a shape."""
    settings = hugging_face.to_config(config)
    kind, name = settings.pop("model_type"), settings.pop("architectures")[0]
    classes = {"llama": "LlamaConfig", "falcon_h1": "FalconH1Config"}
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, classes[kind])(**settings)).eval()


def louder(model: Any) -> Any:
    """Multiply all matrices."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(LOUD)
    return model


if __name__ == "__main__":
    main()
