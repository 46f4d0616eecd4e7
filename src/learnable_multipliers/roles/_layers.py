"""Small questions about single modules: is it linear, which axes, is it a learnable norm."""

from __future__ import annotations

import re

from torch import nn

_HOMOGENEOUS = {
    "ReLU",
    "LeakyReLU",
    "PReLU",
    "ReLUSquaredActivation",
    "relu",
    "leaky_relu",
    "relu2",
}
_ACTIVATIONS = ("act_fn", "act", "activation", "activation_fn", "nonlinearity")


def is_conv1d(module: nn.Module) -> bool:
    """Tell GPT-2's transposed linear layer, which stores (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Tell a linear layer: torch's, GPT-2's, or another library's by its name."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Linear") and getattr(weight, "ndim", 0) == 2


def linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers directly inside `module`."""
    return {leaf: child for leaf, child in module.named_children() if is_linear(child)}


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the stored shape of a layer's weight."""
    return tuple(module.get_parameter("weight").shape)


def features(linear: nn.Module) -> tuple[int, int]:
    """Return (out, in) of a linear layer, however it stores its weight."""
    shape = weight_shape(linear)
    return (shape[1], shape[0]) if is_conv1d(linear) else (shape[0], shape[1])


def is_norm(module: nn.Module) -> bool:
    """Tell a normalization layer by its class name; one that holds matrices is more than that."""
    named = re.search(r"norm", type(module).__name__, re.IGNORECASE) is not None
    return named and all(_num_axes(parameter) <= 1 for parameter in module.parameters())


def is_learnable_norm(module: nn.Module) -> bool:
    """Tell a norm whose weight is trained: only such a weight acts as a multiplier."""
    return is_norm(module) and any(
        parameter.requires_grad and not name.endswith("bias")
        for name, parameter in module.named_parameters()
    )


def learnable_norm(module: nn.Module, names: tuple[str, ...]) -> str:
    """Return the name of a child that is a learnable norm of one of `names`; empty if none is."""
    children = dict(module.named_children())
    return next((n for n in names if n in children and is_learnable_norm(children[n])), "")


def _num_axes(parameter: nn.Parameter) -> int:
    return sum(size != 1 for size in parameter.shape)


def lets_scale_through(activation: object) -> bool:
    """Tell a positively homogeneous activation: a scale in front of it is a scale behind it."""
    label = getattr(activation, "__name__", type(activation).__name__)
    return label in _HOMOGENEOUS


def has_homogeneous_activation(module: nn.Module) -> bool:
    """Tell whether the activation kept in the module lets a scale through."""
    for leaf in _ACTIVATIONS:
        activation = getattr(module, leaf, None)
        if activation is not None:
            return lets_scale_through(activation)
    return False
