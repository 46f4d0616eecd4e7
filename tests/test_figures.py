"""The figures of commands show what the commands print."""

import json
import math

import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn

import learnable_multipliers as lrm
from learnable_multipliers.report.figures import diagnosis, random_walk, save, symmetry_map
from learnable_multipliers.report.style import COLOURS
from runs import small_run, trained


def test_a_walk_has_its_three_curves():
    steps = [
        {"step": step, "simulated": 0.1 * step, "expected": 0.11 * step, "equilibrium": None}
        for step in range(1, 6)
    ]
    steps[-1]["equilibrium"] = 0.7
    axes = random_walk("AdamW", steps).axes[0]
    for line, name in zip(axes.lines, ("simulated", "expected", "equilibrium"), strict=True):
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
        drawn = [None if math.isnan(y) else y for y in line.get_ydata()]
        assert drawn == [row[name] for row in steps]


def reading(kind, log_ratio, indicator, verdict):
    return {"kind": kind, "log_ratio": log_ratio, "indicator": indicator, "verdict": verdict}


def test_a_diagnosis_has_every_tensor_that_has_both_numbers():
    found = [
        reading("matrix", 0.0, 1.0, "trapped"),
        reading("multiplier", math.log(3), 5.0, "free"),
        reading("vector", -0.5, 0.7, "open"),
        reading("vector", None, 0.7, "open"),
        reading("matrix", 0.1, None, "open"),
    ]
    axes = diagnosis("run, step 5", found).axes[0]
    marks = axes.lines[2:]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks] == [
        pytest.approx(pair) for pair in ((1.0, 1.0), (3.0, 5.0), (math.exp(-0.5), 0.7))
    ]
    assert [line.get_fillstyle() for line in marks] == ["full", "none", "left"]
    assert [to_hex(line.get_color()) for line in marks] == [
        COLOURS[ink] for ink in ("ink", "blue", "rust")
    ]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(6, 8, bias=False)
        self.down_proj = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.relu(self.up_proj(x)) ** 2)


def test_a_map_has_a_square_for_each_axis_with_its_power():
    found = lrm.find_symmetries(Mlp(), lrm.plan(Mlp()), torch.randn(32, 6))
    powers = found.powers()
    words = "rows of up_proj against columns of down_proj to the power 2, per channel"
    (channels,) = (told for told in powers if told.startswith(words))
    assert powers[channels] == {"rows of up_proj": 1.0, "columns of down_proj to the power 2": -2.0}
    axes = symmetry_map("an MLP", powers).axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {
        (list(powers)[round(text.get_position()[0])], rows[round(text.get_position()[1])]): float(
            text.get_text()
        )
        for text in axes.texts
    }
    assert drawn == {(w, axis): p for w in powers for axis, p in powers[w].items()}


def test_commands_write_their_figures_beside_what_they_print(ask, data, tmp_path):
    noise = ("simulate", "--steps", "30", "--shape", "8", "8")
    for name, start in (("walk.svg", b"<?xml"), ("walk.PNG", b"\x89PNG"), ("a/b.pdf", b"%PDF")):
        code, text, _ = ask(*noise, "--plot", tmp_path / name)
        assert code == 0
        assert text == ask(*noise)[1]
        assert (tmp_path / name).read_bytes().startswith(start)
    trained(small_run(data, tmp_path / "run", steps=6))
    plain = ask("diagnose", tmp_path / "run", "--json")[1]
    assert ask("diagnose", tmp_path / "run", "--json", "--plot", tmp_path / "d.svg")[1] == plain
    picture = (tmp_path / "d.svg").read_text()
    assert picture.startswith("<?xml")
    assert "run, step 6" in picture
    assert json.loads(plain)["step"] == 6


@pytest.mark.parametrize("command", ["simulate", "diagnose run", "symmetries tiny"])
def test_a_figure_of_no_known_kind_is_refused_before_any_work(ask, command):
    code, _, complaints = ask(*command.split(), "--plot", "here.gif")
    assert code == 1
    assert "a figure is written as .svg, .png, .pdf, by the ending of its name" in complaints


def test_a_figure_is_saved_on_a_page(tmp_path):
    path = tmp_path / "new" / "walk.svg"
    row = {"step": 1, "simulated": 1.0, "expected": 1.0, "equilibrium": 1.0}
    save(random_walk("SGD", [row, row | {"step": 2}]), path)
    assert COLOURS["page"] in path.read_text()
