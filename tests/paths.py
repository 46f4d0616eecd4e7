"""The same training on both paths, from the same far-off multipliers, for comparison."""

import copy
import os

import torch
import torch.nn.functional as F
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers._multiplier import all_rows, carried_rows

# Where there is a CUDA device the same laws are checked on it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

BETAS, EPS, DECAY, MULTIPLIER_DECAY = (0.9, 0.95), 1e-8, 0.1, 2e-3


class Toy(nn.Module):
    """A little of everything: fused attention-like rows, a stack, biases, a norm, tied-free."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.qkv = nn.Linear(6, 12)
        self.mix = nn.Parameter(torch.randn(3, 5, 12))
        self.out = nn.Linear(5, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(6, 4)
        self.frozen = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        h = torch.tanh(self.qkv(self.frozen(x)))
        h = torch.einsum("bti,eoi->bto", h, self.mix) / 3
        return self.head(self.norm(x + self.out(torch.tanh(h))))


_FIELDS = {
    "scalar": dict(kind="scalar"),
    "row": dict(kind="row"),
    "col": dict(kind="col"),
    "row+col": dict(kind="row+col"),
    "log": dict(kind="row+col", scale="log"),
    "log scalar": dict(kind="scalar", scale="log"),
}
KINDS = (*_FIELDS, "blocks", "interleaved", "per head")


def toy_plan(model, kind):
    """Give every matrix but the head the same multipliers; `blocks` and the like mix."""
    stack = dict(role="down")
    if kind in ("blocks", "interleaved"):
        repeats = 2 if kind == "interleaved" else 1
        split = {"query": 4 // repeats, "key": 6 // repeats, "value": 2 // repeats}
        rules = [
            lrm.Rule(r"mix", "scalar", **stack),
            lrm.Rule(r"qkv\.weight", split=split, repeats=repeats),
        ]
        plan = lrm.plan(
            model, "symmetry-aware", [*rules, lrm.Rule(r"unused|out|single", "row+col")]
        )
        return plan
    if kind == "per head":
        heads = dict(split={"query": 4, "key": 2}, repeats=2, head_dim=2)
        rules = [lrm.Rule(r"mix", "scalar", **stack), lrm.Rule(r"qkv\.weight", "per-head", **heads)]
        return lrm.plan(model, "full", rules)
    given = _FIELDS[kind]
    return lrm.plan(
        model,
        "full",
        [
            lrm.Rule("head", "none"),
            lrm.Rule("mix", **given, **stack),
            lrm.Rule(r"qkv\.weight|embed|out\.weight|unused\.weight", **given),
        ],
    )


def far_values(matrix, generator, dtype):
    """Stored values spread log-uniformly over 0.1 to 10, some negative and one zero."""
    values = {}
    for name, shape in matrix.value_shapes().items():
        log = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * 2.302585
        value = log
        if matrix.scale == "linear":
            sign = torch.where(torch.rand(shape, generator=generator) < 0.3, -1.0, 1.0)
            value = log.exp() * sign
            if value.numel() > 1:
                value.view(-1)[1] = 0.0
        if name == "row":
            value = all_rows(matrix, carried_rows(matrix, value))
        values[name] = value.to(DEVICE, dtype)
    return values


def batches(steps, micro):
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(0, 13, (2, 7), generator=generator) for _ in range(micro)]
        for _ in range(steps)
    ]


def backward(model, ids):
    ids = ids.to(DEVICE)
    logits = model(ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()).backward()


def start(kind, dtype):
    torch.manual_seed(0)
    model = Toy().to(DEVICE, dtype)
    plan = toy_plan(model, kind)
    generator = torch.Generator().manual_seed(7)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = {
        entry.name: far_values(entry.matrix, generator, wide)
        for entry in plan.entries
        if entry.carries
    }
    return model, plan, values


def explicit_run(kind, dtype, make, steps=20, micro=1, max_norm=None, clip_multipliers=False):
    """Train the explicit path; return raw, multipliers and moments by name."""
    model, plan, values = start(kind, dtype)
    lrm.reparametrize(model, plan)
    with torch.no_grad():
        for name, module in model.named_modules():
            for leaf in list(getattr(module, "parametrizations", {})):
                carried = module.parametrizations[leaf][0]
                path = f"{name}.{leaf}" if name else leaf
                for key, value in values[path].items():
                    value = carried_rows(carried.matrix, value) if key == "row" else value
                    getattr(carried, key).copy_(value)
    optimizers = make(model, plan)
    for micros in batches(steps, micro):
        for ids in micros:
            backward(model, ids)
        grads = [
            p.grad for n, p in model.named_parameters() if p.grad is not None and not is_mult(n)
        ]
        if max_norm is not None and clip_multipliers:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        elif max_norm is not None:
            norm = torch.nn.utils.get_total_norm(grads)
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(scale)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, plan, optimizers


def is_mult(name):
    return "parametrizations" in name and not name.endswith("original")


def optimizer_run(kind, dtype, make, steps=20, micro=1):
    """Train the optimizer path from the same start."""
    model, plan, values = start(kind, dtype)
    optimizer = make(model, plan)
    place(optimizer, model, values)
    for micros in batches(steps, micro):
        for ids in micros:
            backward(model, ids)
        optimizer.step()
        optimizer.zero_grad()
    return model, plan, optimizer


def place(optimizer, model, values):
    """Put multipliers into a fresh optimizer, and their effective weights into the model."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    names = [n for g in optimizer.param_groups for n in g["param_names"]]
    ids = [i for g in state["param_groups"] for i in g["params"]]
    plan_matrices = matrices_of(optimizer)
    with torch.no_grad():
        for name, i in zip(names, ids, strict=True):
            if name not in values:
                continue
            kept = state["state"][i]
            for key, value in values[name].items():
                kept[key].copy_(value)
            weight = lrm.effective(plan_matrices[name], kept["raw"], values[name])
            model.get_parameter(name).copy_(weight)
    optimizer.load_state_dict(state)


def matrices_of(optimizer):
    return {entry.name: entry.matrix for entry in optimizer.plan.entries if entry.matrix}


def compare(explicit, optimized, moments, **tolerance):
    """Raw weights, multipliers and every moment, each by itself."""
    model, plan, optimizers = explicit
    other, _, optimizer = optimized
    states = {}
    for one in optimizers:
        for group in one.param_groups:
            for p in group["params"]:
                states[p] = one.state[p]
    compared = set()
    for entry in plan.entries:
        p = other.get_parameter(entry.name)
        if not p.requires_grad:
            continue
        mine = optimizer.state[p]
        if entry.carries:
            *path, leaf = entry.name.split(".")
            carried = model.get_submodule(".".join(path)).parametrizations[leaf]
            raw = carried.original
            torch.testing.assert_close(mine["raw"], raw.detach(), **tolerance)
            for key in entry.matrix.value_shapes():
                theirs = getattr(carried[0], key)
                pairs = {key: theirs.detach()}
                if theirs in states and states[theirs]:
                    pairs |= {f"{key}_{m}": states[theirs][m] for m in ("exp_avg", "exp_avg_sq")}
                for name, wanted in pairs.items():
                    found = mine[name]
                    if key == "row":
                        found = carried_rows(entry.matrix, found)
                    torch.testing.assert_close(found, wanted, **tolerance)
                    compared.add(name)
            weight = carried().detach()
        else:
            raw = model.get_parameter(entry.name)
            weight = raw.detach()
        torch.testing.assert_close(p.detach(), weight, **tolerance)
        for m in moments:
            if raw in states and m in states[raw]:
                torch.testing.assert_close(mine[m], states[raw][m], **tolerance)
                compared.add(m)
    return compared
