"""torchtitan with learnable multipliers: a module of configs, to be named by `--module`.

    export PYTHONPATH=path/to/examples   # in a checkout of torchtitan, with its tokenizers and text
    torchrun --nproc_per_node 1 -m torchtitan.train \\
        --module torchtitan_configs --config llama3_debugmodel
    torchrun --nproc_per_node 8 -m torchtitan.train --module torchtitan_configs --config llama3_8b

Any config of torchtitan can be wrapped like these, and its command line changes the rest: for text
of your own, `--hf_assets_path` is a folder with a tokenizer.json and `--dataloader.dataset_path`
one with text files.
"""

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from learnable_multipliers.integrations.torchtitan import with_multipliers


def llama3_debugmodel() -> Trainer.Config:
    """torchtitan's debug model: ten steps on one GPU."""
    return with_multipliers(config_registry.llama3_debugmodel())


def llama3_8b() -> Trainer.Config:
    """Llama 3 8B with AdamW; learning rate, decay and clipping are those of torchtitan's config."""
    return with_multipliers(config_registry.llama3_8b())


def llama3_8b_muon() -> Trainer.Config:
    """The same with Muon on hidden matrices, and a learning rate and decay of its own."""
    return with_multipliers(config_registry.llama3_8b(), "Muon", lr=2e-3, weight_decay=0.1)
