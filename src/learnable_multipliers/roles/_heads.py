"""Find the layers that give the logits: as the model says, by name, or by shape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from learnable_multipliers._names import children, class_of, unwrap_module
from learnable_multipliers.roles._peft import adapted_name, is_adapter
from learnable_multipliers.roles._tree import Tree, features, is_linear, is_norm

_HEADS = (
    *("lm_head", "head", "output", "output_projection", "unembed", "unembedding", "embed_out"),
    *("to_logits", "lm_loss", "proj_out", "generator_lm_head", "score", "classifier"),
    *("qa_outputs", "heads"),
)
_NAMES = rf"^({'|'.join(_HEADS)})$|_head$"
_POSITION_TABLE = re.compile(r"wpe$|.*pos(ition(al|s)?|s)?_?(emb|table)|embed_pos|positions?(_|$)")
_BARE_POSITIONS = re.compile(r"(.*_)?pos(itions?|itional)?_?(emb\w*|enc\w*|table)$|rel_pos_[hw]$")


def is_position_table(name: str, owner: nn.Module) -> bool:
    """Return whether the rows of an embedding are positions, by its name or class."""
    leaf = name.rpartition(".")[2]
    if re.fullmatch(r"pe|pos", leaf) or "Positional" in class_of(owner).__name__:
        return True
    return _POSITION_TABLE.match(leaf) is not None


def is_bare_position_table(leaf: str) -> bool:
    """Return whether the rows of a parameter outside layers are positions, by its name."""
    return _BARE_POSITIONS.match(leaf) is not None


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
    tables = {
        (table.num_embeddings, table.embedding_dim)
        for name, table in tree.embeddings()
        if not is_position_table(name, table)
    }
    for name, shape in linears.items():
        path = _path(tree, name)
        # A linear map from a table's features back to its tokens.
        if shape in tables and not any(map(str.isdigit, path)):
            of_mlp = shape[0] == shape[1] or _is_first_of_mlp(linears, name)
            if re.search(_NAMES, path[-1]) or not of_mlp:
                heads.add(name)
    heads = heads or _inside_heads(tree, list(linears))
    tied = {id(weight) for name in heads if (weight := _weight(tree, name)) is not None}
    return heads | {name for name in linears if id(_weight(tree, name)) in tied}


def _is_first_of_mlp(linears: Mapping[str, tuple[int, int]], name: str) -> bool:
    """Return whether a linear layer beside this one goes the other way."""
    holder, turned = name.rpartition(".")[0], linears[name][::-1]
    beside = (other for other in linears if other.rpartition(".")[0] == holder)
    return any(linears[other] == turned for other in beside)


def _declared(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the heads that a model of transformers or timm names as its own."""
    for accessor in ("get_output_embeddings", "get_classifier"):
        try:
            get_head = getattr(module, accessor, None)
            head = get_head() if callable(get_head) else None
        # Code of the model: a method of this name may be anything.
        except Exception:
            continue
        for each in head if isinstance(head, tuple | list) else (head,):
            if isinstance(each, nn.Module):
                yield from _last_layers(unwrap_module(each))


def _last_layers(head: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that give logits: of each entry of a list, the last of a sequence."""
    parts = list(children(head).values())
    if isinstance(head, nn.ModuleList | nn.ModuleDict):
        for part in parts:
            yield from _last_layers(part)
    elif isinstance(head, nn.Sequential):
        yield from [part for part in parts if is_linear(part)][-1:]
    else:
        yield head


def _inside_heads(tree: Tree, linears: list[str]) -> set[str]:
    """Return the last linear layers of top-level modules that are heads by name and class."""
    last: dict[str, str] = {}
    for name in linears:
        top, *inside = _path(tree, name)
        holder = tree.modules.get(f"{tree.root}.{top}".lstrip("."))
        if top not in _HEADS or holder is None:
            continue
        if isinstance(holder, nn.ModuleList | nn.ModuleDict):
            # Each entry is a head.
            entry = children(holder).get(inside[0])
            if entry is not None and (is_linear(entry) or _is_head_class(entry)):
                last[f"{top}.{inside[0]}"] = name
        elif _is_head_class(holder) and not (top == "score" and isinstance(holder, nn.Sequential)):
            last[top] = name
    if linears and _path(tree, linears[-1]) == ["fc"] and _is_last(tree, linears[-1]):
        last["fc"] = linears[-1]
    return {
        name for name in linears if any(_path(tree, name) == _path(tree, n) for n in last.values())
    }


def _is_head_class(module: nn.Module) -> bool:
    named = re.search(r"Head|Classif", class_of(module).__name__) is not None
    return named or isinstance(module, nn.Sequential)


def _is_last(tree: Tree, name: str) -> bool:
    """Return whether no other module with parameters, norms aside, is created after this one."""
    owners = [n for n, m in tree.modules.items() if m._parameters and not is_norm(m)]
    return owners[-1:] == [name]


def _path(tree: Tree, name: str) -> list[str]:
    return adapted_name(name).removeprefix(tree.root).removeprefix(".").split(".")


def _weight(tree: Tree, name: str) -> nn.Parameter | None:
    return tree.modules[name]._parameters.get("weight")
