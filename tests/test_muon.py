"""Muon with multipliers against torch's own Muon, block by block."""

import pytest
import torch
from torch.optim import _muon

import learnable_multipliers as lrm
from families import HandWritten, build
from learnable_multipliers.optim._muon import is_hidden
from paths import BETAS, DECAY, EPS, KINDS, MULTIPLIER_DECAY, compare, explicit_run, optimizer_run

LR, SCALE, ADAMW_SCALE = 1e-2, 0.5, 0.7


@pytest.fixture
def float64_newton_schulz(monkeypatch):
    """torch's Muon in its own words, but without rounding to bfloat16."""

    def exact(grad, coefficients, steps, eps):
        a, b, c = coefficients
        x = grad.mT if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if grad.size(0) > grad.size(1) else x

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact)


class BlockMuon(torch.optim.Optimizer):
    """torch.optim.Muon on each block of each matrix: rows of one role, or one expert."""

    def __init__(self, named, plan, **kwargs):
        self.pieces = {}
        super().__init__([p for _, p in named], {})
        self.inner = []
        for name, p in named:
            matrix = plan[name].matrix
            for index in self.indices(matrix):
                piece = torch.nn.Parameter(p.detach()[index].reshape(-1, matrix.num_in).clone())
                self.pieces.setdefault(p, []).append((index, piece))
                self.inner.append(torch.optim.Muon([piece], **kwargs))
        self.state_names = named

    @staticmethod
    def indices(matrix, split="blocks"):
        rows = torch.arange(matrix.num_out).view(matrix.row_pattern)
        for e in range(matrix.stack[0]) if matrix.stack else [None]:
            parts = rows.split([block.size for block in matrix.blocks], -1)
            for block, part in zip(matrix.blocks, parts, strict=True):
                by_heads = split == "heads" and block.head_dim is not None
                for some in part.flatten().split(block.head_dim if by_heads else part.numel()):
                    yield some if e is None else (e, some)

    @torch.no_grad()
    def step(self):
        for p, pieces in self.pieces.items():
            for index, piece in pieces:
                piece.copy_(p[index])
                piece.grad = None if p.grad is None else p.grad[index].clone()
        for optimizer in self.inner:
            optimizer.step()
        owners = iter(self.inner)
        for p, pieces in self.pieces.items():
            for index, piece in pieces:
                p[index] = piece
                inner = next(owners)
                if piece in inner.state:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer[index] = inner.state[piece]["momentum_buffer"]


def stock(adjust, nesterov=True):
    def make(model, plan):
        groups = lrm.param_groups(
            model,
            plan,
            weight_decay=DECAY,
            lr=LR,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
        )
        hidden, rest = [], []
        entries = {}
        for entry in plan.entries:
            path, _, leaf = entry.name.rpartition(".")
            raw = ".".join(x for x in (path, "parametrizations", leaf, "original") if x)
            entries[raw if entry.carries else entry.name] = entry
        for group in groups:
            for name, p in group["params"]:
                entry = entries.get(name)
                if entry is not None and is_hidden(entry.matrix):
                    hidden.append((entry.name, p))
                else:
                    scale = 1.0 if group["kind"] == "multiplier" else ADAMW_SCALE
                    kept = {"weight_decay": group["weight_decay"], "lr": group["lr"] * scale}
                    rest.append({"params": [p], **kept})
        muon = BlockMuon(
            hidden, plan, lr=LR, weight_decay=DECAY, nesterov=nesterov, adjust_lr_fn=adjust
        )
        return [muon, torch.optim.AdamW(rest, betas=BETAS, eps=EPS)]

    return make


def ours(adjust, max_norm=None, nesterov=True):
    def make(model, plan):
        return lrm.Muon(
            lrm.param_groups(model, plan, weight_decay=DECAY),
            lr=LR,
            nesterov=nesterov,
            adjust_lr=adjust,
            adamw_lr_scale=ADAMW_SCALE,
            betas=BETAS,
            eps=EPS,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
            max_grad_norm=max_norm,
        )

    return make


@pytest.mark.usefixtures("float64_newton_schulz")
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_path_equals_explicit_path_in_float64(kind, max_norm, adjust):
    explicit = explicit_run(kind, torch.float64, stock(adjust), max_norm=max_norm, micro=2)
    optimized = optimizer_run(kind, torch.float64, ours(adjust, max_norm), micro=2)
    moments = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    compared = compare(explicit, optimized, moments, rtol=1e-10, atol=1e-10)
    assert {"exp_avg", "momentum_buffer"} <= compared


@pytest.mark.usefixtures("float64_newton_schulz")
def test_plain_momentum_equals_torch():
    explicit = explicit_run("row+col", torch.float64, stock("original", nesterov=False))
    optimized = optimizer_run("row+col", torch.float64, ours("original", nesterov=False))
    compare(explicit, optimized, ("momentum_buffer",), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("float64_newton_schulz")
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "falcon-40b", "mixtral"])
def test_by_heads_each_head_is_orthogonalized_by_itself(family, adjust):
    model = build(family).double()
    settings = {"lr": LR, "weight_decay": DECAY, "nesterov": True}
    ours = lrm.Muon.from_model(model, "none", split="heads", adjust_lr=adjust, **settings)
    pieces = []
    for entry in ours.plan.entries:
        if entry.matrix is None or not is_hidden(entry.matrix):
            continue
        weight = model.get_parameter(entry.name)
        # (out, in), however it is stored.
        rows = weight.mT if entry.matrix.transposed else weight
        for index in BlockMuon.indices(entry.matrix, "heads"):
            piece = torch.nn.Parameter(rows.detach()[index].clone())
            pieces.append((rows, weight, index, piece, entry.matrix.transposed))
    theirs = torch.optim.Muon([p for *_, p, _ in pieces], adjust_lr_fn=adjust, **settings)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for _, weight, index, piece, transposed in pieces:
            piece.grad = (weight.grad.mT if transposed else weight.grad)[index].clone()
        ours.step()
        theirs.step()
    for rows, _, index, piece, _ in pieces:
        torch.testing.assert_close(rows[index], piece, rtol=1e-10, atol=1e-12)


def without_head_counts():
    model = HandWritten()
    for layer in model.layers:
        del layer.attention.heads
    return model


def test_heads_of_unknown_size_raise_and_name_a_rule():
    model = without_head_counts()
    with pytest.raises(ValueError, match=r"the rows of one head of layers.0.attention.wq.weight"):
        lrm.Muon.from_model(model, split="heads")
    rules = [lrm.Rule(r"attention\.w[qkv]", head_dim=4)]
    optimizer = lrm.Muon.from_model(model, split="heads", rules=rules)
    assert optimizer.plan["layers.0.attention.wq.weight"].matrix.blocks[0].head_dim == 4
    with pytest.raises(ValueError, match="heads of 5 rows do not divide the 16 rows of query"):
        lrm.plan(model, rules=[lrm.Rule(r"attention\.w[qkv]", head_dim=5)])
    with pytest.raises(ValueError, match="which holds no query, key or value"):
        lrm.plan(model, rules=[lrm.Rule("output", head_dim=4)])
    with pytest.raises(ValueError, match="no matrix of this model is known as query"):
        lrm.Muon.from_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), split="heads")
    with pytest.raises(ValueError, match="unknown split"):
        lrm.Muon.from_model(model, split="rows")


def test_a_state_does_not_depend_on_head_sizes():
    model = without_head_counts()
    rules = [lrm.Rule(r"attention\.w[qkv]", head_dim=4)]
    before = lrm.Muon.from_model(model)
    again = lrm.Muon.from_model(model, split="heads", rules=rules)
    again.load_state_dict(before.state_dict())


def test_muon_without_a_plan_raises():
    with pytest.raises(ValueError, match=r"use lrm.Muon.from_model\(model\)"):
        lrm.Muon(torch.nn.Linear(3, 3).parameters())
    groups = [{"params": [torch.zeros(1)]}]
    with pytest.raises(ValueError, match="unknown adjust_lr"):
        lrm.Muon(groups, adjust_lr="both")
    with pytest.raises(ValueError, match="unknown coefficients"):
        lrm.Muon(groups, coefficients="cubic")


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.smear_gate = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7)


def test_printing_muon_says_which_optimizer_trains_what():
    lines = repr(lrm.Muon.from_model(build("llama"))).splitlines()
    assert lines[2] == "  Muon: 14 matrices; AdamW: 2 matrices (embedding, head) and 5 vectors"
    assert lines[3].startswith("  group 0: ")
    model = Gated()
    lines = repr(lrm.Muon.from_model(model)).splitlines()
    assert lines[2:4] == [
        "  Muon: 1 matrix; AdamW: 2 matrices (embedding, head) and 2 vectors",
        "  Muon trains matrices of unknown role: smear_gate.weight",
    ]
    router = lrm.Rule(r"smear_gate\.weight", role="router")
    model.head.bias.requires_grad_(False)
    lines = repr(lrm.Muon.from_model(model, rules=[router])).splitlines()
    assert lines[2] == (
        "  Muon: 0 matrices; AdamW: 3 matrices (embedding, router, head) and 1 vector"
    )
    assert lines[3].startswith("  group 0: ")
    fixed = lrm.Rule(r"smear_gate\.weight", train="multipliers")
    lines = repr(lrm.Muon.from_model(model, rules=[fixed])).splitlines()
    assert lines[2].startswith("  Muon: 0 matrices; AdamW: 2 matrices (embedding, head)")
