"""Find the layers that give the logits: as the model says, by name, or by shape."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from learnable_multipliers._names import class_of, unwrap_module
from learnable_multipliers.roles._peft import adapted_name, is_adapter
from learnable_multipliers.roles._tree import Tree, features, is_linear

_HEADS = (
    *("lm_head", "head", "output", "output_projection", "unembed", "unembedding", "embed_out"),
    *("to_logits", "lm_loss", "proj_out", "generator_lm_head", "score", "classifier"),
    *("qa_outputs", "heads"),
)
_NAMES = rf"^({'|'.join(_HEADS)})$|_head$"
_POSITIONS = re.compile(
    r"w?pe$|pos$|.*pos(ition(al|s)?|s)?_?(emb|table)|embed_pos|positions?(_|$)|rel_pos_[hw]$"
)


def is_position_table(name: str, owner: nn.Module) -> bool:
    """Return whether the rows of a table are positions, by its name or the class that holds it."""
    leaf = name.rpartition(".")[2]
    return _POSITIONS.match(leaf) is not None or "Positional" in class_of(owner).__name__


def find_heads(tree: Tree) -> set[str]:
    """Return the names of the linear layers that give the logits."""
    linears = {
        name: features(module)
        for name, module in tree.modules.items()
        if is_linear(module) and not is_adapter(tree, f"{name}.weight")
    }
    declared = {id(head) for module in tree.modules.values() for head in _declared(module)}
    heads = {
        name
        for name in linears
        if any(id(tree.modules[each]) in declared for each in (name, adapted_name(name)))
        or (len(path := _path(tree, name)) == 1 and path[0] in _HEADS)
    }
    # Linear maps from a table's features back to its tokens.
    outside = [name for name in linears if not any(map(str.isdigit, _path(tree, name)))]
    for name, table in tree.embeddings():
        shape = (table.num_embeddings, table.embedding_dim)
        back = [linear for linear in outside if linears[linear] == shape]
        if back and not is_position_table(name, table):
            named = {n for n in back if re.search(_NAMES, _path(tree, n)[-1])}
            # The first layer of an MLP can have this shape too: of several layers, take the last.
            last = {n for n in back[-1:] if shape[0] != shape[1]}
            heads |= named if named or not heads.isdisjoint(back) else last
    heads = heads or _inside_heads(tree, list(linears))
    tied = {id(weight) for name in heads if (weight := _weight(tree, name)) is not None}
    return heads | {name for name in linears if id(_weight(tree, name)) in tied}


def _declared(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the heads that a model of transformers or timm names as its own."""
    for accessor in ("get_output_embeddings", "get_classifier"):
        get_head = getattr(module, accessor, None)
        try:
            head = get_head() if callable(get_head) else None
        except (NotImplementedError, AttributeError, TypeError):
            continue
        for each in head if isinstance(head, tuple | list) else (head,):
            if isinstance(each, nn.Module):
                yield unwrap_module(each)


def _inside_heads(tree: Tree, linears: list[str]) -> set[str]:
    """Return the last linear layer of each top-level module that has the name of a head."""
    last: dict[str, list[str]] = {}
    for name in linears:
        top, *inside = path = _path(tree, name)
        if top in _HEADS:
            # Each entry of a list of heads is a head.
            is_list = isinstance(tree.modules[f"{tree.root}.{top}".lstrip(".")], nn.ModuleList)
            last[f"{top}.{inside[0]}" if is_list else top] = path
    if linears and _path(tree, linears[-1]) == ["fc"]:
        last["fc"] = ["fc"]
    return {name for name in linears if _path(tree, name) in last.values()}


def _path(tree: Tree, name: str) -> list[str]:
    return adapted_name(name).removeprefix(tree.root).removeprefix(".").split(".")


def _weight(tree: Tree, name: str) -> nn.Parameter | None:
    return tree.modules[name]._parameters.get("weight")
