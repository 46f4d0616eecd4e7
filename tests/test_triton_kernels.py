"""The Triton kernels against the reference, number by number.

On a CUDA device they run as compiled; elsewhere through Triton's interpreter, which must be
chosen before Triton is imported: `TRITON_INTERPRET=1 pytest tests/test_triton_kernels.py`.
"""

import pytest
import torch

import learnable_multipliers as lrm
from paths import DEVICE, INTERPRETED, KINDS, Toy, backward, optimizer_run, toy_plan

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a CUDA device, or TRITON_INTERPRET=1 in a process of its own",
    ),
    # The interpreter computes with numpy, also in lanes whose result is never stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
pytest.importorskip("triton")


def make(optimizer_class, backend, **settings):
    def build(model, plan):
        groups = lrm.param_groups(model, plan)
        return optimizer_class(groups, lr=1e-3, backend=backend, **settings)

    return build


def both(optimizer_class, kind, dtype=torch.float32, steps=3, **settings):
    runs = []
    for backend in ("torch", "triton"):
        build = make(optimizer_class, backend, **settings)
        model, _, optimizer = optimizer_run(kind, dtype, build, steps=steps)
        runs.append((model, optimizer))
    return runs


def assert_same(runs, **tolerance):
    (model, optimizer), (other, twin) = runs
    for name, p in model.named_parameters():
        q = other.get_parameter(name)
        torch.testing.assert_close(q, p, msg=lambda m, n=name: f"{n}: {m}", **tolerance)
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(
                twin.state[q][key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}", **tolerance
            )
    torch.testing.assert_close(twin.grad_norm, optimizer.grad_norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_triton_equals_the_reference(optimizer_class, kind, max_norm):
    runs = both(optimizer_class, kind, max_grad_norm=max_norm)
    loose = optimizer_class is lrm.Muon and DEVICE == "cuda"
    assert_same(runs, rtol=1e-2 if loose else 1e-4, atol=1e-3 if loose else 1e-5)


@pytest.mark.parametrize("kind", ["row+col", "log scalar", "blocks"])
def test_clip_norms_with_multipliers_are_those_of_the_reference(kind):
    runs = both(lrm.AdamW, kind, max_grad_norm=0.3, clip_multipliers=True)
    assert_same(runs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off instead of rounding")
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_triton_equals_the_reference_under_bfloat16(optimizer_class):
    runs = both(optimizer_class, "row+col", torch.bfloat16, steps=2, max_grad_norm=1.0)
    assert_same(runs, rtol=1e-2, atol=1e-3)


class Awkward(torch.nn.Module):
    """Shapes that leave tiles ragged."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(199, 37)
        self.line = torch.nn.Linear(70, 1, bias=False)
        self.column = torch.nn.Linear(1, 70, bias=False)
        self.stack = torch.nn.Parameter(torch.randn(3, 67, 5))
        self.odd = torch.nn.Parameter(torch.randn(1030))


@pytest.mark.parametrize("kind", ["row+col", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_ragged_tiles(optimizer_class, nesterov, kind):
    settings = {"nesterov": nesterov} if optimizer_class is lrm.Muon else {}
    runs = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        model = Awkward().to(DEVICE)
        rules = [lrm.Rule("stack", kind, role="down"), lrm.Rule(r"wide|line|column", kind)]
        plan = lrm.plan(model, "full", rules)
        optimizer = make(optimizer_class, backend, **settings)(model, plan)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                # Gradients that are not contiguous are as good as any.
                grad = torch.randn(*p.shape[::-1], generator=generator)
                p.grad = grad.permute(*reversed(range(p.ndim))).to(DEVICE)
            optimizer.step()
        runs.append((model, optimizer))
    if optimizer_class is lrm.Muon:
        assert runs[1][1].state[runs[1][0].stack]["mean_sq"] > 0
    # Newton-Schulz in bfloat16 turns the last bit of its input into more than that.
    loose = optimizer_class is lrm.Muon and DEVICE == "cuda"
    assert_same(runs, rtol=1e-2 if loose else 1e-4, atol=1e-3 if loose else 1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_bad_gradient_changes_nothing_without_asking_the_host(optimizer_class, poison):
    torch.manual_seed(0)
    model = Toy().to(DEVICE)
    optimizer = make(optimizer_class, "triton", max_grad_norm=1.0)(
        model, toy_plan(model, "row+col")
    )
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, torch.randint(0, 13, (2, 7)))
        if step == 1:
            model.out.weight.grad[2, 1] = poison
        optimizer.step()
        optimizer.zero_grad()
        unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert unchanged == (step == 1)
    assert optimizer.num_skipped == 1
    steps = {state["step"].item() for state in optimizer.state.values()}
    assert steps == {0.0, 2.0}  # `unused` never had a gradient


def test_write_through_data_stops_the_optimizer_before_it_is_lost():
    torch.manual_seed(0)
    model = Toy().to(DEVICE)
    optimizer = make(lrm.AdamW, "triton")(model, toy_plan(model, "row+col"))
    backward(model, torch.randint(0, 13, (2, 7)))
    optimizer.step()
    model.out.weight.data[1] = 0.5
    optimizer.step()
    assert (model.out.weight[1] == 0.5).all()
    with pytest.raises(RuntimeError, match="out.weight was changed since the last step"):
        optimizer.step()
    optimizer.sync_from_model_()
    optimizer.step()
    assert (model.out.weight[1] - 0.5).abs().max() < 0.1


def test_two_runs_are_the_same_bit_for_bit():
    runs = [both(lrm.AdamW, "row+col", max_grad_norm=0.3)[1][0] for _ in range(2)]
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_float64_is_refused_by_name_and_served_by_auto():
    model = Toy().to(DEVICE).double()
    plan = toy_plan(model, "row+col")
    backward(model, torch.randint(0, 13, (2, 7)))
    with pytest.raises(ValueError, match="use backend='torch' for float64"):
        make(lrm.AdamW, "triton")(model, plan).step()
    make(lrm.AdamW, "auto")(model, plan).step()


def test_weights_put_back_let_training_go_on():
    torch.manual_seed(0)
    model = Toy().to(DEVICE)
    optimizer = make(lrm.AdamW, "triton")(model, toy_plan(model, "row+col"))
    backward(model, torch.randint(0, 13, (2, 7)))
    optimizer.step()
    kept = model.out.weight.detach().clone()
    model.out.weight.data[1] = 0.5
    optimizer.step()
    with pytest.raises(RuntimeError, match="out.weight was changed"):
        optimizer.step()
    model.out.weight.data.copy_(kept)
    optimizer.step()
    optimizer.step()
    assert (model.out.weight != kept).any()


def test_gradients_that_start_anywhere_are_as_good_as_any():
    """A bucket of gradients hands out views at any offset."""
    runs = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 48).to(DEVICE)
        optimizer = make(lrm.AdamW, backend)(model, lrm.plan(model, "full"))
        for _ in range(2):
            bucket = torch.randn(3 + 48 * 32 + 48, generator=torch.Generator().manual_seed(1))
            bucket = bucket.to(DEVICE)
            model.weight.grad = bucket[3 : 3 + 48 * 32].view(48, 32)
            model.bias.grad = bucket[3 + 48 * 32 :]
            optimizer.step()
        runs.append((model, optimizer))
    assert_same(runs, rtol=1e-4, atol=1e-5)
