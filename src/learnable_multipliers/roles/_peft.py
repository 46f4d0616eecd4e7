"""Recognize what PEFT puts around and beside the layers that it adapts."""

from __future__ import annotations

import re

from torch import nn

from learnable_multipliers.roles._tree import Tree

ADAPTED = "base_layer"
"""Attribute name of a layer that is wrapped with adapters."""
_WRAPPED = re.compile(rf"\.({ADAPTED}|original_module|modules_to_save\.[^.]+)$")


def adapted_name(name: str) -> str:
    """Return the name that a module has in the model without PEFT.

    PEFT puts a layer that it adapts, or trains a copy of, into a module of the layer's name.
    """
    return _WRAPPED.sub("", name)


def is_adapter(tree: Tree, name: str) -> bool:
    """Return whether a parameter belongs to an adapter, not to the adapted layer."""
    path = name.split(".")
    for depth, part in enumerate(path[:-1]):
        holder = tree.modules[".".join(path[:depth])]
        # PEFT keeps the adapted layer beside its adapters; others name them as the LoRA paper does.
        if part != ADAPTED and isinstance(getattr(holder, ADAPTED, None), nn.Module):
            return True
    return any(part.startswith("lora_") for part in path)
