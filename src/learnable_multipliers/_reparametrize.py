"""The explicit path: autograd sees the multipliers, and any optimizer trains them.

`reparametrize` registers a torch parametrization on every matrix that carries multipliers, so
that `module.weight` *is* the effective weight: kernels that read it directly see it too.
`merge` restores the original model, with the effective weights in place of the raw ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from learnable_multipliers._multiplier import (
    MULTIPLIERS,
    Matrix,
    all_rows,
    carried_rows,
    effective,
    initial_values,
    multiplier,
    raw_dtype,
)
from learnable_multipliers._names import canonical_name, owner_of, unwrap
from learnable_multipliers._plan import Plan, check_is_plan

_ORDER = "_order_before_multipliers"


class Multipliers(nn.Module):
    """The multipliers of one matrix, as a torch parametrization from raw to effective weight."""

    row: nn.Parameter | None
    col: nn.Parameter | None
    scalar: nn.Parameter | None

    def __init__(self, matrix: Matrix, weight: nn.Parameter, trained: bool):
        super().__init__()
        self.matrix = matrix
        self.weight_dtype = weight.dtype
        values = initial_values(matrix, dtype=raw_dtype(weight), device=weight.device)
        if "row" in values:
            # Rows of blocks without multipliers have no parameter: nothing to train or decay.
            values["row"] = carried_rows(matrix, values["row"])
        for name in MULTIPLIERS:
            value = values.get(name)
            parameter = None if value is None else nn.Parameter(value, trained)
            self.register_parameter(name, parameter)

    def values(self) -> dict[str, Tensor]:
        """Return the stored values; `row` spans all rows, with 1 for blocks that carry none."""
        values: dict[str, Tensor] = {}
        for name in MULTIPLIERS:
            value = getattr(self, name)
            if value is not None:
                values[name] = all_rows(self.matrix, value) if name == "row" else value
        return values

    def forward(self, raw: Tensor) -> Tensor:
        """Return the effective weight, in the dtype the model's weight had."""
        return effective(self.matrix, raw, self.values()).to(self.weight_dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the raw weight of an effective one, which `module.weight = ...` stores."""
        values = self.values()
        if not weight.is_meta and any(
            (multiplier(self.matrix, v) == 0).any() for v in values.values()
        ):
            raise ValueError("a multiplier is zero: no raw weight has the effective weight given")
        log = self.matrix.scale == "log"
        inverse = {name: -value if log else 1 / value for name, value in values.items()}
        return effective(self.matrix, weight.to(raw_dtype(weight)), inverse)

    def extra_repr(self) -> str:
        """Return the shapes of the multipliers."""
        shapes = [f"{name}={tuple(value.shape)}" for name, value in self.named_parameters()]
        return ", ".join([*shapes, "log scale"] if self.matrix.scale == "log" else shapes)


def reparametrize(model: nn.Module, plan: Plan) -> nn.Module:
    """Give every matrix of the plan its multipliers as parameters, in place; return the model.

    Raw weights and multipliers are float32 under a bfloat16 or float16 model. A tied weight is
    parametrized once and shared.
    """
    check_is_plan(plan)
    if is_reparametrized(model):
        raise ValueError("the model carries multipliers already; lrm.merge(model) removes them")
    plan.check_initialized()
    parameters = plan.resolve(model)
    for entry in plan.entries:
        if entry.matrix is None or not entry.matrix.carries:
            continue
        owner, leaf = owner_of(model, entry.name)
        _remember_order(owner)
        weight = parameters[entry.name]
        trained = weight.requires_grad or entry.train == "multipliers"
        _attach(owner, leaf, Multipliers(entry.matrix, weight, trained))
        if entry.train == "multipliers":
            owner.parametrizations[leaf].original.requires_grad_(False)  # pyright: ignore[reportIndexIssue, reportArgumentType, reportAttributeAccessIssue]
        for alias in entry.aliases:
            tied_owner, tied_leaf = owner_of(model, alias)
            if tied_owner is owner and tied_leaf == leaf:
                continue  # the module itself is shared
            _remember_order(tied_owner)
            _share(tied_owner, tied_leaf, owner.parametrizations[leaf])  # pyright: ignore[reportIndexIssue, reportArgumentType]
    for module in model.modules():
        if callable(getattr(module, "save_pretrained", None)):
            module.__dict__["save_pretrained"] = _raise_on_save
    return model


def merge(model: nn.Module) -> nn.Module:
    """Replace every raw weight by its effective weight and drop the multipliers, in place.

    Classes, state-dict keys and their order are restored to those before `reparametrize`.
    """
    merged: set[int] = set()
    for _, module, leaf, parametrization in list(_parametrized(model)):
        if id(parametrization) not in merged:
            merged.add(id(parametrization))
            _merge_raw(parametrization)
        # A deepcopy shares its dynamic class with the original; removing the property from it
        # would break the other one.
        module.__class__ = _copy_class(type(module))
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=False)
    for module in model.modules():
        module.__dict__.pop("save_pretrained", None)
        order = module.__dict__.pop(_ORDER, None)
        if order is not None:
            names = [*order, *(name for name in module._parameters if name not in order)]
            module._parameters = {name: module._parameters[name] for name in names}
    return model


def explicit_multipliers(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the multipliers of a reparametrized model by the name of their matrix.

    Values are the multipliers themselves, on the log scale too; `row` spans all rows, with 1 for
    blocks that carry none.
    """
    by_identity = {}
    for path, _, _, parametrization in _parametrized(unwrap(model)):
        carried = parametrization[0]
        assert isinstance(carried, Multipliers)
        by_identity.setdefault(id(carried), (canonical_name(path), carried))
    return {
        path: {
            name: multiplier(carried.matrix, value).detach().clone()
            for name, value in carried.values().items()
        }
        for path, carried in by_identity.values()
    }


def is_reparametrized(model: nn.Module) -> bool:
    """Return whether any matrix of the model carries multipliers on the explicit path."""
    return next(_parametrized(unwrap(model)), None) is not None


def _attach(owner: nn.Module, leaf: str, carried: Multipliers) -> None:
    weight = owner.get_parameter(leaf)
    low_precision = weight.dtype != raw_dtype(weight)
    if low_precision:
        # torch keeps the parameter's dtype through a parametrization; raw weights need a wider one.
        owner.register_parameter(
            leaf, nn.Parameter(weight.detach().to(raw_dtype(weight)), weight.requires_grad)
        )
    parametrize.register_parametrization(owner, leaf, carried, unsafe=low_precision)


def _share(owner: nn.Module, leaf: str, parametrization: parametrize.ParametrizationList) -> None:
    """Share a parametrization with a tied module, so that it reads the same effective weight."""
    parametrize.register_parametrization(owner, leaf, nn.Identity(), unsafe=True)
    assert isinstance(owner.parametrizations, nn.ModuleDict)
    owner.parametrizations[leaf] = parametrization


@torch.no_grad()
def _merge_raw(parametrization: parametrize.ParametrizationList) -> None:
    """Replace the raw weight of a parametrization by the effective weight."""
    if len(parametrization) != 1:
        raise ValueError(
            "another parametrization was registered on top of the multipliers; remove it first "
            "with torch.nn.utils.parametrize.remove_parametrizations"
        )
    raw = parametrization.original
    weight = parametrization()
    if raw.dtype == weight.dtype:
        raw.data = weight
        raw.grad = None
    else:
        parametrization.original = nn.Parameter(weight, raw.requires_grad)


def _parametrized(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, parametrize.ParametrizationList]]:
    """Yield path, module, leaf and parametrization of every weight that carries multipliers."""
    for name, module in model.named_modules():
        parametrizations = module._modules.get("parametrizations")
        if not isinstance(parametrizations, nn.ModuleDict):
            continue
        for leaf, parametrization in parametrizations.items():
            if isinstance(parametrization, parametrize.ParametrizationList) and isinstance(
                parametrization[0], Multipliers
            ):
                yield f"{name}.{leaf}" if name else leaf, module, leaf, parametrization


def _remember_order(owner: nn.Module) -> None:
    if _ORDER not in owner.__dict__:
        owner.__dict__[_ORDER] = tuple(owner._parameters)


def _copy_class(cls: type) -> type:
    skipped = ("__dict__", "__weakref__")
    return type(
        cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k not in skipped}
    )


def _raise_on_save(*_args: object, **_kwargs: object) -> NoReturn:
    raise ValueError(
        "this model holds raw weights and multipliers; saved as it is, it would load as another "
        "model. Save a merged copy: lrm.merge(copy.deepcopy(model)).save_pretrained(...), or "
        "call lrm.merge(model) when training is over."
    )
