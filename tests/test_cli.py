"""The command `lrm`, as a user meets it: what it says, what it does, and how it ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import typing
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

import learnable_multipliers as lrm
from learnable_multipliers import Plan, cli
from learnable_multipliers.cli import COMMANDS, demo, main
from learnable_multipliers.cli.train import configure
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import TrainConfig
from learnable_multipliers.pretrain.model.hybrid import build
from learnable_multipliers.pretrain.model.presets import PRESETS
from learnable_multipliers.pretrain.recipes import RECIPES
from processes import start
from runs import killed_after, small_run

pytestmark = pytest.mark.usefixtures("place")

RECIPE = RECIPES["tiny"][1]
LRM = [sys.executable, "-c", "from learnable_multipliers.cli import main; main()"]


def in_one_line(text: str) -> str:
    """Undo the boxes of tyro and the line breaks inside of them."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


def leaves(config, prefix=""):
    """Yield the dotted path, type and value of every setting."""
    hints = typing.get_type_hints(type(config))
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if is_dataclass(value):
            yield from leaves(value, f"{name}.")
        else:
            yield name, hints[field.name], value


def another(kind, value, index):
    """Return a value of a type that differs from a given one, and from that of other indices."""
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in choices if choice != value)
    if kind is Path or Path in choices:
        return Path(f"some/where else {index}")
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"head": index + 0.5, "gate": 1 / (index + 2)}
    if kind == tuple[str, ...]:
        return (f". only=head lr_scale={index}", "up_proj kind=none")
    if isinstance(value, tuple):
        return tuple(number / 2 + index / 256 for number in value)
    if isinstance(value, str):
        return f"{value}other {index}"
    return value + 1 + index if isinstance(value, int) else value * 2 + (index + 1) / 16


def with_value(config, path, value):
    name, _, rest = path.partition(".")
    inner = with_value(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: inner})


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def as_arguments(path, value, default) -> list[str]:
    """Return how a setting is given on the command line; nothing where it is the default."""
    section, dot, name = path.replace("_", "-").rpartition(".")
    if value == default:
        return []
    if isinstance(value, bool):
        return [f"--{section}{dot}{name}" if value else f"--{section}{dot}no-{name}"]
    if isinstance(value, dict):
        value = tuple(word for pair in value.items() for word in pair)
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{section}{dot}{name}", *map(str, values)]


def command_of(config: TrainConfig) -> list[str]:
    """Return `train tiny` with every setting in which a config differs from the recipe."""
    told = (as_arguments(path, value, at(RECIPE, path)) for path, _, value in leaves(config))
    return ["train", "tiny", *(word for words in told for word in words)]


# -- settings ---------------------------------------------------------------------------------


# Each takes a parse of all options: a few settings at a time, so that none leans on its neighbour.
@pytest.mark.parametrize("part", [*range(8), None])
def test_every_setting_can_be_given_by_its_name_and_arrives(part):
    paths = list(leaves(RECIPE))
    assert len(paths) > 80
    expected = RECIPE
    for index, (path, kind, value) in enumerate(paths):
        if part is None or index % 8 == part:
            assert another(kind, value, index) != value
            expected = with_value(expected, path, another(kind, value, index))
    config = configure(command_of(expected)[1:])
    for path, *_ in paths:
        assert at(config, path) == at(expected, path), path


@pytest.mark.parametrize("name", RECIPES)
def test_without_settings_a_recipe_is_what_it_says(name):
    assert configure([name]) == RECIPES[name][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("head", "'head' has no number: alternate names and numbers"),
        ("head large", "'large', for 'head', is not a number"),
        ("head 2 gate 1 head 4", "'head' is given twice"),
    ],
)
def test_factors_by_role_that_cannot_be_read_are_usage_errors(ask, words, message):
    code, _, complaints = ask("train", "tiny", "--optimizer.norm-scale", *words.split())
    assert code == 2
    assert message in in_one_line(complaints)


def test_a_plan_takes_rules_in_words(ask):
    Path("rules.txt").write_text("up_proj kind=none\n")
    rules = ("--rules", ". only=head kind=scalar", "@rules.txt")
    code, out, _ = ask("plan", "tiny-llama", *rules, "--json")
    assert code == 0
    expected = [lrm.Rule(".", "scalar", only="head"), lrm.Rule("up_proj", "none")]
    assert Plan.from_json(out) == lrm.plan(build(PRESETS["tiny-llama"]), "full", expected)
    code, _, complaints = ask("plan", "tiny-llama", "--rules", "head")
    assert code == 1
    assert complaints.startswith("lrm plan: rule 'head' sets nothing")


def test_names_may_be_written_with_underscores_and_equals_signs():
    config = configure(["tiny", "--optimizer.weight_decay=0.2", "--data.batch_sequences", "4"])
    optimizer = replace(RECIPE.optimizer, weight_decay=0.2)
    assert config == replace(
        RECIPE, optimizer=optimizer, data=replace(RECIPE.data, batch_sequences=4)
    )


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"], ["data", "--help"]])
def test_help_lists_every_command_in_one_line_each(ask, arguments):
    code, text, complaints = ask(*arguments)
    assert (code, complaints) == (0, "")
    lines = text.splitlines()
    for name, (_, what) in COMMANDS.items():
        assert sum(line.split("  ")[1:2] == [f"lrm {name}"] and what in line for line in lines) == 1
    assert max(map(len, lines)) <= 80


def test_version(ask):
    code, text, _ = ask("--version")
    assert code == 0
    assert re.fullmatch(r"lrm \d+\.\d+\.\d+\n", text)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [*COMMANDS, "train tiny", "train falcon-h1-0.5b"])
def test_each_command_explains_itself_within_the_terminal(ask, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text, complaints = ask(*command.split(), "--help")
    assert (code, complaints) == (0, "")
    assert text.startswith(f"usage: lrm {command}")
    # The first line is the usage, which tyro leaves to the terminal to break.
    assert max(map(len, text.splitlines()[1:])) <= columns
    # A placeholder tells what goes there, not how it is typed inside.
    assert "{None}" not in text
    assert "--no-resume" not in text


def test_train_alone_lists_the_recipes(ask):
    code, text, _ = ask("train")
    assert code == 2
    told = " ".join(text.split())
    for name, (what, _) in RECIPES.items():
        assert f" {name} {what} " in told
    assert ask("train", "--help") == (0, text, "")


@pytest.mark.parametrize("name", ["tiny", "falcon-h1-0.5b"])
def test_help_of_a_recipe_shows_its_own_values(ask, name):
    text = in_one_line(ask("train", name, "--help")[1])
    for path, _, value in leaves(RECIPES[name][1]):
        option = "--" + path.replace("_", "-")
        if value is True:
            option = re.sub(r"([\w-]+)$", r"no-\1", option)
        # Up to the next option.
        told = re.search(rf"{re.escape(option)} .*?(?= --[a-zA-Z.-]+ |$)", text)
        assert told, path
        several = isinstance(value, tuple | dict)
        shown = " ".join(map(str, value)) if several else str(value)
        if isinstance(value, bool):
            shown = "on" if value else "off"
        defaults = [default.strip("'") for default in re.findall(r"\(default: (.*?)\)", told[0])]
        assert defaults == ([] if shown in ("", "None") else [shown]), path


def test_a_switch_that_is_on_is_described_as_turned_off(ask):
    text = in_one_line(ask("train", "tiny", "--help")[1])
    told = re.findall(r"--log\.no-[\w-]+ (.*?) \(default: on\)", text)
    assert [about.split(",")[0] for about in told] == [
        "Turn off: scale symmetries of the model",
        "Turn off: scalars for TensorBoard",
    ]


@pytest.mark.parametrize("columns", [80, 100])
def test_lines_of_help_are_as_long_as_the_terminal_allows(ask, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = ask("train", "tiny", "--help")[1].splitlines()
    told = [re.fullmatch(r". {7}(\S.*?) *.?", line) for line in lines]
    pairs = [(one[1], two[1]) for one, two in pairwise(told) if one and two]
    assert len(pairs) > 20
    for line, following in pairs:
        assert len(f"{line} {following.split()[0]}") > columns - 10, following


def test_the_usage_of_a_preparation_names_the_options_that_it_lists(ask):
    text = in_one_line(ask("data", "prepare", "--help")[1])
    usage, _, listed = text.partition("options")
    assert "lrm data prepare --sources SOURCES --out DATA" in usage
    assert "They may also come first, without --sources." in usage
    assert "--sources [STR [STR ...]]" in listed


def test_whole_numbers_are_read_as_people_write_them():
    words = "tiny --schedule.tokens 1.5e6 --data.batch-sequences 1_024 --seed 9007199254740993e0"
    config = configure(words.split())
    found = config.schedule.tokens, config.data.batch_sequences, config.seed
    assert found == (1_500_000, 1024, 9007199254740993)


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("juggle", "there is no command 'juggle'; lrm --help lists them"),
        ("trai", "did you mean lrm train?"),
        ("data", "lrm data prepare"),
        ("train nope", "there is no recipe 'nope'. lrm train --help lists the recipes."),
        ("train 20-m", "Did you mean lrm train 20m?"),
        ("train --resume tiny", "the recipe comes first"),
        ("train tiny 20m", "Unrecognized options: 20m"),
        ("data prepare --out x text", "Unrecognized options: text"),
        ("train tiny --schedule.tokens 1e-1", "'1e-1' is not a whole number"),
        ("train tiny --schedule.tokens many", "'many' is not a whole number"),
        ("train tiny --lr 3", "Perhaps you meant: --optimizer.adamw-lr-scale"),
        ("train tiny --lr 3", "--optimizer.lr FLOAT Peak learning rate."),
        ("train tiny --optimizer.wieght-decay 3", "Perhaps you meant: --optimizer.weight-decay"),
        ("train tiny --dryrun", "Perhaps you meant: --dry-run"),
        ("train tiny --log.drift False", "--log.no-drift"),
        ("train tiny --xyz 3", "Unrecognized options: --xyz, 3"),
        ("train tiny --xyz 3", "For full helptext, run lrm train tiny --help"),
        ("train tiny --optimizer.kind sgd", "('adamw', 'muon')"),
        ("train tiny --optimizer.lr fast", "--optimizer.lr"),
        ("train tiny --optimizer.betas 0.9", "Expected 2 values"),
        (
            "train tiny --schedule.tokens 100",
            "--schedule.warmup-tokens 5 --schedule.decay-tokens 20,",
        ),
        ("verify-resume 20-m", "Did you mean lrm verify-resume 20m?"),
        ("verify-resume --resume", "Unrecognized options: --resume"),
        ("plan", "MODEL"),
        ("plan tiny --placement ful", "'symmetry-aware'"),
        ("symmetries", "MODEL"),
        ("symmetries tiny --placement none", "'all'"),
        ("simulate --weigth-decay 3", "Perhaps you meant: --weight-decay"),
        ("simulate --optimizer adam", "'adamw'"),
        ("diagnose", "RUN"),
        ("export run", "OUT"),
        ("report", "name one or several folders of runs"),
        ("data prepare", "--out PATH"),
        ("demo --steps 3", "Unrecognized options: --steps, 3"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_rejected_with_a_hint(ask, line, says):
    code, out, complaints = ask(*line.split())
    assert (code, out) == (2, "")
    assert says in in_one_line(complaints)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train tiny --data.path nowhere", "no token dataset at nowhere: there is no such folder"),
        ("train tiny --runtime.device warp", "runtime.device=warp cannot be used here"),
        ("verify-resume --steps 0", "must lie between 1 and 250, got 0"),
        ("verify-resume tiny --steps 251", "the run has 500 steps"),
        ("verify-resume --data.path nowhere", "no token dataset at nowhere"),
        ("plan tinny", "'tinny' is neither a preset (tiny, "),
        ("symmetries tinny", "'tinny' is neither a preset (tiny, "),
        ("simulate --steps 0", "--steps, --rows and both sides of --shape must be at least 1"),
        ("simulate --shape 8 0", "both sides of --shape must be at least 1"),
        ("simulate --warmup 0.5 --decay 0.6", "shares of the run"),
        ("simulate --momentum 0.9", "adamw has no momentum; it takes betas"),
        ("simulate --betas 0.9 1", "betas must lie in [0, 1), got 1.0"),
        ("simulate --lr 20", "lr * weight_decay < 2, got lr=20.0"),
        (
            "diagnose nowhere",
            "Hugging Face Trainer (optimizer.pt), or a folder of torch.distributed",
        ),
        ("export nowhere out", "nowhere is neither a run nor a checkpoint"),
        ("report nowhere", "no run folder 'nowhere'"),
        ("data prepare nowhere --out data", "no file or folder 'nowhere'"),
        ("demo --tokens 0", "schedule.tokens must be a number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(ask, line, says):
    code, out, complaints = ask(*line.split())
    assert (code, out) == (1, "")
    command = next(name for name in COMMANDS if line.startswith(name))
    assert complaints.startswith(f"lrm {command}: ")
    assert says in complaints
    assert complaints.count("\n") <= 1
    assert list(Path().iterdir()) == []


def test_a_traceback_is_shown_to_those_who_ask(monkeypatch):
    monkeypatch.setenv("LRM_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["report", "nowhere"])


@pytest.mark.parametrize(
    ("missing", "command"),
    [("tyro", "train"), ("tyro", "plan"), ("rich", "train"), ("rich", "data prepare")],
)
def test_what_is_not_installed_is_named_with_the_way_to_get_it(ask, monkeypatch, missing, command):
    for name in list(sys.modules):
        ours = name.startswith(f"{cli.__name__}.") or name.endswith(".pretrain.progress")
        if ours or name.partition(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, complaints = ask(*command.split(), "--help")
    assert (code, out) == (1, "")
    assert complaints == (
        f"lrm {command}: needs {missing}, which is not installed: "
        "pip install 'learnable-multipliers[pretrain]'"
    )
    assert ask("--help")[0] == 0


def test_ctrl_c_outside_of_training_is_no_traceback(ask, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "compare", interrupted)
    told = "lrm demo: stopped: no report was written; run lrm demo again to start over\n"
    assert ask("demo") == (130, "", told)
    monkeypatch.setattr("learnable_multipliers.cli.runs.write_page", interrupted)
    monkeypatch.setattr("learnable_multipliers.cli.runs.Run.load", lambda folder: folder)
    assert ask("report", "runs") == (130, "", "lrm report: stopped\n")


# -- what commands do -------------------------------------------------------------------------


def test_plan_prints_the_plan_of_a_preset_as_a_table_or_json(ask):
    expected = lrm.plan(build(PRESETS["tiny"]), "scalar")
    assert ask("plan", "tiny", "--placement", "scalar") == (0, f"{expected}\n", "")
    code, text, complaints = ask("plan", "tiny", "--placement", "scalar", "--json")
    assert (code, complaints) == (0, "")
    assert lrm.Plan.from_json(text) == expected


@pytest.mark.parametrize("columns", [50, 80, 120, 140, 200])
def test_in_a_terminal_a_plan_is_no_wider_than_it(ask, monkeypatch, columns):
    expected = lrm.plan(build(PRESETS["tiny"]), "symmetry-aware")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, text, _ = ask("plan", "tiny", "--placement", "symmetry-aware")
    assert code == 0
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.split())
    assert expected.summary in words
    # Without room for columns, rows are paragraphs.
    told = [
        f"{entry.role}, multipliers {entry.multipliers}: {entry.reason}" in words
        for entry in expected.entries
        if entry.carries
    ]
    assert set(told) == {columns < 200}
    assert (text == f"{expected}\n") == (columns == 200)


def test_a_share_below_the_digits_shown_is_a_bound(ask):
    text = ask("plan", "falcon-h1-0.5b", "--placement", "scalar")[1]
    assert "469 numbers beside 521,411,104 parameters (<0.001%)." in text


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_plan_reads_a_hugging_face_folder(ask, kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config.save_pretrained("model")
    code, text, _ = ask("plan", "model")
    assert code == 0
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert text == f"{lrm.plan(model)}\n"


def test_from_text_to_report_and_export(ask, data):
    text = data.parent / "text"
    code, out, _ = ask(
        *("data", "prepare", text, "--out", "data", "--vocab-size", "257"),
        *("--valid-fraction", "0.2"),
    )
    assert code == 0
    assert re.search(r"^train: \d+ documents, [\d,]+ tokens, [\d.]+kB$", out, re.M)
    suggested = shlex.split(re.search(r"lrm (train tiny .*)", out)[1])
    assert suggested[2:] == ["--data.path", "data", "--model.vocab-size", "257"]
    config = small_run(Path("data"), Path("runs/one"), steps=3)
    code, out, _ = ask(*command_of(config))
    assert code == 0
    assert out.startswith("one: 45k parameters, 1,668 multipliers (full), adamw, on cpu in float32")
    assert "sample at step 3:\nThe" in out
    assert "Next: lrm report runs/one; lrm export runs/one OUT" in out
    written = json.loads(Path("runs/one/config.json").read_text())
    assert written["schedule"]["tokens"] == config.schedule.tokens
    assert written["optimizer"]["lr"] == 4e-3
    code, out, _ = ask("report", "runs/one", "--out", "page.html", "--title", "A title")
    assert (code, out) == (0, "Report: page.html\n")
    assert "<h1>A title</h1>" in Path("page.html").read_text()
    code, out, complaints = ask("export", "runs/one", "exported")
    assert (code, complaints) == (0, "")
    assert out.startswith("exported: FalconH1ForCausalLM of 44,972 parameters, step 3\n")
    assert (Path("exported") / "model.safetensors").is_file()
    code, out, complaints = ask(*command_of(config))
    assert code == 1
    assert "runs/one holds a run already" in complaints


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts(ask, data):
    config = small_run(data, Path("run"), steps=12)
    killed_after(config, 6)
    code, out, _ = ask(*command_of(replace(config, resume=True)))
    assert code == 0
    assert re.search(r"^Done in \d+s in all\. Metrics and checkpoints: run$", out, re.M)
    code, out, _ = ask(*command_of(replace(config, out=Path("whole"), name="run")))
    assert code == 0
    assert re.search(r"^Done in \d+s\. Metrics and checkpoints: whole$", out, re.M)


def test_a_dry_run_shows_and_writes_nothing(ask, data):
    code, out, complaints = ask(*command_of(small_run(data, Path("run"), steps=3)), "--dry-run")
    assert (code, complaints) == (0, "")
    for part in ("full placement for HybridLM", "Run: 3 steps", "Memory on cpu", "First batch: 4"):
        assert part in out
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("where", ["TrainStep.gradients", "build_model"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 1 GiB."),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
    ],
)
def test_too_little_memory_is_said_with_what_helps(ask, data, monkeypatch, where, kind, text):
    import torch

    def full(*_):
        raise getattr(torch, kind, RuntimeError)(f"{text}\nAnd more.")

    monkeypatch.setattr(f"learnable_multipliers.pretrain.trainer.trainer.{where}", full)
    code, _, complaints = ask(*command_of(small_run(data, Path("run"), steps=3)))
    assert code == 1
    assert f"{text} Give --data.micro-batch-seq" in complaints


def test_a_preparation_says_what_it_left_out(ask):
    folder = Path("texts")
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text {number}" if number else "")
    for name in ("one.json", "two.json", "three"):
        (folder / name).write_text("{}")
    line = ["data", "prepare", "texts", "--vocab-size", "257", "--valid-fraction", "0.2"]
    code, out, complaints = ask(*line, "--out", "some")
    assert (code, complaints) == (0, "")
    assert "files of other kinds in the folders: 2 .json, 1 no suffix. To read one" in out
    assert "left out, documents without text: 1" in out
    assert "Train on it: lrm train tiny --data.path some --model.vocab-size 257" in out
    code, out, _ = ask(*line[:-1], "0", "--out", "none")
    assert code == 0
    assert "Nothing is held out, but lrm train needs text to evaluate on" in out
    assert "Train on it" not in out


# -- signals and pipes ------------------------------------------------------------------------


def wait_for_lines(process, path, count):
    """Wait until a process has written so many lines."""
    until = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_a_reader_that_has_enough_is_no_error(monkeypatch):
    # Held back to the end, output fails when nobody looks any more.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    read, write = os.pipe()
    os.close(read)
    line = [*LRM, "train", "--help"]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_a_run(ask, data):
    config = small_run(data, Path("whole"), steps=12, name="run")
    config = replace(config, runtime=replace(config.runtime, num_threads=1))
    read, write = os.pipe()
    line = [*LRM, *command_of(config)]
    process = start(line, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    _, complaints = process.communicate(timeout=120)
    assert (process.returncode, complaints) == (0, "")
    assert Path("whole/checkpoints/step-00000012").is_dir()


@pytest.mark.slow
def test_a_terminal_that_is_closed_leaves_a_checkpoint(ask, data):
    config = small_run(data, Path("whole"), steps=400, name="run")
    config = replace(config, runtime=replace(config.runtime, num_threads=1))
    primary, secondary = os.openpty()
    process = start([*LRM, *command_of(config)], terminal=secondary)
    os.close(secondary)
    wait_for_lines(process, Path("whole/metrics.jsonl"), 6)
    # What is written to it fails from now on, and SIGHUP comes.
    os.close(primary)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    step = max(checkpoints.steps(Path("whole/checkpoints")))
    assert 1 < step < 400


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_resume_ends_where_the_whole_run_ends(ask, data, number):
    config = small_run(data, Path("whole"), steps=40, name="run")
    config = replace(config, runtime=replace(config.runtime, num_threads=1))
    assert ask(*command_of(config))[0] == 0
    process = start(
        [*LRM, *command_of(replace(config, out=Path("a part")))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_lines(process, Path("a part/metrics.jsonl"), 6)
    process.send_signal(number)
    out, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (128 + number, "")
    step = int(re.search(rf"^{number.name}: saving step (\d+)$", out, re.M)[1])
    assert 1 < step < 40
    kept = sorted(path.name for path in Path("a part/checkpoints").iterdir())
    assert kept[-1] == f"step-{step:08d}"
    again = shlex.split(re.search(r"^Resume with: lrm (.*)$", out, re.M)[1])
    assert again[-1] == "--resume"
    code, out, complaints = ask(*again)
    assert (code, complaints) == (0, "")
    assert f"resumed from step {step}" in out
    for file in ("model.safetensors", "optimizer.safetensors"):
        last = Path("checkpoints/step-00000040") / file
        assert ("a part" / last).read_bytes() == ("whole" / last).read_bytes()


def test_a_message_is_one_line_whatever_the_path(ask):
    code, _, said = ask("diagnose", "a\nb\x1b[31m\udcff")
    assert code == 1
    assert "a b\\x1b[31m\\udcff is neither a run nor a checkpoint" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("word", ["x" * 5000, "1"])
def test_a_usage_error_is_short_whatever_the_word(capsys, word):
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--steps", "1", "--", word, *["--unknown"] * 300])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert "Unrecognized options" in lines[0]
    assert len(lines) == 30
