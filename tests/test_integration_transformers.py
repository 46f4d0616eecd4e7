"""Trainer, SFTTrainer and PEFT train what a plain loop trains, bit for bit."""

import json
import math
from functools import partial

import pytest
import torch

import learnable_multipliers as lrm

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

integration = pytest.importorskip("learnable_multipliers.integrations.transformers")

LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM
Trainer, TrainingArguments = transformers.Trainer, transformers.TrainingArguments
MultiplierCallback, OptimizerFactory = integration.MultiplierCallback, integration.OptimizerFactory
STEPS, BATCH, LENGTH = 6, 4, 12
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "max_grad_norm": 0.5}


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def batches(steps=STEPS):
    ids = torch.randint(2, 32, (steps, BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return list(ids)


def dataset(steps=STEPS):
    return [{"input_ids": row, "labels": row} for batch in batches(steps) for row in batch]


def arguments(folder, **changed):
    settings = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": SETTINGS["lr"],
        "weight_decay": SETTINGS["weight_decay"],
        "adam_beta2": SETTINGS["betas"][1],
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(str(folder), **{**settings, **changed})


def make_trainer(args, model=None, trainer=Trainer, callback=True, **settings):
    kwargs = {"training_args": args, "max_grad_norm": SETTINGS["max_grad_norm"], **settings}
    made = trainer(
        model=model or tiny(),
        args=args,
        train_dataset=dataset(),
        eval_dataset=dataset(1),
        optimizer_cls_and_kwargs=(OptimizerFactory, kwargs),
    )
    if callback:
        MultiplierCallback().attach(made)
    return made


def model_loss(model, batch, tokens):
    return model(batch, labels=batch, num_items_in_batch=tokens).loss


def plain_loop(make=lrm.AdamW.from_model, model=None, loss=model_loss, **settings):
    """Return model, optimizer, raw norms and health after a loop in plain torch."""
    model = model or tiny()
    optimizer = make(model, **{**SETTINGS, **settings})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    monitor, norms, healths = lrm.Monitor(optimizer), [], []
    for batch in batches():
        # As Trainer computes it: a sum over tokens, divided by their number.
        loss(model, batch, torch.tensor(BATCH * (LENGTH - 1))).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
        schedule.step()
        healths.append(monitor.health().metrics())
        model.zero_grad()
    return model, optimizer, norms, healths


def assert_same(model, optimizer, other, expected):
    """Weights, raw weights and multipliers of two runs are equal bit for bit."""
    for (name, weight), there in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, there), name
    raw, there = lrm.unwrap(optimizer).raw_weights(), lrm.unwrap(expected).raw_weights()
    for name, by_part in lrm.multipliers(expected).items():
        assert torch.equal(raw[name], there[name]), name
        for part, values in by_part.items():
            assert torch.equal(lrm.multipliers(optimizer)[name][part], values), (name, part)


def training_logs(trainer):
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", torch.optim.AdamW])
def test_trainer_trains_as_a_plain_loop(tmp_path, optimizer):
    trainer = make_trainer(arguments(tmp_path), optimizer=optimizer)
    trainer.train()
    make = {
        "adamw": lrm.AdamW.from_model,
        "muon": lrm.Muon.from_model,
        torch.optim.AdamW: lambda model, **settings: lrm.LearnableMultipliers.from_model(
            torch.optim.AdamW, model, **settings
        ),
    }[optimizer]
    model, expected, norms, healths = plain_loop(make)
    assert_same(trainer.model, trainer.optimizer, model, expected)
    logs = training_logs(trainer)
    # Clips the raw norm, which is not the one that Trainer logs.
    assert min(norms) > SETTINGS["max_grad_norm"]
    assert [record["raw_grad_norm"] for record in logs] == norms
    assert logs[-1]["grad_norm"] != pytest.approx(norms[-1], rel=1e-4)
    for record, health in zip(logs, healths, strict=True):
        assert {name: record[name] for name in health} == health
        assert record["skipped_steps"] == 0


def test_gradients_are_accumulated_as_trainer_does(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trainer = make_trainer(args)
    trainer.train()
    _, expected, *_ = plain_loop()
    for name, by_part in lrm.multipliers(expected).items():
        for part, values in by_part.items():
            torch.testing.assert_close(lrm.multipliers(trainer.optimizer)[name][part], values)


class KillError(Exception):
    pass


class Kill(transformers.TrainerCallback):
    """Ends training in the middle, after a step that no checkpoint has."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KillError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer_resumes_bit_for_bit_with_its_monitor(tmp_path, dtype):
    whole = make_trainer(arguments(tmp_path / "whole"), tiny().to(dtype))
    whole.train()

    args = {"save_strategy": "steps", "save_steps": 3}
    killed = make_trainer(arguments(tmp_path / "run", **args), tiny().to(dtype))
    killed.add_callback(Kill())
    with pytest.raises(KillError):
        killed.train()
    resumed = make_trainer(arguments(tmp_path / "run", **args), tiny().to(dtype))
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed.model, resumed.optimizer, whole.model, whole.optimizer)
    for record, other in zip(training_logs(whole), training_logs(resumed), strict=True):
        assert record == other
    monitors = [trainer.callback_handler.callbacks[0].monitor for trainer in (whole, resumed)]
    assert monitors[0].state_dict() == monitors[1].state_dict()
    # A run that had no callback is followed from where it is.
    bare = make_trainer(arguments(tmp_path / "bare", **args), callback=False)
    bare.add_callback(Kill())
    with pytest.raises(KillError):
        bare.train()
    joined = make_trainer(arguments(tmp_path / "bare", **args))
    joined.train(resume_from_checkpoint=True)
    saved = json.loads((tmp_path / "bare/checkpoint-6/trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["MultiplierCallback"]["attributes"]["seen"]["before"] == 3


def test_health_reaches_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = make_trainer(arguments(tmp_path, report_to="tensorboard"))
    trainer.train()
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    for name in ("multipliers/largest", "free/multipliers", "raw_grad_norm"):
        written = [event.value for event in events.Scalars(f"train/{name}")]
        assert written == pytest.approx([record[name] for record in training_logs(trainer)])


def test_a_callback_behind_trackers_warns(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    args = arguments(tmp_path, report_to="tensorboard", max_steps=1)
    trainer = make_trainer(args, callback=False)
    trainer.add_callback(MultiplierCallback())
    with pytest.warns(UserWarning, match=r"tensorboard sees every log before.*attach\(trainer\)"):
        trainer.train()
    assert "multipliers/largest" in training_logs(trainer)[0]


def test_the_class_without_the_factory_raises(tmp_path):
    """Trainer's own groups carry no plan."""
    trainer = Trainer(
        model=tiny(),
        args=arguments(tmp_path),
        train_dataset=dataset(),
        optimizer_cls_and_kwargs=(lrm.AdamW, {"lr": 1e-2}),
    )
    with pytest.raises(ValueError, match=r"use lrm\.AdamW\.from_model\(model\)"):
        trainer.train()


def test_clipping_by_trainer_warns(tmp_path):
    args = arguments(tmp_path, max_grad_norm=1.0, max_steps=1)
    with pytest.warns(UserWarning, match="set max_grad_norm=0"):
        OptimizerFactory()(tiny(), training_args=args)
    trainer = make_trainer(args, training_args=None, lr=1e-3)
    with pytest.warns(UserWarning, match="set max_grad_norm=0"):
        trainer.train()


def test_settings_come_from_the_training_arguments_unless_given(tmp_path):
    args = arguments(tmp_path)
    # axolotl gives the arguments by position.
    optimizer = OptimizerFactory()(tiny(), args, lr=2e-3, placement="scalar")
    assert optimizer.plan.placement == "scalar"
    matrices = next(group for group in optimizer.param_groups if group["kind"] == "matrix")
    given = {name: matrices[name] for name in ("lr", "weight_decay", "betas", "eps")}
    assert given == {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    sgd = OptimizerFactory()(tiny(), args, optimizer=torch.optim.SGD, momentum=0.9)
    assert isinstance(sgd.inner, torch.optim.SGD)
    assert {group["lr"] for group in sgd.param_groups} == {1e-2}
    with pytest.raises(ValueError, match="its learning rate would not count"):
        OptimizerFactory()(tiny())
    plan = lrm.plan(tiny())
    with pytest.raises(ValueError, match="train is for making a plan"):
        OptimizerFactory()(tiny(), args, placement=plan, train="multipliers")
    with pytest.raises(ValueError, match="choose from 'adamw', 'muon'"):
        OptimizerFactory()(tiny(), args, optimizer="lion")
    with pytest.raises(ValueError, match="choose from 'adamw', 'muon'"):
        OptimizerFactory()(tiny(), args, optimizer=partial(torch.optim.SGD, momentum=0.9))


@pytest.mark.parametrize("name", ["embedding_lr", "lr_groups", "loraplus_lr_ratio"])
def test_learning_rates_of_axolotl_that_would_have_no_effect_raise(tmp_path, name):
    args = arguments(tmp_path)
    setattr(args, name, 1e-2)
    with pytest.raises(ValueError, match=f"{name} would have no effect.*lr_scale"):
        OptimizerFactory()(tiny(), args)


def test_trainer_trains_adafactor_whose_eps_is_a_pair(tmp_path):
    args = arguments(tmp_path, max_steps=2, lr_scheduler_type="constant", adam_epsilon=1e-7)
    trainer = make_trainer(args, optimizer=torch.optim.Adafactor)
    trainer.train()
    model = tiny()
    settings = {name: SETTINGS[name] for name in ("lr", "weight_decay", "max_grad_norm")}
    expected = lrm.LearnableMultipliers.from_model(torch.optim.Adafactor, model, **settings)
    for batch in batches(2):
        model_loss(model, batch, torch.tensor(BATCH * (LENGTH - 1))).backward()
        expected.step()
        model.zero_grad()
    assert_same(trainer.model, trainer.optimizer, model, expected)
    assert lrm.unwrap(trainer.optimizer).param_groups[0]["eps"] == (None, 1e-3)


class Elsewhere(torch.optim.SGD):
    """Names betas and eps that are not Adam's."""

    def __init__(self, params, lr=1e-2, betas=(0.98, 0.92, 0.99), eps=None):
        super().__init__(params, lr)
        self.given = betas, eps


class Alike(Elsewhere):
    def __init__(self, params, lr=1e-2, *, betas=(0.5, 0.5), eps=1):
        super().__init__(params, lr, betas, eps)


def test_betas_and_eps_come_from_the_training_arguments_where_they_are_of_that_form(tmp_path):
    args = arguments(tmp_path, adam_epsilon=1e-7)
    other = OptimizerFactory()(tiny(), args, optimizer=Elsewhere)
    assert other.inner.given == ((0.98, 0.92, 0.99), None)
    alike = OptimizerFactory()(tiny(), args, optimizer=Alike)
    assert alike.inner.given == ((0.9, 0.99), 1e-7)


def test_a_class_that_does_not_name_its_settings_raises_without_them(tmp_path):
    class Quiet(torch.optim.SGD):
        def __init__(self, params, **settings):
            super().__init__(params, **settings)

    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="Quiet does not show that it takes lr"):
        OptimizerFactory()(tiny(), args, optimizer=Quiet)
    optimizer = OptimizerFactory()(tiny(), args, optimizer=Quiet, lr=args.learning_rate)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}


def test_another_optimizer_under_the_callback_raises(tmp_path):
    trainer = Trainer(model=tiny(), args=arguments(tmp_path), train_dataset=dataset())
    MultiplierCallback().attach(trainer)
    with pytest.raises(TypeError, match=r"lrm.AdamW.from_model"):
        trainer.train()


def test_raw_weights_follow_the_best_model(tmp_path):
    args = arguments(
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
    )
    trainer = make_trainer(args)
    trainer.train()
    best = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert not trainer.state.best_model_checkpoint.endswith("-6")
    optimizer = lrm.unwrap(trainer.optimizer)
    raw, multipliers = optimizer.raw_weights(), optimizer.multipliers()
    for name, weight in best.named_parameters():
        own = multipliers.get(name, {})
        product = own.get("row", torch.ones(1)).view(-1, *[1] * (weight.dim() - 1)) * raw[name]
        product = product * own.get("col", torch.ones(1))
        torch.testing.assert_close(product, weight, rtol=1e-6, atol=0)
        torch.testing.assert_close(trainer.model.get_parameter(name), weight, rtol=1e-6, atol=0)
    # Training can go on from there.
    ids = batches(1)[0]
    trainer.model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert math.isfinite(optimizer.grad_norm.item())


def test_sft_trainer_trains_logs_and_resumes_as_a_plain_loop(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(32)}
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="w0", eos_token="w1", pad_token="w1", unk_token="w2"
    )
    plain = {"max_length": None, "bf16": False}
    rows = [{"input_ids": row["input_ids"].tolist()} for row in dataset()]

    def make(folder, **changed):
        args = arguments(folder, **changed).to_dict()
        kept = {key: value for key, value in args.items() if value is not None}
        args = trl.SFTConfig(**{**kept, **plain})
        made = trl.SFTTrainer(
            model=tiny(),
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            optimizer_cls_and_kwargs=(
                OptimizerFactory,
                {"training_args": args, "max_grad_norm": SETTINGS["max_grad_norm"]},
            ),
        )
        MultiplierCallback().attach(made)
        return made

    trainer = make(tmp_path / "whole")
    trainer.train()
    # TRL's loss, which sums in chunks, in a plain loop.
    fresh = make(tmp_path / "plain")

    def loss(model, batch, tokens):
        inputs = {"input_ids": batch, "labels": batch, "attention_mask": torch.ones_like(batch)}
        return fresh.compute_loss(model, inputs, num_items_in_batch=tokens)

    model, expected, norms, healths = plain_loop(model=fresh.model, loss=loss)
    assert_same(trainer.model, trainer.optimizer, model, expected)
    logs = training_logs(trainer)
    assert [record["raw_grad_norm"] for record in logs] == norms
    for record, health in zip(logs, healths, strict=True):
        assert {name: record[name] for name in health} == health
    half = {"save_strategy": "steps", "save_steps": 3}
    first = make(tmp_path / "run", **half)
    first.add_callback(Kill())
    with pytest.raises(KillError):
        first.train()
    resumed = make(tmp_path / "run", **half)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed.model, resumed.optimizer, model, expected)
