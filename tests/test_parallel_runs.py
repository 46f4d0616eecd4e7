"""Runs of `lrm train` on several ranks are the run of one process, and resume on any number."""

import math
import shutil
from dataclasses import replace

import pytest
import torch

from learnable_multipliers.optim._sharding import full
from learnable_multipliers.pretrain.checkpoint.store import load_newest
from learnable_multipliers.pretrain.config import OptimizerConfig, ParallelConfig
from learnable_multipliers.pretrain.metrics.log import read_metrics
from learnable_multipliers.pretrain.model.loss import Losses
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from ranks import AXES, Ranks
from runs import LLAMA, everything, small_run

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 1e-7, "atol": 1e-9}
"""Sums in another order, in float64."""
HYBRID_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def config_of(data, out, *, kind="adamw", llama=False, tied=False, **changes):
    # Eight steps of twice the batch.
    config = small_run(data, out, steps=16, **changes)
    shape = replace(LLAMA if llama else config.model, **HYBRID_HEADS, tie_embeddings=tied)
    micro = replace(config.data, batch_sequences=8, micro_batch_sequences=1)
    optimizer = OptimizerConfig(kind=kind, lr=4e-3)
    return replace(config, model=shape, data=micro, optimizer=optimizer)


def in_float64(work):
    """Do something with models of float64."""
    torch.set_default_dtype(torch.float64)
    try:
        return work()
    finally:
        torch.set_default_dtype(torch.float32)


def train_here(config, stop_after=None, bad=None):
    """Train a run on this rank with all others; return what it comes to, in full.

    With `bad`, a number is added to the loss of one rank in step 4.
    """

    def work():
        trainer = Trainer(config)
        if bad is not None and trainer.world.rank == trainer.world.size - 1:
            _spoil(trainer, bad)
        tensors = {}
        for step in trainer.steps():
            if step in (stop_after, len(trainer.schedule)):
                # Before the process groups are gone.
                norm = trainer.optimizer.grad_norm
                tensors = {name: full(value) for name, value in everything(trainer).items()}
                tensors |= {"grad norm": norm}
            if step == stop_after:
                trainer.save()
                trainer.close()
                trainer.world.destroy()
                break
        return tensors if trainer.world.is_first else None

    return in_float64(work)


def _spoil(trainer, number):
    parallel = trainer._train_step._parallel

    def loss(tokens, z_loss):
        plain = parallel.loss(tokens, z_loss)
        added = number if trainer.step == 3 else 0.0
        return Losses(plain.total + added, plain.cross_entropy + added)

    trainer._train_step._parallel = replace(parallel, loss=loss)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
        )


def losses(folder):
    return {
        (r["kind"], r["step"]): r["loss"]
        for r in read_metrics(folder)
        if r["kind"] in ("train", "eval")
    }


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Return a function that trains a run in one process, each once."""
    runs = {}

    def run(**settings):
        key = tuple(sorted(settings.items()))
        if key not in runs:
            folder = tmp_path_factory.mktemp("alone") / "run"
            runs[key] = folder, train_here(config_of(data, folder, **settings))
        return runs[key]

    return run


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("axes", AXES)
def test_a_run_on_four_ranks_is_that_of_one_process(ranks, alone, data, tmp_path, axes, kind):
    folder, expected = alone(kind=kind)
    config = config_of(data, tmp_path / "run", kind=kind)
    config = replace(config, parallel=ParallelConfig(**AXES[axes]))
    actual, *others = ranks.run(train_here, config)
    assert others == [None] * 3
    assert_close(actual, expected)
    assert losses(tmp_path / "run") == pytest.approx(losses(folder), rel=1e-9)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_tied_embedding_is_sharded_too(ranks, alone, data, tmp_path, kind):
    _, expected = alone(kind=kind, tied=True)
    config = config_of(data, tmp_path / "run", kind=kind, tied=True)
    config = replace(config, parallel=ParallelConfig(**AXES["FSDP x TP"]))
    assert_close(ranks.run(train_here, config)[0], expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_resumes_with_another_number_of_ranks(ranks, alone, data, tmp_path, kind):
    folder, expected = alone(kind=kind, llama=True)
    config = config_of(data, tmp_path / "run", kind=kind, llama=True)
    two = Ranks(2)
    axes = [{"shard": 2, "tensor": 2}, {"shard": 2}, {}, {"data": 2, "shard": 2}]
    try:
        for where, given, stop in zip(
            (ranks, two, None, ranks), axes, (2, 4, 6, None), strict=True
        ):
            part = replace(config, parallel=ParallelConfig(**given), resume=stop != 2)
            actual = (
                train_here(part, stop) if where is None else where.run(train_here, part, stop)[0]
            )
    finally:
        two.stop()
    assert_close(actual, expected)
    assert losses(tmp_path / "run") == pytest.approx(losses(folder), rel=1e-9)
    # What ranks have written, one process reads.
    kept, wrong = load_newest(tmp_path / "run" / "checkpoints")
    assert wrong == []
    for name, value in expected.items():
        group, _, rest = name.partition("/")
        if rest:
            torch.testing.assert_close(kept.tensors[group][rest], value, **CLOSE)


def test_signals_of_replicas_are_those_of_one_process(ranks, data, tmp_path):
    config = config_of(data, tmp_path / "alone", kind="muon")
    config = replace(config, log=replace(config.log, signals_every=3))
    train_here(config)
    copies = ParallelConfig(**AXES["DDP"])
    ranks.run(train_here, replace(config, out=tmp_path / "run", parallel=copies))
    alone, records = (
        [list(numbers_of(r)) for r in read_metrics(tmp_path / name) if r["kind"] == "signals"]
        for name in ("alone", "run")
    )
    assert len(records) == 4
    # Of six digits.
    assert records == [pytest.approx(record, rel=2e-6) for record in alone]


def numbers_of(value):
    """Yield all numbers of a record, in order."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from numbers_of(item)
        elif not isinstance(item, str):
            yield item


def test_fixed_factors_are_folded_into_multipliers_on_ranks_too(ranks, data, tmp_path):
    config = config_of(data, tmp_path / "alone", llama=True)
    shape = replace(config.model, mup_key=0.5, mup_down=2.0, mup_head=0.25)
    folding = replace(config.optimizer, multiplier_init="fold")
    config = replace(config, model=shape, optimizer=folding)
    expected = train_here(config)
    on_ranks = replace(config, out=tmp_path / "run", parallel=ParallelConfig(**AXES["FSDP x TP"]))
    assert_close(ranks.run(train_here, on_ranks)[0], expected)


def test_a_checkpoint_of_two_ranks_loads_on_one_three_and_four(ranks, data, tmp_path):
    # Twelve sequences, which three ranks can divide; rows and columns leave uneven shards.
    config = config_of(data, tmp_path / "run", llama=True)
    config = replace(config, data=replace(config.data, batch_sequences=12))
    expected = train_here(replace(config, out=tmp_path / "alone"))
    for number, where in ((2, Ranks(2)), (1, None), (3, Ranks(3)), (4, ranks)):
        part = replace(config, parallel=ParallelConfig(shard=number), resume=number != 2)
        if number != 2:
            part = replace(part, out=tmp_path / str(number))
            shutil.copytree(tmp_path / "run", part.out)
        try:
            stop = 2 if number == 2 else None
            actual = where.run(train_here, part, stop)[0] if where else train_here(part)
        finally:
            if where not in (None, ranks):
                where.stop()
        if number != 2:
            assert_close(actual, expected)


@pytest.mark.parametrize(
    ("axes", "number"),
    [
        ("DDP", math.nan),
        ("DDP", math.inf),
        ("DDP", -math.inf),
        ("FSDP", math.nan),
        ("FSDP x TP", math.nan),
    ],
)
def test_a_loss_that_is_bad_on_one_rank_is_left_out_on_all(ranks, data, tmp_path, axes, number):
    alone = config_of(data, tmp_path / "alone", llama=True)
    expected = train_here(alone, bad=number)
    config = config_of(data, tmp_path / "run", llama=True)
    config = replace(config, parallel=ParallelConfig(**AXES[axes]))
    actual = ranks.run(train_here, config, None, number)[0]
    # Had ranks gone apart, what they hold together would not be what one process holds.
    assert_close(actual, expected)
    last = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "train"][-1]
    assert last["skipped_steps"] == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


def train_with_a_bad_gradient(config):
    """Train with a NaN in the gradient of the last rank alone, after gradients were averaged."""

    def work():
        trainer = Trainer(config)
        step_of, last = trainer.optimizer.step, trainer.world.rank == trainer.world.size - 1

        def step():
            if trainer.step in (3, 4) and last:
                trainer.model.lm_head.weight.grad[0, 0] = math.nan
            return step_of()

        trainer.optimizer.step = step
        for _ in trainer.steps():
            result = everything(trainer), trainer.skipped_steps, trainer._losses.meter.read()
        return result

    return in_float64(work)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_bad_on_one_copy_is_left_out_on_all(data, tmp_path, kind):
    config = config_of(data, tmp_path / "alone", kind=kind, llama=True)
    expected, skipped, _ = train_with_a_bad_gradient(config)
    assert skipped == 2
    two = Ranks(2)
    try:
        one, other = two.run(train_with_a_bad_gradient, replace(config, out=tmp_path / "run"))
    finally:
        two.stop()
    # Loss readings decide about rollbacks, which all ranks must take together.
    assert one[1:] == (2, other[2])
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert_close(one[0], expected)


def train_with_other_weights(config):
    """Change the weights of one rank; return how all of them end."""
    from learnable_multipliers.optim import _replicas

    usual, _replicas.CHECK_EVERY = _replicas.CHECK_EVERY, 4
    try:
        trainer = Trainer(config)
        for step in trainer.steps():
            if step == 3 and trainer.world.rank == 1:
                with trainer.optimizer.rewriting(["lm_head.weight"]) as (state,):
                    state.raw.mul_(1.5)
    except OSError as error:
        trainer.close()
        trainer.world.destroy()
        return str(error)
    finally:
        _replicas.CHECK_EVERY = usual
    return "nothing"


def test_replicas_that_differ_end_a_run(data, tmp_path):
    two = Ranks(2)
    try:
        errors = two.run(train_with_other_weights, config_of(data, tmp_path / "run", llama=True))
    finally:
        two.stop()
    for text in errors:
        assert text.startswith("step 5: the replicas of lm_head.weight differ between ranks, by ")
        assert text.endswith("restart from a checkpoint (--resume)")
