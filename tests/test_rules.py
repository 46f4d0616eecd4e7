"""Rules in words: what a line stands for, from the command line and from a file."""

import os
from pathlib import Path

import pytest

from learnable_multipliers import Rule
from learnable_multipliers.pretrain.rules import parse_rule, parse_rules, read_rules

LINES = {
    ". only=head kind=scalar": Rule(".", "scalar", only="head"),
    r"mlp\.up_proj\.weight$ kind=none": Rule(r"mlp\.up_proj\.weight$", "none"),
    "gate kind=row+col scale=log init=0.5 init_keeps=raw": Rule(
        "gate", "row+col", scale="log", init=0.5, init_keeps="raw"
    ),
    "q_proj init=fold optional=true": Rule("q_proj", init="fold", optional=True),
    "norm lr_scale=2e-1 weight_decay=0": Rule("norm", lr_scale=0.2, weight_decay=0.0),
    "qkv split=query:64,key:32,value:32 repeats=4 transposed=false": Rule(
        "qkv", split={"query": 64, "key": 32, "value": 32}, repeats=4, transposed=False
    ),
    "proj role=down train=multipliers": Rule("proj", role="down", train="multipliers"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_stands_for_a_rule(line):
    assert parse_rule(line) == LINES[line]


def test_a_file_stands_for_its_rules(tmp_path):
    file = tmp_path / "rules.txt"
    lines = [f"  {line}   # for a reason" for line in LINES]
    file.write_text("\n".join(["# the head first", *lines, "", "   "]))
    assert read_rules(["x kind=none", f"@{file}", "y kind=none"]) == (
        "x kind=none",
        *LINES,
        "y kind=none",
    )
    assert parse_rules([f"@{file}"]) == list(LINES.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "begins with no pattern"),
        ("only=head kind=row", "begins with no pattern .* write . for all of them"),
        (".", "'.' sets nothing: a rule is a pattern and settings, together in quotes"),
        (". kind", "'kind' is not a setting; write key=value with one of kind, only, role"),
        (". knid=row", "'knid=row' is not a setting"),
        (". kind=rows", "unknown kind 'rows'; choose from none, scalar, per-head, row"),
        (". kind=row kind=col", "has kind twice"),
        (". only=haed kind=row", "unknown role 'haed'; closest: head"),
        (". lr_scale=fast", "lr_scale=fast: not a number"),
        (". lr_scale=-1", "lr_scale must be a number of at least 0, got -1"),
        (". weight_decay=nan", "weight_decay must be a number of at least 0, got nan"),
        (". init=x", "init=x: not a number"),
        (". scale=exp", "scale is 'linear' or 'log', got 'exp'"),
        (". optional=yes", "optional=yes: not true or false"),
        (". repeats=0", "repeats=0: not a whole number of at least 1"),
        (". split=query:64,query:64", "not roles with their rows"),
        (". split=query", "not roles with their rows"),
        ("( kind=row", "is not a regular expression: missing"),
        ("a{99999999999} kind=row", "is not a regular expression: the repetition"),
        ("@other kind=row", "cannot name another one"),
    ],
)
def test_a_line_that_is_no_rule_raises_with_the_reason(line, message):
    with pytest.raises(ValueError, match=message):
        parse_rule(line)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"up kind=none\ngate knid=row\n", "rules.txt, line 2: rule 'gate knid=row'"),
        (b"# nothing\n", "rules.txt holds no rule"),
        (b"\xff\xfe", "rules.txt cannot be read: it is not a text file"),
        (b"x kind=row\n" * 100_000, "rules.txt have more than 1,048,576 bytes"),
        (b"@rules.txt\n", "line 1: rule '@rules.txt': a file of rules cannot name another"),
    ],
)
def test_a_file_that_holds_no_rules_raises_with_its_line(tmp_path, content, message):
    file = tmp_path / "rules.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rules([f"@{file}"])


@pytest.mark.parametrize("name", ["nowhere.txt", "", "pipe", "loop"])
def test_a_file_that_is_not_there_is_named(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    with pytest.raises(ValueError, match=f"the rules in {name or Path()} cannot be read"):
        read_rules([f"@{name}"])
