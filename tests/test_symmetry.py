"""Scale symmetries: what is found against what was worked out by hand."""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import learnable_multipliers as lrm
from learnable_multipliers.symmetry import Axis
from learnable_multipliers.symmetry._model_copy import ModelCopy
from symmetry_tables import (
    NULLITY,
    PER_LAYER,
    PLACEMENTS,
    SCALAR_ROWS,
    SIZES,
    TOKENS,
    Family,
    Member,
    Scale,
    each,
    exchange,
    family,
    free,
    pair,
    table,
    whole,
)

NAMES = {None: "none", "symmetry-aware": "aware"}


# Comparing


def members_of(symmetry: lrm.Symmetry) -> list[Member]:
    """The power of every scale, member by member."""
    members: list[Member] = [{} for _ in range(symmetry.num_members)]
    for term in symmetry.terms:
        for entry, member in enumerate(term.members.tolist()):
            if member >= 0:
                assert term.power == int(term.power)
                members[member][term.axis.name, term.axis.kind, entry] = int(term.power)
    return members


def families_of(symmetries: lrm.Symmetries) -> list[Family]:
    return [Family(s.kind, tuple(members_of(s))) for s in symmetries]


def canonical(families: list[Family]) -> set[tuple[str, frozenset[frozenset]]]:
    """Families in a form in which those that mean the same are equal."""

    def signed(member: Member) -> frozenset:
        sign = 1 if member[min(member)] > 0 else -1
        return frozenset((scale, sign * power) for scale, power in member.items())

    return {(f.kind, frozenset(signed(member) for member in f.members)) for f in families}


class Space:
    """The span of members, as vectors over all scales that any of them has."""

    def __init__(self, *lists: list[Family]):
        families = [f for families in lists for f in families]
        scales = {scale for f in families for member in f.members for scale in member}
        self.places = {scale: place for place, scale in enumerate(sorted(scales))}

    def vectors(self, families: list[Family]) -> Tensor:
        members = [member for f in families for member in f.members]
        vectors = torch.zeros(len(members), len(self.places), dtype=torch.float64)
        for vector, member in zip(vectors, members, strict=True):
            for scale, power in member.items():
                vector[self.places[scale]] = power
        return vectors

    def rank(self, *lists: list[Family]) -> int:
        vectors = torch.cat([self.vectors(families) for families in lists])
        return int(torch.linalg.matrix_rank(vectors)) if len(vectors) else 0


def assert_same(families: list[Family], expected: list[Family]) -> None:
    """The same families, and none besides; where a choice is free, the same up to that choice."""
    space = Space(families, expected)
    count = sum(len(f.members) for f in expected)
    assert space.rank(expected) == count, "the table itself is redundant"
    assert sum(len(f.members) for f in families) == count
    assert space.rank(families) == space.rank(families, expected) == count

    exact = [f for f in expected if f.exact]
    missing = canonical(exact) - canonical(families)
    assert not missing, f"not canonical so: {missing}"
    left = [f for f in families if not canonical([f]) <= canonical(exact)]
    loose = [f for f in expected if not f.exact]
    assert len(left) == len(loose)
    # What is left is each the sum of one that is expected and of exact ones, in some order.
    for f in left:
        same = [e for e in loose if space.rank(exact, [f]) == space.rank(exact, [f], [e])]
        assert [e.kind for e in same] == [f.kind]
        loose.remove(same[0])


# Checking by hand that outputs do not change


@contextmanager
def in_float64() -> Iterator[None]:
    """Let model code that asks for float32 have float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


class RescaledCopy:
    """A copy of a model with random weights of ours in float64 and norms without an epsilon."""

    def __init__(self, model: nn.Module, inputs, one_plus: set[str] = frozenset()):
        torch.manual_seed(5)
        self.model = copy.deepcopy(model).double().eval()
        self.inputs = inputs.double() if inputs.is_floating_point() else inputs
        for module in self.model.modules():
            for name in ("eps", "variance_epsilon"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        self.parameters = dict(self.model.named_parameters())
        transposed = {
            name
            for name in self.parameters
            if name.endswith("weight")
            and type(self.model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
        }
        # Weights in the paper's order: rows (outputs) first.
        self.weights = {
            name: parameter.detach().T if name in transposed else parameter.detach()
            for name, parameter in self.parameters.items()
        }
        for name, weight in self.weights.items():
            if weight.ndim < 2:
                weight.copy_(0.4 * torch.randn(weight.shape) + (name not in one_plus))
            elif "emb" in name:
                # Tokens unlike each other, so that they reach every expert.
                weight.copy_(3 * torch.randn(weight.shape))
            else:
                weight.copy_(torch.randn(weight.shape) / weight.shape[-1] ** 0.5)

    def outputs(self) -> Tensor:
        with torch.no_grad(), in_float64():
            out = self.model(self.inputs)
        out = getattr(out, "logits", out)
        assert out.dtype == torch.float64
        return out

    def scale(self, scale: Scale, factor: float) -> None:
        """Multiply one scale of the effective weights."""
        name, axis, entry = scale
        weight = self.weights[name]
        if axis == "vector":
            weight.view(-1)[entry] *= factor
        elif axis == "one-plus":
            weight[entry] = (1 + weight[entry]) * factor - 1
        elif axis == "scalar":
            leaf = next((leaf for leaf in SCALAR_ROWS if name.endswith(leaf)), None)
            rows = range(len(weight)) if leaf is None else SCALAR_ROWS[leaf][entry]
            for row in rows:
                self.scale((name, "row", row), factor)
        elif axis == "row":
            is_stack = weight.ndim == 3 and weight.shape[1] > 1
            (weight.flatten(0, 1) if is_stack else weight)[entry] *= factor
        elif weight.ndim == 3:
            expert, col = divmod(entry, weight.shape[2])
            weight[expert, :, col] *= factor
        else:
            weight[:, entry] *= factor

    def change(self, members: list[Member], log_scales: list[float]) -> float:
        """How much a rescaling changes the outputs, relative to them."""
        before = {name: weight.clone() for name, weight in self.weights.items()}
        reference = self.outputs()
        for member, log_scale in zip(members, log_scales, strict=True):
            for scale, power in member.items():
                self.scale(scale, math.exp(power * log_scale))
        changed = self.outputs()
        for name, weight in self.weights.items():
            weight.copy_(before[name])
        return float((changed - reference).norm() / reference.norm())


def assert_holds(rescaled: RescaledCopy, families: list[Family]) -> None:
    """Each family leaves the outputs alone, and with any one power changed it does not."""
    draw = random.Random(7)
    space = Space(families)
    null = torch.linalg.qr(space.vectors(families).T).Q

    def is_symmetry(member: Member) -> bool:
        vector = space.vectors([Family("", (member,))])[0]
        return bool((vector - null @ (null.T @ vector)).norm() < 1e-9)

    for f in families:
        members = list(f.members)
        log_scales = [draw.uniform(-0.6, 0.6) for _ in members]
        assert rescaled.change(members, log_scales) < 1e-10, f
        place = draw.randrange(len(members))
        member = members[place]
        for term in sorted({(name, axis, power) for (name, axis, _), power in member.items()}):
            part = [s for s, power in member.items() if (*s[:2], power) == term]
            entry = draw.choice(part)
            # The power of one axis, or of one entry where the axis as a whole is a symmetry too.
            for changed in (part, [entry]):
                control = {s: power + (s in changed) for s, power in member.items()}
                if not is_symmetry(control):
                    break
            else:
                # Each of them is taken away by itself.
                assert all(is_symmetry({s: 1}) for s in part)
                continue
            others = [0.0] * place + [0.5] + [0.0] * (len(members) - place - 1)
            controls = [*members[:place], control, *members[place + 1 :]]
            assert rescaled.change(controls, others) > 1e-6, (f, changed)


# Architectures


def build(architecture: str, layers: int = 1) -> nn.Module:
    pytest.importorskip("transformers")
    import families

    depth = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    return families.build(architecture, **SIZES[architecture], **{depth: layers})


def token_ids() -> Tensor:
    """Every token, at ten positions."""
    return torch.cat((torch.arange(TOKENS), torch.tensor([4, 11, 2]))).view(2, 10)


def find(model: nn.Module, placement: str | None) -> lrm.Symmetries:
    plan = None if placement is None else lrm.plan(model, placement)
    return lrm.find_symmetries(model, plan, token_ids())


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: NAMES.get(placement))
@pytest.mark.parametrize("architecture", NULLITY)
def test_finds_the_symmetries_worked_out_by_hand(architecture, placement):
    model = build(architecture)
    symmetries = find(model, placement)
    expected = table(architecture, placement)
    number = NULLITY[architecture][PLACEMENTS.index(placement)]
    assert sum(len(f.members) for f in expected) == number
    assert symmetries.nullity == number
    families = families_of(symmetries)
    assert_same(families, expected)
    silent = {"transformer.h.0.attn.c_attn.bias": 8} if architecture == "gpt2" else {}
    assert {axis.name: count for axis, count in symmetries.silent.items()} == silent

    scales = {scale for f in families for member in f.members for scale in member}
    one_plus = {name for name, axis, _ in scales if axis == "one-plus"}
    assert bool(one_plus) == architecture.startswith("gemma")
    assert_holds(RescaledCopy(model, token_ids(), one_plus), families)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: NAMES.get(placement))
@pytest.mark.parametrize("architecture", PER_LAYER)
def test_layers_share_the_scale_of_the_residual_stream_and_nothing_else(architecture, placement):
    symmetries = find(build(architecture, layers=2), placement)
    place = PLACEMENTS.index(placement)
    assert symmetries.nullity == NULLITY[architecture][place] + PER_LAYER[architecture][place]
    assert_same(families_of(symmetries), table(architecture, placement, layers=2))


def test_the_placement_of_the_papers_appendix_keeps_one_scale_of_each_block():
    model = build("falcon-h1")
    rescaled = RescaledCopy(model, token_ids())
    before = rescaled.outputs()
    layer = "model.layers.0"
    weights = rescaled.weights
    # Attention and mixer: queries and keys both grow with the norm, values with it once.
    weights[f"{layer}.input_layernorm.weight"] *= 2
    weights[f"{layer}.self_attn.q_proj.weight"] /= 4
    weights[f"{layer}.self_attn.o_proj.weight"] /= 2
    weights[f"{layer}.mamba.conv1d.weight"] /= 2
    weights[f"{layer}.mamba.in_proj.weight"][:8] /= 2
    weights[f"{layer}.mamba.in_proj.weight"][22:] /= 2
    # Feed-forward: gate and up grow with the norm.
    weights[f"{layer}.pre_ff_layernorm.weight"] *= 3
    weights[f"{layer}.feed_forward.gate_proj.weight"] /= 3
    weights[f"{layer}.feed_forward.down_proj.weight"] /= 3
    torch.testing.assert_close(rescaled.outputs(), before, rtol=1e-11, atol=1e-11)

    families = families_of(find(model, "symmetry-aware"))
    residual = [f for f in families if f.kind == "normalization"]
    blocks = [f for f in families if f.kind == "multiplicative"]
    assert [len(f.members) for f in residual] == [1]
    powers = [
        {(name.removeprefix(f"{layer}."), axis): p for (name, axis, _), p in f.members[0].items()}
        for f in blocks
    ]
    assert {min(map(abs, power.values())) for power in powers} == {1}
    norms = {"input_layernorm.weight": 0, "pre_ff_layernorm.weight": 1}
    by_block = {}
    for power in powers:
        (norm,) = norms.keys() & {name for name, _ in power}
        by_block[norm] = {key: -p * power[norm, "vector"] for key, p in power.items()}
    assert by_block == {
        "input_layernorm.weight": {
            ("input_layernorm.weight", "vector"): -1,
            ("self_attn.q_proj.weight", "row"): 2,
            ("self_attn.o_proj.weight", "row"): 1,
            ("mamba.conv1d.weight", "row"): 1,
            ("mamba.in_proj.weight", "row"): 1,
        },
        "pre_ff_layernorm.weight": {
            ("pre_ff_layernorm.weight", "vector"): -1,
            ("feed_forward.gate_proj.weight", "row"): 1,
            ("feed_forward.down_proj.weight", "row"): 1,
        },
    }


# Models of no known architecture


def check(model: nn.Module, inputs: Tensor, expected: list[Family], plan=None) -> lrm.Symmetries:
    symmetries = lrm.find_symmetries(model, plan, inputs)
    assert symmetries.nullity == sum(len(f.members) for f in expected)
    families = families_of(symmetries)
    assert_same(families, expected)
    assert_holds(RescaledCopy(model, inputs), families)
    return symmetries


def features(count: int = 5, batch: int = 24) -> Tensor:
    return torch.randn(batch, count, generator=torch.Generator().manual_seed(3))


class Power(nn.Module):
    def __init__(self, power: int):
        super().__init__()
        self.power = power

    def forward(self, x):
        return F.relu(x) ** self.power


def mlp(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), activation, nn.Linear(4, 3))


EXCHANGES = [exchange("0.weight", 4, 5), exchange("2.weight", 3, 4)]


@pytest.mark.parametrize(
    ("activation", "power"),
    [
        (nn.ReLU(), 1),
        (nn.LeakyReLU(0.1), 1),
        (nn.Identity(), 1),
        (Power(2), 2),
        (Power(3), 3),
    ],
    ids=["relu", "leaky-relu", "identity", "relu squared", "relu cubed"],
)
def test_a_homogeneous_activation_lets_scales_through_to_its_degree(activation, power):
    first = [("0.weight", "row", 1, each(4)), ("0.bias", "vector", 1, each(4))]
    through = family("multiplicative", *first, ("2.weight", "col", -power, each(4)))
    check(mlp(activation), features(), [*EXCHANGES, through])


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.GELU(), nn.Softplus()])
def test_other_activations_leave_exchanges_alone(activation):
    symmetries = check(mlp(activation), features(), EXCHANGES)
    assert {symmetry.kind for symmetry in symmetries} == {"exchange"}


class Bilinear(nn.Module):
    """x^T A B C x, in three factors."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 4))
        self.b = nn.Parameter(torch.randn(4, 3))
        self.c = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return ((x @ self.a @ self.b @ self.c) * x).sum(-1)


def test_factors_of_a_product_trade_one_with_the_next():
    expected = [
        exchange("a", 5, 4),
        exchange("b", 4, 3),
        exchange("c", 3, 5),
        pair("a", "col", each(4), "b", "row", each(4)),
        pair("b", "col", each(3), "c", "row", each(3)),
    ]
    check(Bilinear(), features(), expected)


class SquareTimesCube(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 4, bias=False)
        self.c = nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return torch.tanh(self.a(x) ** 2 * self.c(x) ** 3)


def test_no_power_need_be_one():
    powers = family(
        "multiplicative", ("a.weight", "row", 3, each(4)), ("c.weight", "row", -2, each(4))
    )
    expected = [exchange("a.weight", 4, 5), exchange("c.weight", 4, 5), powers]
    check(SquareTimesCube(), features(), expected)


def test_a_norm_over_groups_takes_away_one_scale_of_each_group():
    model = nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3))
    groups = [[0, 1, 2], [3, 4, 5]]
    expected = [
        exchange("0.weight", 6, 5),
        exchange("2.weight", 3, 6),
        family("normalization", ("0.weight", "row", 1, groups), ("0.bias", "vector", 1, groups)),
        family(
            "multiplicative",
            ("1.weight", "vector", 1, each(6)),
            ("1.bias", "vector", 1, each(6)),
            ("2.weight", "col", -1, each(6)),
        ),
    ]
    check(model, features(), expected)


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 4)

    def forward(self, x):
        return torch.tanh(F.linear(x, F.normalize(self.a.weight, dim=1), self.a.bias))


def test_a_scale_taken_away_by_itself_is_a_symmetry_and_not_unreached():
    expected = [exchange("a.weight", 4, 5), free("a.weight", "row", each(4))]
    symmetries = check(WeightNorm(), features(), expected)
    assert not symmetries.silent


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return F.normalize(self.a(x), dim=-1)


def test_scales_may_all_be_without_effect():
    model = Normalized()
    rows = free("a.weight", "row", whole(4))
    check(model, features(), [exchange("a.weight", 4, 5), rows])
    scalar = free("a.weight", "scalar", whole(1))
    check(model, features(), [scalar], lrm.plan(model, "scalar"))


class Diamond(nn.Module):
    """One vector scales what two branches read."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.left = nn.Linear(5, 4, bias=False)
        self.right = nn.Linear(5, 3, bias=False)
        self.join = nn.Linear(3, 4, bias=False)

    def forward(self, x):
        x = x * self.scale
        return torch.tanh(self.left(x)) + self.join(torch.sigmoid(self.right(x)))


def test_a_scale_that_two_branches_read_trades_with_both():
    reads = [("left.weight", "col", -1, each(5)), ("right.weight", "col", -1, each(5))]
    expected = [
        exchange("left.weight", 4, 5),
        exchange("right.weight", 3, 5),
        exchange("join.weight", 4, 3),
        family("multiplicative", ("scale", "vector", 1, each(5)), *reads),
    ]
    check(Diamond(), features(), expected)


class UsedTwice(nn.Module):
    """Between the two uses every channel must agree with every other."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 5, bias=False)
        self.out = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.out(F.relu(self.shared(F.relu(self.shared(x)))))


def test_a_weight_used_twice_counts_twice():
    twice = family(
        "multiplicative",
        ("shared.weight", "row", 1, whole(5)),
        ("out.weight", "row", -2, whole(3)),
    )
    expected = [exchange("shared.weight", 5, 5), exchange("out.weight", 3, 5), twice]
    check(UsedTwice(), features(), expected)


def test_a_frozen_parameter_holds_what_it_would_trade_with():
    model = mlp(nn.ReLU())
    model[0].bias.requires_grad_(False)
    check(model, features(), EXCHANGES)

    model = mlp(nn.ReLU())
    model[2].weight.requires_grad_(False)
    check(model, features(), EXCHANGES[:1])

    model = Diamond()
    model.left.weight.requires_grad_(False)
    expected = [exchange("right.weight", 3, 5), exchange("join.weight", 4, 3)]
    check(model, features(), expected)


class Experts(nn.Module):
    """One expert for each token, chosen by its number; a stack under names that say nothing."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.first = nn.Parameter(torch.randn(3, 5, 4))
        self.second = nn.Parameter(torch.randn(3, 6, 5))

    def forward(self, ids):
        expert = ids % 3
        hidden = F.relu(torch.einsum("tji,ti->tj", self.first[expert], self.tokens(ids)))
        return torch.einsum("tji,ti->tj", self.second[expert], hidden)


def experts_table(reached: int) -> list[Family]:
    def sets(size: int) -> list[list[int]]:
        return [list(range(size * i, size * (i + 1))) for i in range(reached)]

    def exchanges(name: str, rows: int, cols: int) -> Family:
        return family("exchange", (name, "row", 1, sets(rows)), (name, "col", -1, sets(cols)))

    columns = [[4 * expert + col for expert in range(reached)] for col in range(4)]
    # The tokens of an expert against its rows; that of all experts is made of exchanges.
    tokens = [[expert, expert + 3, expert + 6] for expert in range(1, reached)]
    return [
        exchanges("first", 5, 4),
        exchanges("second", 6, 5),
        exchange("tokens.weight", 9, 4),
        pair("first", "row", each(5 * reached), "second", "col", each(5 * reached)),
        pair("tokens.weight", "col", each(4), "first", "col", columns),
        pair("tokens.weight", "row", tokens, "first", "row", sets(5)[1:]),
    ]


def test_experts_have_symmetries_of_their_own():
    check(Experts(), torch.arange(9), experts_table(3))


# In words


def lines(symmetries: lrm.Symmetries) -> list[tuple[int, str]]:
    """The lines of a summary: how many rescalings, and which."""
    split = [line.strip().partition("  ") for line in symmetries.summary().splitlines()]
    return [(int(count.replace(",", "")), words) for count, _, words in split]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "falcon-h1"])
def test_a_summary_lists_the_same_symmetry_of_all_layers_once_and_counts_them_all(architecture):
    symmetries = find(build(architecture, layers=2), None)
    summary = lines(symmetries)
    unreached = bool(symmetries.silent)
    *each_line, (total, words) = summary[:-1] if unreached else summary
    assert sum(count for count, _ in each_line) == total == symmetries.nullity
    exchanges = sum(s.num_members for s in symmetries if s.kind == "exchange")
    assert each_line[0] == (
        exchanges,
        f"in each of {exchanges} matrices: rows against columns, as a whole (exchange)",
    )
    assert words == f"independent rescalings in all, {total - exchanges} besides exchanges"
    inside = [s for s in symmetries if s.place and s.kind != "exchange"]
    repeated = [words for _, words in each_line if words.startswith("in each of 2 layers: ")]
    assert len(inside) == 2 * len(repeated)
    assert unreached == ("not reached by the inputs" in summary[-1][1])


def test_a_summary_names_scales_by_their_last_words():
    summary = [words for _, words in lines(find(build("llama", layers=2), None))]
    assert (
        "in each of 2 layers: rows of up_proj against columns of down_proj, per channel "
        "(multiplicative)" in summary
    )
    assert (
        "rows of embed_tokens, rows of o_proj in 2 layers and rows of down_proj in 2 layers, "
        "as a whole (normalization)" in summary
    )
    # Two modules may end alike, and the modules of a sequence have numbers alone.
    summary = [words for _, words in lines(find(build("gpt2", layers=2), None))]
    assert any("attn.c_proj" in words and " c_proj" not in words for words in summary)
    summary = [words for _, words in lines(lrm.find_symmetries(mlp(nn.ReLU()), None, features()))]
    assert "rows of 0 and 0.bias against columns of 2, per channel (multiplicative)" in summary


def test_a_block_of_rows_against_another_of_the_same_matrix_is_no_exchange_in_a_summary():
    pytest.importorskip("transformers")
    import families

    summary = lines(lrm.find_symmetries(families.build("phi3"), None))
    assert any("rows of qkv_proj [0:16] against rows of qkv_proj [16:24]" in w for _, w in summary)
    assert summary[0][1].startswith("in each of 10 matrices: ")


def test_a_summary_of_no_symmetries():
    assert lrm.Symmetries((), 0, {}).summary() == "0  independent rescalings in all"


# Names


class _Renamed:
    """Finds attributes of a module by the names its code has for them."""

    def __getattr__(self, name):
        return super().__getattr__(self.__dict__.get("_names", {}).get(name, name))


def renamed(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A copy with random names and order of modules and parameters; also the old names by new."""
    model = copy.deepcopy(model)
    draw = random.Random(11)
    old = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in list(model.modules()):
        names = {}
        ordered = isinstance(module, nn.ModuleList | nn.Sequential)
        for held in (module._parameters, module._modules):
            items = list(held.items())
            if not ordered:
                draw.shuffle(items)
            held.clear()
            for name, value in items:
                names[name] = "".join(draw.choices("bcdfghjklmnp", k=6))
                held[names[name]] = value
        module._names = names
        module.__class__ = type("Shuffled", (_Renamed, type(module)), {})
    return model, {name: old[id(parameter)] for name, parameter in model.named_parameters()}


def translated(families: list[Family], names: dict[str, str]) -> list[Family]:
    return [
        Family(
            f.kind,
            tuple(
                {(names[name], axis, i): p for (name, axis, i), p in member.items()}
                for member in f.members
            ),
        )
        for f in families
    ]


@pytest.mark.parametrize("architecture", ["falcon-h1", "gemma3", "mixtral"])
def test_names_do_not_matter(architecture):
    model, names = renamed(build(architecture))
    assert not any("proj" in name or "norm" in name or "weight" in name for name in names)
    families = families_of(find(model, None))
    assert_same(translated(families, names), table(architecture, None))


def test_names_do_not_matter_to_models_written_by_hand():
    model = Diamond()
    shuffled, names = renamed(model)
    families = families_of(lrm.find_symmetries(shuffled, None, features()))
    assert_same(
        translated(families, names), families_of(lrm.find_symmetries(model, None, features()))
    )


# What the inputs do not reach, and what cannot be asked


def silent(symmetries: lrm.Symmetries) -> dict[tuple[str, str], int]:
    return {(axis.name, axis.kind): count for axis, count in symmetries.silent.items()}


def test_an_expert_without_tokens_is_reported_and_not_called_a_symmetry():
    ids = torch.tensor([0, 1, 3, 4, 6, 7])
    symmetries = check(Experts(), ids, experts_table(2))
    assert silent(symmetries) == {
        ("tokens.weight", "row"): 3,
        ("first", "row"): 5,
        ("first", "col"): 4,
        ("second", "row"): 6,
        ("second", "col"): 5,
    }
    assert str(symmetries).endswith("5 columns of second, 3 rows of tokens")


def test_tokens_that_do_not_occur_scale_with_those_that_do():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
    expected = [
        exchange("0.weight", 6, 4),
        exchange("1.weight", 3, 4),
        pair("0.weight", "col", each(4), "1.weight", "col", each(4)),
    ]
    symmetries = check(model, torch.tensor([5, 0, 3, 2]), expected)
    assert silent(symmetries) == {("0.weight", "row"): 2}


def test_a_padding_token_is_a_token():
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 3))
    assert not lrm.find_symmetries(model, None, torch.arange(6)).silent


def test_attention_to_a_single_token_has_no_queries_and_keys():
    model = build("llama")
    symmetries = lrm.find_symmetries(model, None, token_ids().view(-1, 1))
    q, k = (f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "qk")
    unreached = {(q, "row"): 16, (q, "col"): 8, (k, "row"): 8, (k, "col"): 8}
    assert silent(symmetries) == unreached
    # Without the two exchanges and the four pairs of rows.
    assert symmetries.nullity == NULLITY["llama"][0] - 6
    scales = {name for f in families_of(symmetries) for member in f.members for name, *_ in member}
    assert not {q, k} & scales


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 4)

    def forward(self, x):
        return self.used(x)


def test_a_layer_that_is_not_used_is_reported():
    symmetries = lrm.find_symmetries(Unused(), None, features())
    assert silent(symmetries) == {
        ("unused.weight", "row"): 4,
        ("unused.weight", "col"): 5,
        ("unused.bias", "vector"): 4,
    }
    assert_same(families_of(symmetries), [exchange("used.weight", 3, 5)])


class Returns(nn.Module):
    """A linear layer, and something made of what it gives."""

    def __init__(self, what):
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.what = what

    def forward(self, x):
        return self.what(self.linear(x))


@pytest.mark.parametrize(
    "what",
    [
        lambda y: y.argmax(-1),
        lambda y: y.argmax(),
        lambda y: {"choice": y.argmax(-1)},
        lambda y: (y.argmax(-1), "text"),
        lambda y: None,
    ],
    ids=["numbers", "number", "dict", "tuple", "none"],
)
def test_outputs_without_a_floating_point_tensor_raise(what):
    with pytest.raises(ValueError, match="no floating-point tensor"):
        lrm.find_symmetries(Returns(what), None, features())


@pytest.mark.parametrize(
    "what",
    [lambda y: y, lambda y: {"y": y}, lambda y: (y.argmax(-1), y), lambda y: y.tanh().sum()],
    ids=["tensor", "dict", "tuple", "one number"],
)
def test_outputs_are_found_where_they_are(what):
    symmetries = lrm.find_symmetries(Returns(what), None, features())
    assert_same(families_of(symmetries), [exchange("linear.weight", 4, 5)])


def test_outputs_that_depend_on_no_parameter_raise():
    with pytest.raises(ValueError, match="do not depend on any trained parameter"):
        lrm.find_symmetries(Returns(lambda y: y.detach()), None, features())


def test_a_model_without_trained_parameters_raises():
    for model in (nn.ReLU(), mlp(nn.ReLU()).requires_grad_(False)):
        with pytest.raises(ValueError, match="has no trained parameters"):
            lrm.find_symmetries(model, None, features())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inputs_may_come_in_any_precision_and_form(dtype):
    model = nn.Linear(5, 4).to(dtype)
    x = features().to(dtype)
    for inputs in (x, (x,), {"input": x}):
        assert lrm.find_symmetries(model, None, inputs).nullity == 1


def test_the_model_and_the_random_state_do_not_change():
    model = nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 3)
    ).train()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = lrm.find_symmetries(model, None, features())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model[0].weight.dtype == torch.float32
    assert model.training
    assert model[2].training
    assert model[1].eps == 1e-5
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())
    # The weights do not matter either: they are drawn anew, and always alike.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert str(lrm.find_symmetries(model, None, features())) == str(first)


def test_a_rescaled_copy_is_restored_after_an_error():
    model = ModelCopy(nn.Linear(3, 2), torch.ones(4, 3))
    before = {name: parameter.clone() for name, parameter in model.parameters.items()}
    factors = {Axis("weight", "row"): torch.tensor([2.0, 3.0], dtype=torch.float64)}
    with model.rescaled(factors):
        assert not torch.equal(model.parameters["weight"], before["weight"])
    model.inputs = torch.ones(4, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shapes"), model.rescaled(factors):
        model.outputs()
    assert all(torch.equal(model.parameters[name], value) for name, value in before.items())


def test_symmetries_print_in_words():
    symmetries = lrm.find_symmetries(mlp(Power(2)), None, features())
    assert str(symmetries).splitlines() == [
        "3 symmetries, 6 independent rescalings:",
        "  rows against columns of 0, as a whole (exchange)",
        "  rows against columns of 2, as a whole (exchange)",
        "  rows of 0 and 0.bias against columns of 2 to the power 2, per channel (multiplicative)",
    ]
    assert symmetries[2].exponents == {
        ("0.weight", "row", None): 1.0,
        ("0.bias", "vector", None): 1.0,
        ("2.weight", "col", None): -2.0,
    }


@pytest.mark.parametrize("rules", [[], [lrm.Rule("[qkv]_proj", "per-head")]])
def test_scalars_have_the_same_symmetries_on_either_scale(rules):
    model = build("llama")
    both = [
        lrm.find_symmetries(model, lrm.plan(model, "scalar", rules, scale=scale))
        for scale in ("linear", "log")
    ]
    assert len(both[0]) > 0
    assert [s.exponents for s in both[0]] == [s.exponents for s in both[1]]
