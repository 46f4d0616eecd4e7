"""What a release says about itself is the same everywhere, and nothing is left out of it."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest

import learnable_multipliers as lrm

ROOT = Path(__file__).parents[1]


def test_changelog_and_citation_name_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == lrm.__version__


def test_folders_that_the_documents_write_to_are_ignored():
    ignored = (ROOT / ".gitignore").read_text().split()
    # At the root alone: the package has folders of such names.
    assert {"/data/", "/demo/", "/experiments/", "/out/", "/runs/"} <= {*ignored}
    assert "data/" not in ignored


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(tmp_path):
    build = pytest.importorskip("build")
    import pyproject_hooks

    # In a copy: what an earlier build left behind would be packed again.
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    runner = pyproject_hooks.quiet_subprocess_runner
    wheel = build.ProjectBuilder(copy, runner=runner).build("wheel", tmp_path)
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    there = {
        str(path.relative_to(source))
        for path in (source / "learnable_multipliers").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
