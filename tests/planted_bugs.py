"""Bugs of every class planted into `lrm`, each to be found by the fuzzer; prints its verdicts."""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import fuzz
import fuzz_sandbox
from fuzz_inputs import INPUTS, NEWEST, VALID

from learnable_multipliers.cli import diagnosis, models, runs, simulate
from learnable_multipliers.pretrain.checkpoint import manifest


def flip_last_bit(here: Path) -> None:
    path = here / NEWEST / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def nothing(here: Path) -> None:
    """Change no file."""


def raise_key_error(arguments) -> None:
    {}["missing"]


def loop(arguments) -> None:
    while True:
        pass


def write_half(arguments) -> None:
    Path(".new.12345678.partial").mkdir()
    raise ValueError("the disk is full")


def write_elsewhere(arguments) -> None:
    Path("mine/report.html").write_text("ours")


def say_much(arguments) -> None:
    print("one line", file=sys.stderr)
    raise ValueError("and another")


# Cause -> the command, what it does instead, and the file that was changed before.
PLANTED = {
    "traceback": ("plan", (models, "plan", raise_key_error), None),
    "hang": ("simulate", (simulate, "simulate", loop), None),
    "signal": ("plan", (models, "plan", lambda arguments: os.abort()), None),
    "exit code": ("plan", (models, "plan", lambda arguments: sys.exit(3)), None),
    "leftovers": ("export", (runs, "export", write_half), None),
    "changed files": ("report", (runs, "report", write_elsewhere), None),
    "message": ("diagnose", (diagnosis, "diagnose", say_much), None),
    # A reader that skips its checksums.
    "silent acceptance": ("export", (manifest, "problem", lambda path: None), "checkpoint model"),
}


def main() -> None:
    # The same number is the same case.
    cases = [fuzz.make_case(1, number)[0] for number in (*range(50), *range(50))]
    assert cases[:50] == cases[50:]
    patience = fuzz_sandbox.LIMIT
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = fuzz.Fuzzer(Path(folder))
        fuzzer.learn({"export": fuzzer.run_untouched("export")})
        for cause, (valid, (module, name, bug), file) in PLANTED.items():
            case = fuzz.Case(valid, [*VALID[valid].words], "planted", file)
            change = flip_last_bit if file else nothing
            assert file is None or INPUTS[file].path == f"{NEWEST}/model.safetensors"
            good = fuzzer.run(0, case, change).verdict
            before = getattr(module, name)
            setattr(module, name, bug)
            # A command that hangs is waited for; others may take long on a busy machine.
            fuzz_sandbox.LIMIT = 3.0 if cause == "hang" else patience
            bad = fuzzer.run(0, case, change).verdict
            setattr(module, name, before)
            fuzz_sandbox.LIMIT = patience
            found[cause] = [good.kind, bad.kind]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
