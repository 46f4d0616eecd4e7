"""The command `lrm`."""

import re

import pytest

from learnable_multipliers.cli import main


def test_demo_trains_both_models_from_one_start(capsys):
    main(["demo", "--steps", "3"])
    text = capsys.readouterr().out
    losses = [float(number) for number in re.findall(r"multipliers +(\d\.\d{4})", text)]
    assert len(losses) == 2
    assert all(4.0 < loss < 5.6 for loss in losses)  # three steps from a uniform guess, ln 256
    assert "16 of 17 matrices carry multipliers: 2,816 numbers" in text
    assert "22 tensors under their own names: nothing to merge" in text


@pytest.mark.parametrize("arguments", [[], ["demo", "--steps", "0"], ["dance"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: lrm" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(r"lrm \d+\.\d+\.\d+\n", capsys.readouterr().out)
