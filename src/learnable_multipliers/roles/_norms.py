"""Find the learnable norms before and after a block, by their position and names.

A module tree does not show the order of computation, so names decide, and assumptions are
reported in words. A norm's weight acts as a multiplier only if it is trained, and only if its
output goes into the block alone: in a residual post-norm model it goes into the residual stream as
well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from learnable_multipliers._names import children, class_of, unwrap_module
from learnable_multipliers.roles._tree import (
    Tree,
    class_path,
    is_learnable_norm,
    is_linear,
    is_norm,
)

BlockKind = Literal["mixer", "mlp"]
"""`mixer` is attention or a state-space mixer, which comes first in a layer."""

PRE_NORM = (
    "norms inside a layer feed its blocks (pre-norm), so that their weights are the column "
    "multipliers of q, k, v, gate, up and ssm-in"
)
NO_NORM = "some blocks have no learnable norm in front: their first matrices take the columns"
NORM_BEHIND = (
    "norms follow the output of some blocks, so that their weights are the row multipliers of "
    "attention-out and down"
)
RESIDUAL_POST_NORM = (
    "norms sit on the residual stream behind each block (post-norm: the layer says so, or no norm "
    "follows the last layer), so that their weights are no block's multipliers"
)
LAYER_SCALE = (
    "ls1 follows attention and ls2 the MLP (LayerScale), so that they are the row multipliers of "
    "attention-out and down"
)
_NORM_INSIDE = {
    *("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope"),
    *("timm.layers.mlp.Mlp", "timm.layers.mlp.GluMlp", "timm.layers.mlp.SwiGLU"),
    "timm.models.vision_transformer.Attention",
}
"""Classes whose `norm` feeds their last matrix; in others, a norm of this name may come first."""
CROSS_ATTENTION = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn")
_NORMS_BEHIND = ("ResPostBlock", "SwinTransformerV2Block")
"""Layers of timm that normalize a block's output, with names of norms before a block."""


@dataclass(frozen=True)
class Norms:
    """Names of the learnable norms around a block; empty if there is none.

    A LayerScale after it counts as one: it is the weight of a norm without the normalization.
    """

    before: str = ""
    after: str = ""


def norms_around(tree: Tree, name: str, kind: BlockKind) -> Norms:
    """Return the learnable norms before and after the block called `name`."""
    levels = list(_levels(tree, name, kind))
    candidates = {
        path: child
        for level in levels
        for path, child in _norms_in(tree, level)
        if level or not _is_final(path)
    }
    if not candidates:
        tree.assume(NO_NORM)
        return Norms()
    if _is_post_norm(tree, levels):
        tree.assume(RESIDUAL_POST_NORM)
        return Norms()
    before, after = _sort(list(candidates), kind, name.rpartition(".")[2].lower())
    if class_of(tree.modules[levels[-1]]).__name__ in _NORMS_BEHIND:
        before, after = [], before
    norms = Norms(_learnable(candidates, before), _learnable(candidates, after))
    tree.assume(PRE_NORM if norms.before else NO_NORM)
    if norms.after:
        tree.assume(NORM_BEHIND)
    elif scale := _layer_scale(tree, levels[-1], kind):
        tree.assume(LAYER_SCALE)
        return Norms(norms.before, scale)
    return norms


def inner_norms(module: nn.Module) -> tuple[str, ...]:
    """Return the names of norms before a block's last matrix that only its class shows."""
    return ("norm",) if class_path(module) in _NORM_INSIDE else ()


def final_norm(tree: Tree) -> str:
    """Return the name of the last learnable norm outside all layers and embeddings, or none."""
    last = ""
    for path, module in tree.modules.items():
        in_layer = any(part.isdigit() for part in path.split("."))
        if not in_layer and is_learnable_norm(module) and "emb" not in path.lower():
            last = path
    return last


def _levels(tree: Tree, name: str, kind: BlockKind) -> Iterator[str]:
    """Yield the modules around a block, innermost first, up to the layer that holds it."""
    if kind == "mlp" and _holds_blocks(tree.modules[name]):
        # OPT's layers hold the matrices of their MLP themselves, beside attention.
        yield name
        if _in_list(name):
            return
    while name:
        name = name.rpartition(".")[0]
        yield name
        if _in_list(name):
            return


def _norms_in(tree: Tree, level: str) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in children(tree.modules[level]).items():
        members = _members(child)
        if members and all(map(is_norm, members)):
            yield (f"{level}.{leaf}" if level else leaf), child


def _is_post_norm(tree: Tree, levels: list[str]) -> bool:
    """Return whether a layer is residual post-norm: by its flag, or as no final norm follows."""
    for level in levels:
        for flag in ("norm_first", "do_layer_norm_before", "normalize_before"):
            first = getattr(tree.modules[level], flag, None)
            if isinstance(first, bool):
                return not first
        if any(path.endswith("_before") for path, _ in _norms_in(tree, level)):
            return False
    layer = levels[-1]
    if not _in_list(layer):
        return False
    for module in tree.lineage(layer):
        # Wav2Vec2 and its descendants.
        stable = getattr(getattr(module, "config", None), "do_stable_layer_norm", None)
        if isinstance(stable, bool):
            return not stable
    while layer:
        holder, _, leaf = layer.rpartition(".")
        if _norm_follows(tree.modules[holder], leaf):
            return False
        layer = holder
    return True


def _norm_follows(holder: nn.Module, stack: str) -> bool:
    """Return whether a norm follows a stack of layers among the parts of their holder."""
    parts = {
        leaf.lower(): unwrap_module(part)
        for leaf, part in holder._modules.items()
        if part is not None
    }
    norms = [
        name
        for name, part in parts.items()
        if is_norm(part)
        and not name.startswith("vocab")
        and ("emb" not in name or re.search(r"^embedding_norm$|after$", name))
    ]
    names = list(parts)
    place = names.index(stack.lower())
    for name in norms:
        # Modules are usually created in the order in which they are used. Where not, names of final
        # norms say so, and those of norms around a stack, which only pre-norm layers have.
        around = re.search(r"(^|_)(pre|post)(_|$)", name) is not None
        if names.index(name) > place or _is_final(name) or around:
            return True
    # The only norm beside a stack is at its end, but in speech models.
    of_speech = parts.keys() & {"pos_conv_embed", "feature_extractor"}
    if len(norms) == 1 and not of_speech and not norms[0].startswith("in"):
        return True
    for name in names[place + 1 :]:
        if re.search(r"pooler|head|merger|logits|classif|output|unembed", name):
            first = next((m for m in parts[name].modules() if m._parameters), None)
            if first is not None and is_norm(first):
                return True
    return False


def _sort(paths: list[str], kind: BlockKind, block: str) -> tuple[list[str], list[str]]:
    """Return which of a layer's norms come before the block of this name, and which after it."""
    names = {path: path.rpartition(".")[2].lower() for path in paths}
    subject = {path: _subject(name, list(names.values())) for path, name in names.items()}
    behind = [path for path in paths if re.search(r"(^|_)post(_|norm|$)", names[path])]
    front = [path for path in paths if path not in behind]
    own_mlp = [path for path in front if subject[path] == "mlp"]
    # Llama's `post_attention_layernorm` feeds its MLP. In Gemma 2 and OLMo 2 it follows
    # attention: there the MLP has a norm of its own, or every norm follows its block.
    ambiguous = [path for path in behind if re.match(r"post_att(entio)?n", names[path])]
    if front and not own_mlp:
        behind = [path for path in behind if path not in ambiguous]
        own_mlp = ambiguous
    after = [path for path in behind if subject[path] == kind]
    if kind == "mixer":
        mixers = [path for path in front if subject[path] in ("mixer", "")]
        # Of the norms of self- and cross-attention: `encoder_attn_layer_norm`; norm2 for attn2.
        second = CROSS_ATTENTION.search(block) or block.endswith("2")
        own = [path for path in mixers if names[path].startswith(block)]
        if CROSS_ATTENTION.search(block) and not own:
            own = [path for path in mixers if CROSS_ATTENTION.search(names[path])]
        own = own or [path for path in mixers if names[path].endswith("2" if second else "1")]
        return own or mixers, after
    shared = [path for path in front if subject[path] == ""]
    # One norm before parallel blocks feeds both, even if it counts as the first.
    numbered = [path for path in front if re.search(r"1$", names[path])]
    return own_mlp or shared or numbered, after


def _subject(name: str, siblings: list[str]) -> BlockKind | Literal[""]:
    """Return the block that a norm's name refers to, among the norms of its layer."""
    of_mixer = re.search(r"att(entio)?n|(^|_)sa_|mixer|temporal|operator", name)
    of_mlp = re.search(r"mlp|ffn|(^|_)ff(_|\d|$)|feed_?forward|moe|channel", name)
    if of_mixer and not of_mlp:
        return "mixer"
    if of_mlp and not of_mixer:
        return "mlp"
    if name.endswith("after") and any(other.endswith("before") for other in siblings):
        # ViT's `layernorm_before` attention, `layernorm_after` it.
        return "mlp"
    if name.endswith("before") and any(other.endswith("after") for other in siblings):
        return "mixer"
    # With cross-attention in between, the third is the MLP's.
    last = "3" if any(other.endswith("3") for other in siblings) else "2"
    if name.endswith(last):
        return "mlp"
    return "mixer" if name.endswith(("1", "2")) else ""


def _layer_scale(tree: Tree, layer: str, kind: BlockKind) -> str:
    """Return the name of the trained LayerScale after a block, by timm's names; or none."""
    name = f"{layer}.{'ls1' if kind == 'mixer' else 'ls2'}"
    module = tree.modules.get(name)
    if module is None or class_of(module).__name__ != "LayerScale":
        return ""
    return name if getattr(getattr(module, "gamma", None), "requires_grad", False) else ""


def _learnable(modules: dict[str, nn.Module], paths: list[str]) -> str:
    """Return the name of a learnable norm among several; empty if none is."""
    learnable = (p for p in paths if all(map(is_learnable_norm, _members(modules[p]))))
    return next(learnable, "")


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a list, such as norms for several blocks of a kind, or one module."""
    return list(children(module).values()) if isinstance(module, nn.ModuleList) else [module]


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether a module has matrices of its own and modules with matrices."""
    inner = (child for child in children(module).values() if not is_linear(child))
    return any(is_linear(part) for child in inner for part in child.modules())


def _in_list(name: str) -> bool:
    """Return whether this is an element of a list of layers: norms above it belong to no layer."""
    return name.rpartition(".")[2].isdigit()


def _is_final(name: str) -> bool:
    """Return whether this is the name of a model's final norm."""
    return (
        re.search(r"^norm$|final|norm_?f$|ln_?f$|out(put)?_?norm|norm_?out|head", name.lower())
        is not None
    )
