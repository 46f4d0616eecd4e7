"""A copy of a model to evaluate numerically, and the derivative of its outputs by its scales.

The copy is in float64 and has random weights: symmetries are a property of the forward pass, and at
random weights nothing else looks like one. The epsilons of norms are set to 0, because
normalization symmetries are exact only then.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from learnable_multipliers._multiplier import Matrix, keep_carried_rows
from learnable_multipliers._names import named_parameters, unwrap
from learnable_multipliers.symmetry._axes import Axis, layouts

_NARROW = {torch.float32, torch.bfloat16, torch.float16}
# Sets of weights. A symmetry holds at all weights; a shift of two biases against each other, for
# instance, is a rescaling at one set of weights only.
_NUM_POINTS = 8
# Random combinations of the outputs per axis entry, over all sets of weights together.
_PROJECTIONS_PER_AXIS = 1.5
_PROJECTIONS_AT_ONCE = 64
# Random inputs: sequences long enough for every position of a rotation to matter.
_LENGTH = 16
_FEWEST_TOKENS = 128


class _Float64(TorchFunctionMode):
    """Turns every cast to a narrower dtype into a cast to float64.

    Norms and softmax of many models compute in float32 whatever the model's dtype is, and rounding
    would then hide an exact symmetry.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        widened = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **widened)


class ModelCopy:
    """A copy of a model in float64 with random weights, and inputs to run it on."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any = None,
        carried: Mapping[str, Matrix] | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        shifted: Collection[str] | None = None,
    ):
        self.dtype = dtype
        self.model = copy.deepcopy(unwrap(model)).to("cpu", dtype).eval()
        given = random_tokens(self.model) if inputs is None else inputs
        self.inputs = map_tensors(partial(_to_copy, dtype=dtype), given)
        self.layouts = layouts(self.model, carried)
        named = dict(named_parameters(self.model))
        self.parameters = {name: named[name] for name in self.layouts}
        if not self.parameters:
            raise ValueError(
                f"{type(self.model).__name__} has no trained parameters with a scale to learn: "
                "unfreeze some, or give a plan that puts multipliers on them"
            )
        config: Any = getattr(self.model, "config", None)
        if getattr(config, "use_cache", False):
            # No generation here; a cache costs time and would be part of the outputs.
            config.use_cache = False
        if hasattr(config, "_experts_implementation"):
            # The grouped kernels that Hugging Face's experts use by default have no float64.
            config._experts_implementation = "eager"
        for module in self.model.modules():
            # The embedding of a padding token is used but gets no gradient.
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
        if inputs is None:
            self._check_tokens_suffice()
        self.epsilons = list(_epsilons(self.model))
        self._generator = torch.Generator().manual_seed(0)
        self._randomize()
        for name in self._find_shifted() if shifted is None else shifted:
            self.layouts[name] = replace(self.layouts[name], one_plus=True)
        self.set_epsilon(0.0)

    @torch.no_grad()
    def _check_tokens_suffice(self) -> None:
        try:
            self.outputs()
        except Exception as error:  # Whatever a model's own checks raise.
            raise ValueError(
                f"{type(self.model).__name__} does not run on random tokens alone "
                f"({type(error).__name__}: {error}): give inputs, what it is called with"
            ) from error

    @property
    def axes(self) -> list[Axis]:
        """Every axis, parameter by parameter."""
        return [axis for layout in self.layouts.values() for axis in layout.axes]

    @property
    def shifted(self) -> set[str]:
        """The vectors that the forward pass uses as 1 + their entries."""
        return {name for name, layout in self.layouts.items() if layout.one_plus}

    def set_epsilon(self, value: float) -> None:
        """Set the epsilon of every norm."""
        for module, attribute in self.epsilons:
            setattr(module, attribute, value)

    def outputs(self) -> Tensor:
        """Return the outputs, flattened except for the last dimension: features or logits."""
        with _Float64() if self.dtype == torch.float64 else nullcontext():
            return _joined(_call(self.model, self.inputs))

    def jacobian(self) -> tuple[Tensor, Tensor]:
        """Return d(random combinations of the outputs)/d(log of every scale), at several weights.

        The columns are the entries of the axes, in order. The second result has the sums of
        absolute values of the terms of each derivative, to recognize terms that cancel to 0.
        """
        num_columns = sum(self.num_entries(axis) for axis in self.axes)
        num_rows = math.ceil(_PROJECTIONS_PER_AXIS * num_columns)
        # If there are few outputs, such as only a loss, take more sets of weights.
        num_points = max(_NUM_POINTS, math.ceil(num_rows / self.outputs().numel()))
        rows_each = math.ceil(num_rows / num_points)
        derivatives = []
        for _ in range(num_points):
            self._randomize()
            outputs = self.outputs()
            for start in range(0, rows_each, _PROJECTIONS_AT_ONCE):
                count = min(_PROJECTIONS_AT_ONCE, rows_each - start)
                derivatives.append(self._derivatives(outputs, count))
        rows, sizes = (torch.cat(part) for part in zip(*derivatives, strict=True))
        if not sizes.isfinite().all():
            raise ValueError(
                "the model's outputs or their derivatives are not finite at random weights, so its "
                "symmetries cannot be found: look for a size, an epsilon or a factor in its "
                "config that is far off"
            )
        return rows, sizes

    @torch.no_grad()
    def scales_single_outputs(self, axis: Axis) -> bool:
        """Return whether each entry of an axis scales one output feature and nothing else."""
        before = self.outputs()
        for entry in (0, self.num_entries(axis) - 1):
            factors = torch.ones(self.num_entries(axis), dtype=self.dtype)
            factors[entry] = 2.0
            with self.rescaled({axis: factors}):
                changed = (self.outputs() != before).any(0)
            if int(changed.sum()) != 1:
                return False
        return True

    def absent(self, axis: Axis) -> Tensor:
        """Return which entries of an axis do not exist: rows without multipliers in the plan."""
        matrix = self.layouts[axis.name].matrix
        entries = torch.ones(self.num_entries(axis), dtype=torch.bool)
        if axis.kind != "row" or matrix is None:
            return ~entries
        return ~keep_carried_rows(matrix, entries.view(*matrix.stack, matrix.num_out)).flatten()

    def derivatives(self, count: int) -> Tensor:
        """Return d(random combinations of the outputs)/d(log of every scale), one by one."""
        outputs = self.outputs()
        return torch.cat([self._derivatives(outputs, 1)[0] for _ in range(count)])

    def num_entries(self, axis: Axis) -> int:
        """Return how many entries an axis has."""
        return self.layouts[axis.name].num_entries(axis.kind)

    @contextmanager
    def rescaled(self, factors: Mapping[Axis, Tensor]) -> Iterator[None]:
        """Multiply the entries of axes by factors inside the context, and restore them after it."""
        names = {axis.name for axis in factors}
        before = {name: self.parameters[name].detach().clone() for name in names}
        try:
            with torch.no_grad():
                for axis, factor in factors.items():
                    parameter = self.parameters[axis.name]
                    along = self.layouts[axis.name].along(axis.kind, factor)
                    parameter.copy_((parameter + axis.offset) * along - axis.offset)
            yield
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    self.parameters[name].copy_(value)

    def _gradients(self, outputs: Tensor, count: int) -> dict[str, Tensor]:
        """Return gradients of some random combinations of the outputs, (count, *shape)."""
        shape = (count, *outputs.shape)
        weights = torch.randn(shape, generator=self._generator, dtype=self.dtype)
        grads = torch.autograd.grad(
            outputs,
            list(self.parameters.values()),
            weights if count > 1 else weights[0],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
            is_grads_batched=count > 1,
        )
        named = zip(self.parameters.items(), grads, strict=True)
        return {name: grad.expand(count, *parameter.shape) for (name, parameter), grad in named}

    def _derivatives(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return derivatives of some random combinations of the outputs, and their sizes.

        Both are (count, columns).
        """
        sums, sizes = [], []
        for name, grad in self._gradients(outputs, count).items():
            layout = self.layouts[name]
            # sum W * dL/dW along each axis, for each of the gradients, and sum |W * dL/dW|.
            changes = (self.parameters[name].detach() + layout.axes[0].offset) * grad
            for axis in layout.axes:
                summed = torch.vmap(partial(layout.summed, axis.kind))
                sums.append(summed(changes))
                sizes.append(summed(changes.abs()))
        return torch.cat(sums, 1), torch.cat(sizes, 1)

    def _find_shifted(self) -> list[str]:
        """Return the vectors that are used as 1 + w: at w = -1 other parameters have no effect."""
        everything = self._reached()
        shifted = []
        for name, layout in self.layouts.items():
            if not layout.is_vector:
                continue
            nothing = torch.zeros(layout.num_entries("one-plus"), dtype=self.dtype)
            with self.rescaled({Axis(name, "one-plus"): nothing}):
                if self._reached() - {name} < everything - {name}:
                    shifted.append(name)
        return shifted

    def _reached(self) -> set[str]:
        """Return the parameters that have an effect on the outputs."""
        outputs = self.outputs()
        if not outputs.requires_grad:
            raise ValueError("the outputs do not depend on any trained parameter of the model")
        return {name for name, grad in self._gradients(outputs, 1).items() if bool(grad.any())}

    @torch.no_grad()
    def _randomize(self) -> None:
        for name, parameter in self.parameters.items():
            drawn = torch.randn(parameter.shape, generator=self._generator, dtype=self.dtype)
            if self.layouts[name].is_vector:
                parameter.copy_(1 + 0.3 * drawn)
            else:
                fan_in = parameter[0].numel() if parameter.ndim < 3 else parameter.shape[-1]
                parameter.copy_(drawn / fan_in**0.5)


def random_tokens(model: nn.Module, most: int | None = None) -> Tensor:
    """Return sequences of random tokens for a language model: all tokens, or about `most`."""
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise ValueError(
            "the model has no embedding to make inputs for: give inputs, what it is called with"
        )
    generator = torch.Generator().manual_seed(0)
    size = embedding.num_embeddings
    count = math.ceil((most or max(_FEWEST_TOKENS, size)) / _LENGTH) * _LENGTH
    tokens = torch.cat(
        [torch.randperm(size, generator=generator) for _ in range(count // size + 1)]
    )
    return tokens[:count].view(-1, _LENGTH)


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Apply a function to each tensor in nested tuples, lists and mappings, which become dicts."""
    # Not torch's pytree, to which the BatchEncoding of a tokenizer is a leaf.
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(map_tensors(function, value) for value in inputs)
    return inputs


def tensors_in(inputs: Any) -> Iterator[Tensor]:
    """Yield each tensor in nested tuples, lists and mappings."""
    if isinstance(inputs, Tensor):
        yield inputs
    if isinstance(inputs, Mapping):
        inputs = list(inputs.values())
    if isinstance(inputs, tuple | list):
        for value in inputs:
            yield from tensors_in(value)


def _to_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an input tensor on the CPU, in the dtype of the copy if it has floats."""
    return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _joined(outputs: Any) -> Tensor:
    """Return the first floating-point tensor of a model's outputs: usually logits."""
    if isinstance(outputs, Tensor):
        values: Any = (outputs,)
    elif hasattr(outputs, "logits"):
        values = (outputs.logits,)
    else:
        values = outputs.values() if isinstance(outputs, Mapping) else outputs
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.reshape(-1, value.shape[-1]) if value.ndim else value.reshape(1, 1)
    raise ValueError(f"the model returned no floating-point tensor but a {type(outputs).__name__}")


def _epsilons(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the epsilons of norms: attributes with `eps` in their name and a small value."""
    for module in model.modules():
        for attribute, value in vars(module).items():
            if "eps" in attribute and isinstance(value, float) and 0 < value <= 1e-3:
                yield module, attribute


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
