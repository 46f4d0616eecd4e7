"""The valid inputs that the fuzzer changes: small files, and commands that read them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow
import zstandard
from pyarrow import parquet

from learnable_multipliers._checksum import KEY, add_checksum, encode_line
from learnable_multipliers.cli.data_prepare import PrepareConfig
from learnable_multipliers.cli.demo import DemoConfig
from learnable_multipliers.cli.diagnosis import DiagnoseConfig
from learnable_multipliers.cli.evaluate import EvaluateConfig
from learnable_multipliers.cli.experiment import ExperimentConfig
from learnable_multipliers.cli.models import PlanConfig, SymmetriesConfig
from learnable_multipliers.cli.preflight import VerifyConfig
from learnable_multipliers.cli.runs import ExportConfig, ReportConfig
from learnable_multipliers.cli.scaling import ScalingConfig
from learnable_multipliers.cli.simulate import SimulateConfig
from learnable_multipliers.pretrain.checkpoint.manifest import fingerprint, manifest_json
from learnable_multipliers.pretrain.config import TrainConfig

_SHAPE = """--model.hidden-size 16 --model.num-layers 1 --model.num-heads 2
    --model.num-kv-heads 1 --model.head-dim 8 --model.intermediate-size 24
    --model.ssm-head-dim 8 --model.ssm-state-size 8 --model.ssm-chunk-size 16
    --model.vocab-size 257 --data.sequence-length 16 --data.batch-sequences 2"""
_STEPS = """--schedule.tokens 192 --schedule.warmup-tokens 32 --schedule.decay-tokens 32
    --log.every 1 --log.weights-every 2 --log.evaluate-every 3 --log.evaluate-tokens 64
    --log.sample-tokens 4 --checkpoint.every 2 --checkpoint.keep 3 --log.no-tensorboard
    --log.no-drift --runtime.device cpu --runtime.num-threads 1"""
SMALL = f"{_SHAPE} --model.ssm-size 16 {_STEPS}".split()
"""Settings of a run of 6 steps, with checkpoints after 2, 4 and 6."""
_LLAMA = f"{_SHAPE} --model.ssm-size 0 --data.path data {_STEPS}".split()
_PREPARE = ["--vocab-size", "257", "--valid-fraction", "0.5", "--num-threads", "1"]
NEWEST = "run/checkpoints/step-00000004"
Format = Literal["bytes", "json", "json lines", "tensors"]


@dataclass(frozen=True)
class Valid:
    """A command that succeeds on the inputs as they are."""

    words: tuple[str, ...]
    config: type
    """Defines its options."""
    weight: int = 4
    """How often its words are changed, compared with others."""
    writes: Literal["new", "run", "anything"] = "new"
    """After a refusal: nothing new is left; the run may have changed; a new run may be there."""

    @property
    def command(self) -> str:
        """The command, of one or two words."""
        return " ".join(self.words[: 2 if self.words[0] == "data" else 1])


def _valid(line: str, config: type, *more: str, **settings: object) -> Valid:
    return Valid((*line.split(), *more), config, **settings)  # pyright: ignore[reportArgumentType]


def _prepare(line: str) -> Valid:
    return _valid(f"data prepare {line} --out new", PrepareConfig, *_PREPARE)


VALID: dict[str, Valid] = {
    "demo": _valid("demo --out new --tokens 64", DemoConfig, weight=2, writes="anything"),
    "prepare": _prepare("text"),
    "prepare text": _prepare("text/a.txt text/g.txt --text-separator ;"),
    "prepare json lines": _prepare("text/b.jsonl"),
    "prepare parquet": _prepare("text/c.parquet"),
    "prepare gz": _prepare("text/d.txt.gz --text-separator ;"),
    "prepare xz": _prepare("text/e.jsonl.xz"),
    "prepare zst": _prepare("text/f.txt.zst --text-separator ;"),
    "prepare with tokenizer": _valid(
        "data prepare text --out new --tokenizer tokenizer.json --valid-fraction 0.5 "
        "--num-threads 1 --eos-token <|endoftext|>",
        PrepareConfig,
    ),
    "prepare over": _prepare("text --overwrite"),
    "doctor": _valid("doctor tiny --data.path data --out new", TrainConfig, *SMALL),
    "doctor of a run": _valid("doctor run", TrainConfig),
    "train": _valid(
        "train tiny --data.path data --out new", TrainConfig, *SMALL, weight=9, writes="anything"
    ),
    "dry run": _valid("train tiny --data.path data --out new --dry-run", TrainConfig, *SMALL),
    "resume": _valid(
        "train tiny --data.path data --out run --resume", TrainConfig, *SMALL, writes="run"
    ),
    "verify-resume": _valid(
        "verify-resume tiny --steps 1 --data.path data --out new",
        VerifyConfig,
        *SMALL,
        weight=3,
        writes="anything",
    ),
    "plan": _valid("plan tiny", PlanConfig),
    "plan by rules": _valid("plan tiny --rules", PlanConfig, ". only=head kind=row", "@rules.txt"),
    "plan of a folder": _valid("plan hf --json", PlanConfig),
    "scaling": _valid("scaling tiny --ranks 16", ScalingConfig),
    "symmetries": _valid("symmetries hf --placement scalar", SymmetriesConfig, weight=2),
    "simulate": _valid("simulate --steps 20 --shape 4 4", SimulateConfig, weight=6),
    "diagnose": _valid("diagnose run", DiagnoseConfig, weight=6),
    "export": _valid("export run new", ExportConfig, weight=6),
    "export of a checkpoint": _valid(f"export {NEWEST} new --dtype bfloat16 --gguf", ExportConfig),
    "evaluate": _valid(
        "evaluate run --eval-data sets --tasks piqa --device cpu --out new", EvaluateConfig
    ),
    "report": _valid("report run --out new.html", ReportConfig, weight=3),
    "experiments": _valid("experiment list --preset gpu --out records", ExperimentConfig, weight=1),
}


@dataclass(frozen=True)
class Input:
    """A file that commands read."""

    path: str
    format: Format
    read_by: tuple[str, ...]
    """Names of valid commands."""
    rule: Literal["noticed", "same outcome", "other input"]
    """What exit code 0 needs after a change: a word naming the file; that, or the outcome of the
    unchanged file; nothing, because it is another valid input."""
    reseal: Callable[[Path, Path], None] | None = None
    """Makes the checksums that cover the file fit again, given the folder of inputs and the file;
    what comes then is another input, that of somebody who edits files and knows their format."""


def _reseal_data(root: Path, path: Path) -> None:
    """Let the manifest of a dataset say what its files are, and seal it."""
    manifest = root / "data" / "manifest.json"
    try:
        content = json.loads(manifest.read_bytes())
        if path.name == "tokenizer.json":
            content["tokenizer_sha256"] = fingerprint(path)["sha256"]
        for split in content["splits"].values():
            for shard in split:
                if shard["file"] == path.name:
                    shard["sha256"] = fingerprint(path)["sha256"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    _write_sealed(manifest, content)


def _reseal_json(root: Path, path: Path) -> None:
    """Seal a JSON file again, if it was sealed and is still an object."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    # Unsealed content is not rewritten, which would drop its duplicate keys.
    if isinstance(content, dict) and KEY in content:
        _write_sealed(path, content)


def _write_sealed(path: Path, content: dict) -> None:
    if KEY in content:
        content = add_checksum({key: value for key, value in content.items() if key != KEY})
    path.write_text(json.dumps(content, indent=1))


def _reseal_lines(root: Path, path: Path) -> None:
    """Give every line that is an object the checksum it needs, where lines have them."""
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
            record.pop("crc32")
            lines.append(encode_line(record))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            lines.append(line)
    path.write_bytes(b"".join(lines))


def _reseal_checkpoint(root: Path, path: Path) -> None:
    """Let the manifest of a checkpoint say what its files are."""
    manifest = path.with_name("manifest.json")
    files = json.loads(manifest.read_bytes())["files"] | {path.name: fingerprint(path)}
    manifest.write_bytes(manifest_json(dict(sorted(files.items()))))


_DATA = ("train", "resume", "doctor", "verify-resume", "dry run", "doctor of a run")
_CHECKPOINT = ("resume", "export", "diagnose", "doctor of a run", "export of a checkpoint")


def _source(name: str, *read_by: str, rule: Literal["same outcome", "other input"]) -> Input:
    return Input(f"text/{name}", "json lines" if name == "b.jsonl" else "bytes", read_by, rule)


INPUTS: dict[str, Input] = {
    "dataset manifest": Input("data/manifest.json", "json", _DATA, "noticed", _reseal_data),
    "dataset shard": Input("data/train-00000.bin", "bytes", _DATA[:4], "noticed", _reseal_data),
    "dataset held-out shard": Input(
        "data/valid-00000.bin", "bytes", _DATA[:4], "noticed", _reseal_data
    ),
    "dataset tokenizer": Input("data/tokenizer.json", "json", _DATA, "noticed", _reseal_data),
    "given tokenizer": Input("tokenizer.json", "json", ("prepare with tokenizer",), "other input"),
    "run config": Input(
        "run/config.json",
        "json",
        ("report", "doctor of a run", "resume", "export"),
        "same outcome",
        _reseal_json,
    ),
    "run environment": Input(
        "run/environment.json", "json", ("report", "resume"), "same outcome", _reseal_json
    ),
    "run plan": Input("run/plan.json", "json", ("report", "resume"), "same outcome", _reseal_json),
    "run tokenizer": Input("run/tokenizer.json", "json", ("export", "resume"), "same outcome"),
    "run continuation": Input(
        "run/resumed-00000004.json", "json", ("report", "resume"), "same outcome", _reseal_json
    ),
    "run metrics": Input(
        "run/metrics.jsonl", "json lines", ("report", "resume"), "same outcome", _reseal_lines
    ),
    **{
        f"checkpoint {kind}": Input(f"{NEWEST}/{name}", form, _CHECKPOINT, "noticed", reseal)
        for kind, name, form, reseal in (
            ("model", "model.safetensors", "tensors", _reseal_checkpoint),
            ("optimizer", "optimizer.safetensors", "tensors", _reseal_checkpoint),
            ("state", "state.json", "json", _reseal_checkpoint),
            ("manifest", "manifest.json", "json", None),
        )
    },
    "Hugging Face config": Input(
        "hf/config.json", "json", ("plan of a folder",) * 4 + ("symmetries",), "other input"
    ),
    "evaluation set": Input("sets/piqa/valid.jsonl", "json lines", ("evaluate",), "other input"),
    "rules": Input("rules.txt", "bytes", ("plan by rules",), "other input"),
    "source .txt": _source("a.txt", "prepare text", "prepare", rule="other input"),
    "source .jsonl": _source("b.jsonl", "prepare json lines", "prepare", rule="other input"),
    "source .parquet": _source("c.parquet", "prepare parquet", "prepare", rule="other input"),
    # These formats carry checksums.
    "source .gz": _source("d.txt.gz", "prepare gz", "prepare", rule="same outcome"),
    "source .xz": _source("e.jsonl.xz", "prepare xz", "prepare", rule="same outcome"),
    "source .zst": _source("f.txt.zst", "prepare zst", "prepare", rule="same outcome"),
    # A line that a kill left incomplete is dropped.
    "records": Input(
        "records/noise.jsonl", "json lines", ("experiments",), "other input", _reseal_lines
    ),
}


def write_library(folder: Path) -> None:
    """Write what is taken for the standard library: as many documents as a split needs."""
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.py").write_text(f"print({number})\n" * 8)


def _write_set(folder: Path) -> None:
    """Write an evaluation set of two items."""
    folder.mkdir(parents=True)
    item = {"goal": "to open a door", "sol1": "turn the handle", "sol2": "turn the wall"}
    (folder / "valid.jsonl").write_text((json.dumps(item) + "\n") * 2)
    (folder / "valid-labels.lst").write_text("0\n0\n")


def make_inputs(root: Path, run: Callable[[Sequence[str], Path], None]) -> None:
    """Make the folder of inputs; `run` runs a command in it."""
    here = root / "here"
    (here / "text").mkdir(parents=True)
    _write_sources(here / "text")
    _write_set(here / "sets" / "piqa")
    for name in ("mine", "locked", "tmp", "home"):
        (here / name).mkdir()
    (here / "mine" / "report.html").write_text("<p>not ours</p>\n")
    (here / "rules.txt").write_text("# rules\nup_proj kind=none\nq_proj scale=log init=0.5\n")
    (here / "records").mkdir()
    (here / "records" / "noise.jsonl").write_bytes(_records())
    os.mkfifo(here / "pipe")
    (here / "dangling").symlink_to("nowhere")
    (here / "loop").symlink_to("loop")
    for line in (
        ["data", "prepare", "text", "--out", "data", *_PREPARE],
        ["train", "tiny", "--data.path", "data", "--out", "run", *SMALL],
        ["train", "tiny-llama", "--out", "llama", *_LLAMA],
        ["export", "llama", "hf"],
    ):
        run(line, here)
    # A run that was killed after step 4, twice.
    shutil.rmtree(here / "run/checkpoints/step-00000006")
    run(["train", "tiny", "--data.path", "data", "--out", "run", *SMALL, "--resume"], here)
    shutil.rmtree(here / "run/checkpoints/step-00000006")
    shutil.rmtree(here / "llama")
    shutil.copy(here / "data" / "tokenizer.json", here)
    # Fewer rows: symmetries are found in a fraction of a second.
    path = here / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"vocab_size": 16}, indent=1))
    # A run without --data.path finds its data prepared.
    run(["train", "tiny", *SMALL, "--dry-run", "--out", "none"], here)
    (here / "locked").chmod(0)


def _records() -> bytes:
    """Return records of two runs, of those that are published."""
    with lzma.open(Path(__file__).parents[1] / "results/experiments/noise.jsonl.xz") as file:
        return file.readline() + file.readline()


def _write_sources(folder: Path) -> None:
    texts = [
        ";".join(f"{i} plus {n} is {i + n}, \u00e9 and not {i * n}." for n in range(9))
        for i in range(7)
    ]
    rows = [[f"{row} of {text}" for row in range(12)] for text in texts]
    lines = ["".join(json.dumps({"text": row}) + "\n" for row in some) for some in rows]
    (folder / "a.txt").write_text(texts[0])
    (folder / "b.jsonl").write_text(lines[1])
    parquet.write_table(pyarrow.table({"text": rows[2]}), folder / "c.parquet")
    (folder / "d.txt.gz").write_bytes(gzip.compress(texts[3].encode(), mtime=0))
    (folder / "e.jsonl.xz").write_bytes(lzma.compress(lines[4].encode()))
    checked = zstandard.ZstdCompressor(write_checksum=True)
    (folder / "f.txt.zst").write_bytes(checked.compress(texts[5].encode()))
    (folder / "g.txt").write_text(texts[6])
