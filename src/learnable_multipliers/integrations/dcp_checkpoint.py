"""Read folders of torch.distributed.checkpoint whose optimizer state has parameter names as keys.

These are the keys of `get_optimizer_state_dict`, nested or flattened, under any prefix. torch reads
the metadata of such a folder, and all values that are not tensors, with an unrestricted unpickler;
here only the classes of that format and plain values are allowed.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from learnable_multipliers._names import named_parameters
from learnable_multipliers.integrations.saved_run import SavedRun, rebuild_optimizer

METADATA = ".metadata"
_MOMENTS = ("exp_avg", "momentum_buffer")
_SETTINGS = (
    "lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay", "momentum",
    "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "multiplier_lr_scale",
)  # fmt: skip
_ALLOWED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(\w*Metadata|MetadataIndex|StorageMeta"
    r"|TensorProperties|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|SerializationFormat)"
    r"|torch\.serialization\._get_layout|torch\.(Size|device|\w*float\w*|u?int\d+|bool)"
    r"|collections\.OrderedDict|pathlib\.(Pure)?(Posix|Windows)?Path"
)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module_name}.{global_name}"):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place there")
        return super().find_class(module_name, global_name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_dcp_checkpoint(folder: Path, model: nn.Module | None = None) -> SavedRun:
    """Return the run in a folder.

    Args:
        model: On any device, even the meta device, to read roles from; the weights are those of
            the folder. Without it roles are unknown.
    """
    try:
        metadata = _Reader(folder).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{folder / METADATA} is not read: {error}") from error
    keys = metadata.state_dict_metadata
    pattern = re.compile(rf"(.*?)\bstate\.(.+)\.({'|'.join(_MOMENTS)})")
    moments = [match for key in keys if (match := pattern.fullmatch(key))]
    if not moments:
        raise ValueError(
            f"{folder} has no optimizer state by parameter names: save that of "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    prefix, names = moments[0][1], [match[2] for match in moments]
    weights = _weight_keys(folder, names, list(keys), prefix)
    values = _load(
        folder,
        metadata,
        [
            *weights.values(),
            *(key for key in keys if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))),
        ],
    )
    if model is None:
        model = _bare_model({name: values[key] for name, key in weights.items()})
    parameters = _filled(folder, model, {name: values[key] for name, key in weights.items()})
    head = f"{prefix}state."
    states = {
        parameters[name]: {
            key.removeprefix(f"{head}{name}."): value
            for key, value in values.items()
            if key.startswith(f"{head}{name}.") and "." not in key.removeprefix(f"{head}{name}.")
        }
        for name in names
    }
    groups = _groups(folder, values, f"{prefix}param_groups.", names)
    groups = [{**group, "params": [parameters[n] for n in group["params"]]} for group in groups]
    optimizer, notes = rebuild_optimizer(folder, groups, states)
    steps = [int(state["step"]) for state in states.values() if "step" in state]
    return SavedRun(
        name=folder.name,
        optimizer=optimizer,
        model=model,
        step=max(steps, default=0),
        lrs=None,
        notes=tuple(notes),
    )


def _load(folder: Path, metadata: Metadata, keys: list[str]) -> dict[str, Any]:
    """Return the entries of a folder by their flat keys."""
    wanted: dict[str, Any] = {}
    for key in keys:
        kind = metadata.state_dict_metadata[key]
        is_tensor = isinstance(kind, TensorStorageMetadata)
        wanted[key] = torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # One process reads everything, as intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(wanted, storage_reader=_Reader(folder), planner=planner, no_dist=True)
    return wanted


def _weight_keys(folder: Path, names: list[str], keys: list[str], prefix: str) -> dict[str, str]:
    """Return the key of each parameter's weight: its name, with or without a prefix."""
    others = [key for key in keys if not prefix or not key.startswith(prefix)]
    ends = [key.removesuffix(names[0]) for key in others if key.endswith(names[0])]
    for front in sorted(ends, key=len):
        if all(f"{front}{name}" in keys for name in names):
            return {name: f"{front}{name}" for name in names}
    raise ValueError(
        f"{folder} has optimizer state of {len(names)} parameters but not all of their weights, "
        f"the first {names[0]}: save the model in the same folder"
    )


def _groups(
    folder: Path, values: Mapping[str, Any], head: str, names: list[str]
) -> list[dict[str, Any]]:
    """Return parameter groups, from numbered groups or from flattened settings by name."""
    if f"{head}0.params" in values:
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            if key.startswith(head):
                number, _, setting = key.removeprefix(head).partition(".")
                groups.setdefault(number, {})[setting] = value
        return list(groups.values())
    flat = []
    for name in names:
        keys = {setting: f"{head}{name}.{setting}" for setting in _SETTINGS}
        settings = {setting: values[key] for setting, key in keys.items() if key in values}
        if "lr" not in settings:
            raise ValueError(f"{folder} has no settings of the optimizer for {name}")
        flat.append({**settings, "params": [name]})
    return flat


def _bare_model(weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return plain modules that hold these parameters."""
    model = nn.Module()
    for name in weights:
        module, (*path, leaf) = model, name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(weights[name], requires_grad=True))
    return model


def _filled(
    folder: Path, model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Put the saved weights into a model; return its parameters by name."""
    known = dict(named_parameters(model))
    wrong = [n for n, w in weights.items() if n not in known or known[n].shape != w.shape]
    if wrong:
        raise ValueError(
            f"{folder} is not of this model: {wrong[0]} of shape {tuple(weights[wrong[0]].shape)} "
            "is not one of its parameters; leave --model out to read it without roles"
        )
    model.load_state_dict(weights, strict=False, assign=True)
    return dict(named_parameters(model))
