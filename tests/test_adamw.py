"""Both paths are one method: the optimizer path equals autograd and torch's own AdamW."""

import copy
import gc
import weakref

import pytest
import torch

import learnable_multipliers as lrm
from paths import (
    BETAS,
    DECAY,
    DEVICE,
    EPS,
    KINDS,
    MULTIPLIER_DECAY,
    Toy,
    backward,
    compare,
    explicit_run,
    optimizer_run,
    place,
    start,
    toy_plan,
)

LR = 3e-2
SCALE = 0.5


class MasterAdamW(torch.optim.Optimizer):
    """torch's AdamW on float32 copies of what is stored in bfloat16."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.masters = {}
        inner = []
        for group in self.param_groups:
            for p in group["params"]:
                wide = p.dtype == torch.bfloat16
                self.masters[p] = torch.nn.Parameter(p.detach().float()) if wide else p
            kept = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            inner.append({"params": [self.masters[p] for p in group["params"]], **kept})
        self.inner = torch.optim.AdamW(inner, betas=BETAS, eps=EPS)

    @torch.no_grad()
    def step(self):
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        self.inner.step()
        for p, master in self.masters.items():
            p.copy_(master)
            self.state[p] = self.inner.state[master]


def stock(lr=LR):
    def make(model, plan):
        groups = lrm.param_groups(
            model,
            plan,
            weight_decay=DECAY,
            lr=lr,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
        )
        return [MasterAdamW(groups, lr)]

    return make


def ours(max_norm=None, backend="auto", lr=LR, **settings):
    def make(model, plan):
        return lrm.AdamW(
            lrm.param_groups(model, plan, weight_decay=DECAY),
            lr=lr,
            betas=BETAS,
            eps=EPS,
            multiplier_lr_scale=SCALE,
            multiplier_weight_decay=MULTIPLIER_DECAY,
            max_grad_norm=max_norm,
            backend=backend,
            **settings,
        )

    return make


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_path_equals_explicit_path_in_float64(kind, max_norm, micro):
    explicit = explicit_run(kind, torch.float64, stock(), micro=micro, max_norm=max_norm)
    optimized = optimizer_run(kind, torch.float64, ours(max_norm), micro=micro)
    compared = compare(explicit, optimized, ("exp_avg", "exp_avg_sq"), rtol=1e-10, atol=1e-10)
    assert {"exp_avg", "exp_avg_sq"} <= compared
    assert any(name.endswith("_exp_avg") for name in compared)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_with_multipliers_is_torch_s_over_all_parameters(kind):
    settings = {"max_norm": 0.3, "clip_multipliers": True}
    explicit = explicit_run(kind, torch.float64, stock(), **settings)
    optimized = optimizer_run(kind, torch.float64, ours(**settings))
    compare(explicit, optimized, ("exp_avg", "exp_avg_sq"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_path_equals_explicit_path_in_float32(kind, max_norm):
    # Adam divides by the root of a squared gradient: what is near zero turns rounding into steps
    # of full size. A learning rate of everyday size keeps those apart from real differences.
    explicit = explicit_run(kind, torch.float32, stock(1e-4), max_norm=max_norm)
    optimized = optimizer_run(kind, torch.float32, ours(max_norm, lr=1e-4))
    compare(explicit, optimized, ("exp_avg", "exp_avg_sq"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("kind", ["scalar", "row+col", "blocks"])
def test_optimizer_path_equals_explicit_path_under_bfloat16(kind, micro):
    """Gradients of a bfloat16 weight are bfloat16: sums over micro-batches round differently.

    Three steps: a weight whose rounding flips to the other neighbour moves by 2^-8 of itself.
    """
    explicit = explicit_run(kind, torch.bfloat16, stock(1e-3), micro=micro, steps=3)
    optimized = optimizer_run(kind, torch.bfloat16, ours(lr=1e-3), micro=micro, steps=3)
    tolerance = {"rtol": 2e-2, "atol": 5e-3} if micro > 1 else {"rtol": 1e-2, "atol": 1e-3}
    compare(explicit, optimized, ("exp_avg", "exp_avg_sq"), **tolerance)


def toy_run(dtype=torch.float32, kind="row+col", make=None, **kwargs):
    torch.manual_seed(0)
    model = Toy().to(DEVICE, dtype)
    plan = toy_plan(model, kind)
    optimizer = make(model, plan) if make else ours(**kwargs)(model, plan)
    return model, optimizer


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(step))
        backward(model, ids)
        optimizer.step()
        optimizer.zero_grad()


def with_gradients(make):
    """Return model and optimizer with gradients, and what three clip norms they have.

    They are those of raw gradients, of these with the multipliers', and of effective weights'.
    """
    torch.manual_seed(0)
    model, plan, values = start("row+col", torch.float64)
    optimizer = make(model, plan)
    place(optimizer, model, values)
    backward(model, torch.randint(0, 13, (2, 7)))
    raw, with_multipliers, effective = [], [], []
    for entry in plan.entries:
        p = model.get_parameter(entry.name)
        if p.grad is None:
            continue
        effective.append(p.grad)
        if entry.carries:
            raw_grad, grads = lrm.split_gradient(
                entry.matrix, optimizer.state[p]["raw"], values[entry.name], p.grad
            )
            raw.append(raw_grad)
            with_multipliers += [raw_grad, *grads.values()]
        else:
            raw.append(p.grad)
            with_multipliers.append(p.grad)
    norms = [torch.nn.utils.get_total_norm(g) for g in (raw, with_multipliers, effective)]
    return model, optimizer, norms


def test_clip_norm_is_that_of_the_raw_gradients_without_multipliers():
    model, optimizer, norms = with_gradients(ours(max_norm=1.0))
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norms[0], rtol=1e-12, atol=0)
    assert abs(norms[1] / norms[0] - 1) > 1e-3
    assert abs(norms[2] / norms[0] - 1) > 1e-3
    assert all(torch.equal(model.get_parameter(n).grad, g) for n, g in before.items())


def wrapped(model, plan, **settings):
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return lrm.LearnableMultipliers(inner, model, plan, **settings)


def muon(model, plan, **settings):
    return lrm.Muon(lrm.param_groups(model, plan), lr=LR, **settings)


def adamw(model, plan, **settings):
    return lrm.AdamW.from_model(model, plan, lr=LR, **settings)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("make", [adamw, muon, wrapped])
def test_every_optimizer_counts_multipliers_if_clip_multipliers_says_so(make, counted):
    def build(model, plan):
        return make(model, plan, max_grad_norm=1.0, clip_multipliers=counted)

    model, optimizer, norms = with_gradients(build)
    exact = {"rtol": 1e-12, "atol": 0}
    # No limit: the gradients stay as they are.
    for choice, norm in ((None, norms[counted]), (False, norms[0]), (True, norms[1])):
        actual = lrm.clip_grad_norm_(optimizer, 1e9, clip_multipliers=choice)
        torch.testing.assert_close(actual, norm, **exact)
    assert copy.deepcopy(optimizer).clip_multipliers == counted
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, norms[counted], **exact)


@pytest.mark.parametrize("counted", [False, True])
def test_clipping_by_hand_equals_clipping_inside(counted):
    model, optimizer = toy_run(torch.float64, max_norm=0.2, clip_multipliers=counted)
    train(model, optimizer, 4)
    other, by_hand = toy_run(torch.float64)
    for step in range(4):
        ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(step))
        backward(other, ids)
        norm = lrm.clip_grad_norm_(by_hand, 0.2, clip_multipliers=counted)
        by_hand.step()
        by_hand.zero_grad()
    torch.testing.assert_close(norm, optimizer.grad_norm)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["row+col", "scalar", "log", "blocks"])
@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_run_continues_bit_for_bit(dtype, optimizer_class, kind, tmp_path):
    def make(model, plan):
        return optimizer_class(lrm.param_groups(model, plan), lr=1e-2, max_grad_norm=1.0)

    straight, optimizer = toy_run(dtype, kind, make)
    train(straight, optimizer, 8)

    model, optimizer = toy_run(dtype, kind, make)
    train(model, optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    model, optimizer = toy_run(dtype, kind, make)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for state in optimizer.state.values():
        for name, value in state.items():
            assert value.dtype == torch.float32, name
    train(model, optimizer, 4, first=4)
    for p, q in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    for name, values in lrm.multipliers(optimizer).items():
        assert all(value.dtype == torch.float32 for value in values.values()), name


@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_step_without_rate_and_gradient_changes_nothing(optimizer_class):
    def make(model, plan):
        return optimizer_class(lrm.param_groups(model, plan), lr=1e-2)

    model, optimizer = toy_run(make=make)
    train(model, optimizer, 3)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key])
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1]["state"][i][key]), key


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["qkv.weight", "norm.weight", "head.weight", "mix"])
def test_gradients_that_are_not_finite_skip_the_step_and_are_counted(name, poison):
    model, optimizer = toy_run(max_norm=1.0)
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model, torch.randint(0, 13, (2, 7)))
    model.get_parameter(name).grad.view(-1)[1] = poison
    optimizer.step()
    assert optimizer.num_skipped == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key])
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1]["state"][i][key]), key
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert optimizer.num_skipped == 1
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("schedule", ["lambda", "one-cycle"])
def test_schedulers_move_raw_weights_and_multipliers_alike(schedule):
    """A rate that is halved halves the very next step of both."""
    model, optimizer = toy_run(torch.float64)
    if schedule == "lambda":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=10)
    train(model, optimizer, 1)
    scheduler.step()
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1
    lr = rates.pop()
    p = model.qkv.weight
    state = optimizer.state[p]
    raw, row = state["raw"].clone(), state["row"].clone()
    betas = optimizer.param_groups[0]["betas"]
    backward(model, torch.randint(0, 13, (2, 7)))
    optimizer.step()
    for key, before, rate, decay in (
        ("", raw, lr, DECAY),
        ("row_", row, lr * SCALE, MULTIPLIER_DECAY),
    ):
        step = state["step"].double()
        bias1, bias2 = 1 - betas[0] ** step, 1 - betas[1] ** step
        moment, square = state[f"{key}exp_avg"], state[f"{key}exp_avg_sq"]
        update = moment / bias1 / ((square / bias2).sqrt() + EPS)
        expected = before * (1 - rate * decay) - rate * update
        after = state["raw"] if key == "" else state["row"]
        torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-12)


def outside_writes(model):
    weight = model.qkv.weight
    other = torch.randn_like(weight)

    def load():
        state = model.state_dict()
        state["qkv.weight"] = other
        model.load_state_dict(state)

    def swap():
        weight.data, other.data = other.data, weight.data

    def swap_in_place():
        keep = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(other)
        other.copy_(keep)

    def data_copy():
        weight.data.copy_(other)

    def one_row():
        weight.data[3] = 0.5

    def one_column():
        weight.data[:, 2] = 0.5

    return {f.__name__: f for f in (load, swap, swap_in_place, data_copy, one_row, one_column)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", list(outside_writes(Toy())))
def test_write_from_outside_raises_and_can_be_adopted(write, dtype):
    model, optimizer = toy_run(dtype)
    train(model, optimizer, 2)
    outside_writes(model)[write]()
    written = model.qkv.weight.detach().clone()
    # On a GPU a write through `.data` is detected on the device, and raises at the next step.
    with pytest.raises(RuntimeError, match=r"qkv.weight was changed .*opt.sync_from_model_\(\)"):
        train(model, optimizer, 1 if DEVICE == "cpu" else 2)
    assert torch.equal(model.qkv.weight.detach(), written)
    optimizer.zero_grad()
    optimizer.sync_from_model_()
    torch.testing.assert_close(model.qkv.weight.detach(), written, rtol=1e-6, atol=1e-6)
    train(model, optimizer, 2)
    assert (model.qkv.weight - written).abs().max() < 0.2  # two steps away, not thrown back


def test_swapping_an_average_in_and_out_again_is_fine():
    model, optimizer = toy_run()
    train(model, optimizer, 2)
    average = [torch.randn_like(p) for p in model.parameters()]
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), average)
        torch._foreach_copy_(list(model.parameters()), kept)
    train(model, optimizer, 1)


def test_sync_restarts_a_multiplier_that_is_zero():
    model, plan, values = start("row+col", torch.float64)
    optimizer = ours()(model, plan)
    place(optimizer, model, values)
    assert (optimizer.state[model.qkv.weight]["row"] == 0).any()
    with torch.no_grad():
        model.qkv.weight.fill_(0.25)
    optimizer.sync_from_model_()
    assert (model.qkv.weight == 0.25).all()
    assert (lrm.multipliers(optimizer)["qkv.weight"]["row"] == 1).all()


def test_initial_values_start_the_optimizer_path_without_changing_the_model():
    torch.manual_seed(0)
    model = Toy().to(DEVICE).double()
    plan = lrm.plan(model, "full", [lrm.Rule("qkv.weight", "row", init=0.25)])
    before = model.qkv.weight.detach().clone()
    optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=1e-2)
    assert (lrm.multipliers(optimizer)["qkv.weight"]["row"] == 0.25).all()
    torch.testing.assert_close(optimizer.state[model.qkv.weight]["raw"], before / 0.25)
    assert torch.equal(model.qkv.weight.detach(), before)


def test_plain_parameters_train_as_with_torch():
    torch.manual_seed(0)
    models = [Toy().to(DEVICE).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, cls in zip(models, (lrm.AdamW, torch.optim.AdamW), strict=True):
        plan = lrm.plan(model, "none")
        groups = lrm.param_groups(model, plan, weight_decay=0.1)
        optimizer = cls(groups, lr=1e-2, betas=BETAS)
        train(model, optimizer, 5)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


def test_gradscaler_and_accumulation_work_as_with_any_optimizer():
    model, optimizer = toy_run()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    other, expected = toy_run()
    for step in range(3):
        ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(step))
        ids = ids.to(DEVICE)
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(other, expected, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_wrong_settings_raise():
    model = Toy().to(DEVICE)
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        lrm.AdamW.from_model(model, "none", max_grad_norm=0.0)
    with pytest.raises(ValueError, match="weight_decay must be a number of at least 0"):
        lrm.AdamW.from_model(model, "none", weight_decay=-1.0)
    optimizer = lrm.AdamW.from_model(model, "none", backend="fastest")
    backward(model, torch.randint(0, 13, (2, 7)))
    with pytest.raises(ValueError, match="unknown backend 'fastest'"):
        optimizer.step()
    flat = lrm.param_groups(model, toy_plan(model, "row"))
    model.qkv.weight.data = model.qkv.weight.data.flatten()
    with pytest.raises(ValueError, match="flattened parameters"):
        lrm.AdamW(flat).step()


@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_copy_of_model_and_optimizer_trains_by_itself(optimizer_class):
    def make(model, plan):
        return optimizer_class(lrm.param_groups(model, plan), lr=1e-2, max_grad_norm=0.3)

    model, optimizer = toy_run(make=make)
    train(model, optimizer, 2)
    clone, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, first=2)
    train(clone, copied, 2, first=2)
    for p, q in zip(model.parameters(), clone.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p is not q


def test_group_added_later_keeps_the_state_of_others():
    model, optimizer = toy_run()
    train(model, optimizer, 3)
    before = {k: v.clone() for k, v in optimizer.state[model.qkv.weight].items()}
    extra = torch.nn.Parameter(torch.zeros(3, device=DEVICE))
    optimizer.add_param_group({"params": [("extra", extra)]})
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    assert (extra < 0).all()
    for key, value in optimizer.state[model.qkv.weight].items():
        assert torch.equal(value, before[key]), key


def test_many_sets_of_parameters_with_gradients_keep_their_own_counts():
    """Mixtures leave parameters without gradients; each counts its own steps."""
    model, optimizer = toy_run(torch.float64)
    generator = torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    counts = dict.fromkeys(trained, 0)
    for _ in range(40):
        for p in trained:
            has = torch.rand((), generator=generator) < 0.5
            p.grad = torch.ones_like(p) if has else None
            counts[p] += int(has)
        optimizer.step()
    for p in trained:
        assert optimizer.state[p]["step"].item() == counts[p]


def plain(parameters, **settings):
    return lrm.AdamW.from_model(torch.nn.ParameterList(parameters), "none", **settings)


def test_empty_and_single_numbers_are_trained_like_any_other():
    empty = torch.nn.Parameter(torch.zeros(0, 3, device=DEVICE))
    single = torch.nn.Parameter(torch.tensor(2.0, device=DEVICE))
    optimizer = plain([empty, single], lr=0.1, weight_decay=0.0)
    empty.grad, single.grad = torch.zeros_like(empty), torch.ones_like(single)
    optimizer.step()
    torch.testing.assert_close(single.detach().cpu(), torch.tensor(1.9))


@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_every_parameter_still_trains_after_its_storage_moved(optimizer_class):
    def make(model, plan):
        return optimizer_class(lrm.param_groups(model, plan), lr=1e-2)

    straight, optimizer = toy_run(make=make)
    train(straight, optimizer, 4)
    model, optimizer = toy_run(make=make)
    train(model, optimizer, 2)
    for p in model.parameters():
        p.data = p.data.clone()
    train(model, optimizer, 2, first=2)
    for p, q in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_parameters_without_multipliers_survive_a_sync():
    model, optimizer = toy_run()
    train(model, optimizer, 2)
    model.norm.weight.data = torch.full_like(model.norm.weight, 2.0)
    optimizer.sync_from_model_()
    train(model, optimizer, 1)
    assert (model.norm.weight != 2.0).any()
    assert "raw" not in optimizer.state[model.norm.weight]


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_values_that_do_not_divide_exactly(dtype, scale):
    torch.manual_seed(0)
    model = Toy().to(DEVICE, dtype)
    before = model.qkv.weight.detach().clone()
    plan = lrm.plan(model, "full", [lrm.Rule("qkv.weight", "row", init=0.3, scale=scale)])
    optimizer = lrm.AdamW(lrm.param_groups(model, plan), lr=0.0)
    lrm.multipliers(optimizer)
    torch.testing.assert_close(model.qkv.weight.detach(), before, rtol=1e-2, atol=1e-6)
    train(model, optimizer, 3)


def test_large_master_copies_are_sampled_within_their_bounds():
    weight = torch.nn.Parameter(torch.zeros(4097, 4096, dtype=torch.bfloat16, device=DEVICE))
    optimizer = plain([weight], lr=1e-3)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()


@pytest.mark.parametrize("optimizer_class", [lrm.AdamW, lrm.Muon])
def test_no_gradient_outlives_its_step(optimizer_class):
    def make(model, plan):
        return optimizer_class(lrm.param_groups(model, plan), lr=1e-2)

    model, optimizer = toy_run(make=make)
    backward(model, torch.randint(0, 13, (2, 7)))
    alive = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_state_that_was_replaced_is_used():
    """Offloading moves state out and in again: other tensors, the same numbers."""
    straight, optimizer = toy_run()
    train(straight, optimizer, 4)
    model, optimizer = toy_run()
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        for key in state:
            state[key] = state[key].clone()
    train(model, optimizer, 2, first=2)
    for p, q in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[model.qkv.weight]["step"] == 4


def test_clipping_by_hand_scales_gradients_of_any_layout():
    model, optimizer = toy_run()
    backward(model, torch.randint(0, 13, (2, 7)))
    model.qkv.weight.grad = model.qkv.weight.grad.t().contiguous().t()
    lrm.clip_grad_norm_(optimizer, 1e-3)
    norm = lrm.clip_grad_norm_(optimizer, 1e9)
    torch.testing.assert_close(norm.cpu(), torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_hooks_on_loading_take_effect():
    model, optimizer = toy_run()
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())

    def later(_, state):
        state = copy.deepcopy(state)
        for kept in state["state"].values():
            kept["step"] = torch.tensor(77.0)
        return state

    optimizer.register_load_state_dict_pre_hook(later)
    optimizer.load_state_dict(saved)
    assert optimizer.state[model.qkv.weight]["step"] == 77


@pytest.mark.parametrize(
    ("other", "message"),
    [(2, "is of format 2, and only format 3 is read"), (None, "has no format number")],
)
def test_state_of_another_format_raises_before_anything_changes(other, message):
    model, optimizer = toy_run()
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert [group["format"] for group in saved["param_groups"]] == [3] * len(saved["param_groups"])
    for group in saved["param_groups"]:
        group["lr"] = 7.0
        group.pop("format")
        if other is not None:
            group["format"] = other
    kept = optimizer.state[model.qkv.weight]["raw"]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.state[model.qkv.weight]["raw"] is kept
    assert optimizer.param_groups[0]["lr"] != 7.0


def test_state_from_another_plan_raises():
    model, optimizer = toy_run(kind="row")
    train(model, optimizer, 2)
    other, another = toy_run(kind="col")
    train(other, another, 1)
    kept = another.state[other.qkv.weight]["col"].clone()
    with pytest.raises(ValueError, match=r"saved under another plan, which differs at \w+"):
        another.load_state_dict(optimizer.state_dict())
    assert torch.equal(another.state[other.qkv.weight]["col"], kept)
