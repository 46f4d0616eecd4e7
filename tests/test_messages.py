"""Advice that can be followed: what a message tells to do exists."""

import ast
import json
import re
from pathlib import Path

import pytest

import learnable_multipliers
from learnable_multipliers.cli import COMMANDS
from learnable_multipliers.pretrain.config import SpikeConfig
from learnable_multipliers.pretrain.trainer.spikes import (
    skipped_steps_message,
    spike_ignored_message,
)

SOURCE = Path(learnable_multipliers.__file__).parent
# Options of git, torchrun, containers and torchtitan, in commands that we use or write about.
OF_OTHERS = {
    *("--error-unmatch", "--porcelain", "--untracked-files", "--others", "--exclude-standard"),
    *("--nproc-per-node", "--no-python", "--shm-size", "--module", "--config"),
}
# Before the first word is known to be a command or recipe.
OF_ALL = {"--help", "--version"}


def mentioned() -> dict[str, str]:
    """Return every option in a string of the source, and where one of them is."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for option in re.findall(r"(?<![-\w])--[a-z][\w.-]*\w", node.value):
                    found[option] = f"{path.relative_to(SOURCE)}:{node.lineno}"
    return found


def test_messages_name_only_options_that_exist(ask):
    known = set()
    for command in COMMANDS:
        words = (*command.split(), "tiny") if command == "train" else command.split()
        code, help_text, _ = ask(*words, "--help")
        assert code == 0
        # Where an option is listed, and not in sentences about it.
        known |= set(re.findall(r"(?m)^\W*(--[a-z][\w.-]*\w)", help_text))
    named = mentioned()
    assert len(named) > 30
    unknown = {o: where for o, where in named.items() if o not in known | OF_OTHERS | OF_ALL}
    assert unknown == {}
    assert named.keys() >= OF_OTHERS


@pytest.mark.parametrize(("saved", "resumes"), [([], False), ([100], True)])
def test_a_diverged_run_is_advised_to_resume_only_with_a_checkpoint(saved, resumes):
    ended = skipped_steps_message(120, 20, saved)
    assert ("--resume" in ended) == resumes
    assert ("there is no checkpoint" in ended) != resumes
    assert ("resume with" in spike_ignored_message(SpikeConfig(), saved)) == resumes
    assert "a lower optimizer.lr" in ended


@pytest.mark.parametrize("command", ["plan", "symmetries"])
def test_a_model_with_code_of_its_own_is_reported_in_our_words(ask, command, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    Path("own").mkdir()
    described = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    Path("own/config.json").write_text(json.dumps(described))
    code, _, complaints = ask(command, "own")
    assert code == 1
    assert complaints == (
        f"lrm {command}: own contains code, which lrm does not run: load it in "
        "Python and give it to learnable_multipliers.plan or find_symmetries"
    )


@pytest.mark.parametrize(
    "described", [{"model_type": "none"}, [], {"model_type": "llama", "hidden_size": "wide"}]
)
def test_a_model_that_transformers_does_not_know_is_one_line(ask, described):
    pytest.importorskip("transformers")
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps(described))
    code, _, complaints = ask("plan", "odd")
    assert code == 1
    assert complaints.startswith("lrm plan: odd/config.json cannot be loaded: ")
    assert len(complaints.splitlines()) == 1
