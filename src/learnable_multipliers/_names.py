"""Parameter names as the model itself has them, whatever wraps it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

# torch.compile, activation checkpointing and FSDP1 insert these into names.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_DERIVED = re.compile(r"FSDP|DDP|Replicate|Parametrized")


def check_type(value: Any, kind: type, expected: str) -> None:
    """Raise a TypeError if an argument is of another type; `expected` is the type in words."""
    if not isinstance(value, kind):
        got = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise TypeError(f"expected {expected}, got {got}")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as torch.compile and DistributedDataParallel."""
    check_type(model, nn.Module, "a model (torch.nn.Module)")
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model := unwrap_module(model), parallel):
        model = model.module
    return model


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return a part of a model without what torch.compile, checkpointing or Fabric put around."""
    while True:
        inside = module._modules.keys() & _WRAPPERS
        if type(module).__name__ == "_FabricModule":
            inside = {"_forward_module"}
        if not inside:
            return module
        module = module.get_submodule(inside.pop())


def children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the direct submodules by name, unwrapped."""
    return {name: unwrap_module(child) for name, child in module.named_children()}


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module was made from.

    FSDP2, DDP's composable form and `parametrize` give it a subclass of their own making.
    """
    cls = type(module)
    while cls.__module__.startswith("torch.") and _DERIVED.match(cls.__name__):
        cls = cls.__bases__[-1]
    return cls


def canonical_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_template(name: str) -> str:
    """Replace every number in a name by a star, so that repeated layers share one name."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter by its name in the bare model; a tied one once, or under every name."""
    named = unwrap(model).named_parameters(remove_duplicate=remove_duplicate)
    for name, parameter in named:
        yield canonical_name(name), parameter


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the parameter called `name`, and its leaf name there."""
    module = unwrap(model)
    *path, leaf = name.split(".")
    for part in path:
        module = unwrap_module(module.get_submodule(part))
    return module, leaf
