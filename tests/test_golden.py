"""The numbers of small training runs, pinned: a refactoring leaves every one of them as it was.

`golden.json` holds 30 losses and the SHA-256 of every weight, raw weight, multiplier and moment
after them. Losses are compared to 1e-5 anywhere: two CPUs differed by 5e-7. Hashes are compared
under the torch version and on the model of CPU they were recorded with, because its libraries
choose their code by it. A change of numerics regenerates the file in a commit of its own:

    python tests/test_golden.py
"""

import hashlib
import json
import platform
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learnable_multipliers.pretrain.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    RuntimeConfig,
    ScheduleConfig,
    TrainConfig,
)
from learnable_multipliers.pretrain.model.config import ModelConfig
from learnable_multipliers.pretrain.trainer.trainer import Trainer

GOLDEN = Path(__file__).with_name("golden.json")
STEPS, LENGTH, BATCH = 30, 32, 4

# Every number is written out: a default that changes later is not a change of numerics.
HYBRID = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=2,
    max_length=2048,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rope_theta=1e4,
    intermediate_size=48,
    ssm_size=32,
    ssm_head_dim=16,
    ssm_state_size=16,
    ssm_groups=1,
    ssm_conv_size=4,
    ssm_chunk_size=16,
    ssm_norm=False,
    norm_eps=1e-5,
    freeze_norms=False,
    tie_embeddings=False,
    init_std=0.02,
    mup_embedding=2.0,
    mup_head=0.5,
    mup_attention_in=1.0,
    mup_key=0.75,
    mup_attention_out=1.0,
    mup_ssm_in=1.0,
    mup_z=1.0,
    mup_x=1.0,
    mup_B=1.0,
    mup_C=1.0,
    mup_dt=1.0,
    mup_ssm_out=1.0,
    mup_gate=1.0,
    mup_down=1.0,
)
LLAMA = replace(HYBRID, ssm_size=0, tie_embeddings=True, mup_embedding=1.0, mup_head=1.0)
MODELS = {"hybrid": HYBRID, "llama": LLAMA}
CASES = [
    f"{model}-{kind}-{placement}"
    for model in MODELS
    for kind in ("adamw", "muon")
    for placement in ("none", "scalar", "full", "symmetry-aware")
]


def config(case: str, data: Path, out: Path) -> TrainConfig:
    model, kind, placement = case.split("-", 2)
    return TrainConfig(
        out=out,
        seed=0,
        z_loss=1e-4,
        model=MODELS[model],
        data=DataConfig(
            path=data, sequence_length=LENGTH, batch_sequences=BATCH, micro_batch_sequences=2
        ),
        schedule=ScheduleConfig(
            tokens=STEPS * LENGTH * BATCH,
            warmup_tokens=4 * LENGTH * BATCH,
            decay_tokens=10 * LENGTH * BATCH,
        ),
        optimizer=OptimizerConfig(
            kind=kind,
            placement=placement,
            lr=4e-3,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            max_grad_norm=1.0,
            multiplier_lr_scale=2.0,
            multiplier_weight_decay=2e-3,
            multiplier_init="one",
            momentum=0.95,
            adamw_lr_scale=0.5 if kind == "muon" else 1.0,
        ),
        log=LogConfig(
            every=1,
            weights_every=0,
            evaluate_every=0,
            sample_tokens=0,
            tensorboard=False,
            drift=False,
        ),
        checkpoint=CheckpointConfig(every=0, keep=2),
        runtime=RuntimeConfig(
            device="cpu", dtype="float32", compile="off", cuda_graph="off", num_threads=1
        ),
    )


def recorded(case: str, data: Path, out: Path) -> dict[str, object]:
    """Train a case; return its losses and what every tensor hashes to."""
    losses = []

    def observe(record: dict) -> None:
        if record["kind"] == "train":
            losses.append(record["loss"])

    trainer = Trainer(config(case, data, out), observe)
    assert trainer.train() == "finished"
    tensors = {f"{name}": p.detach() for name, p in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for role, value in trainer.optimizer.state[parameter].items():
                tensors[f"{name}/{role}"] = value
    return {
        "losses": losses,
        "sha256": {name: _sha256(value) for name, value in sorted(tensors.items())},
    }


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _machine() -> dict[str, str]:
    cpu = platform.processor()
    if (found := Path("/proc/cpuinfo")).exists():
        first = found.read_text().partition("\n\n")[0]
        names = "vendor_id|cpu family|model|stepping"
        cpu = ", ".join(re.findall(rf"(?m)^(?:{names})\s*: (.*)$", first))
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "cpu": cpu, "cpu_capability": capability}


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_recorded_numbers(case, data, tmp_path):
    golden = json.loads(GOLDEN.read_text())
    expected, found = golden["runs"][case], recorded(case, data, tmp_path / "run")
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["sha256"].keys() == expected["sha256"].keys()
    if golden["machine"] == _machine():
        assert found == expected


def main() -> None:
    from runs import prepared

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(Path(folder))
        runs = {case: recorded(case, data, Path(folder) / case) for case in CASES}
    GOLDEN.write_text(json.dumps({"machine": _machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
