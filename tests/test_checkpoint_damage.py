"""Checkpoints that somebody or something has changed: noticed, named, passed over, never obeyed."""

import json
import math
import os
import pickle
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from learnable_multipliers import _serialization
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    fingerprint,
    manifest_json,
    problem,
)
from learnable_multipliers.pretrain.checkpoint.store import Checkpoint
from runs import rewritten


@pytest.fixture
def kept(tmp_path) -> Path:
    """Return a folder with good checkpoints of steps 5 and 10."""
    for step in (5, 10):
        tensors = {
            "model": {"w": torch.full((5, 3), float(step)), "b": torch.arange(3.0)},
            "optimizer": {"w/step": torch.tensor(float(step)), "w/exp_avg": torch.randn(5, 3)},
        }
        state = {"samples": 4 * step, "config": {"out": "run", "lr": 4e-3}}
        checkpoints.save(tmp_path / "kept", Checkpoint(step, state, tensors), keep=2)
    return tmp_path / "kept"


def passed_over(kept: Path) -> str:
    """Return why the newest checkpoint is not used, given that the one before it is."""
    found, (wrong,) = checkpoints.load_newest(kept)
    assert found.step == 5
    assert torch.equal(found.tensors["model"]["w"], torch.full((5, 3), 5.0))
    assert wrong.startswith(f"{kept / 'step-00000010'} cannot be used: ")
    return wrong.partition("cannot be used: ")[2]


def newest(kept: Path) -> Path:
    return kept / "step-00000010"


# -- accidents --------------------------------------------------------------------------------


def test_every_turned_bit_is_noticed_and_its_file_named(kept):
    files = sorted(newest(kept).iterdir())
    assert [file.name for file in files] == [
        MANIFEST,
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    bits = random.Random(0).sample(
        [(file, bit) for file in files for bit in range(8 * file.stat().st_size)], 200
    )
    # Some in each file, the shortest included.
    assert min(sum(file == one for file, _ in bits) for one in files) >= 10
    for file, bit in bits:
        before = file.read_bytes()
        changed = bytearray(before)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert passed_over(kept).startswith(file.name), (file.name, bit)
        file.write_bytes(before)
    assert checkpoints.load_newest(kept)[0].step == 10


def test_every_bit_of_a_manifest_counts(kept):
    file = newest(kept) / MANIFEST
    before = file.read_bytes()
    for bit in range(8 * len(before)):
        changed = bytearray(before)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        wrong = problem(newest(kept))
        assert wrong is not None, bit
        assert wrong.startswith(MANIFEST), (bit, wrong)


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "model.safetensors"])
def test_a_file_that_is_cut_short_or_gone_is_named(kept, name):
    file = newest(kept) / name
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert name in passed_over(kept)
    file.write_bytes(whole + b"\0")
    assert name in passed_over(kept)
    file.unlink()
    assert passed_over(kept).strip("'").startswith(name)
    assert "is missing" in passed_over(kept)


def test_a_file_too_many_is_named(kept):
    (newest(kept) / "notes.txt").write_text("mine")
    assert passed_over(kept) == "'notes.txt' is not in manifest.json"


def test_a_folder_with_nothing_in_it_is_passed_over(kept):
    shutil.rmtree(newest(kept))
    newest(kept).mkdir()
    assert passed_over(kept) == "manifest.json is missing"


@pytest.mark.parametrize("version", [0, 1, 3, "2", True, None])
def test_another_format_of_the_manifest_is_rejected_in_words(kept, version):
    file = newest(kept) / MANIFEST
    content = json.loads(file.read_text()) | {"format": version}
    file.write_text(json.dumps(content, indent=1) + "\n")
    assert passed_over(kept) == (
        f"{MANIFEST} is of format {version!r}, this release reads format {FORMAT}"
    )


@pytest.mark.parametrize("version", [1, 3, 2.0, None])
def test_another_format_of_the_state_is_rejected_in_words(kept, version):
    state = json.loads((newest(kept) / "state.json").read_text()) | {"format": version}
    rewritten(newest(kept), "state.json", json.dumps(state).encode())
    assert passed_over(kept) == (
        f"state.json is of format {version!r}, this release reads format {FORMAT}"
    )


def test_one_that_is_removed_while_it_is_read_makes_way_for_a_newer_one(kept, monkeypatch):
    """A run goes on while another process exports it."""
    real, removed = checkpoints.load, []

    def slow(path, like):
        if not removed:
            removed.append(path)
            for step in (15, 20):
                checkpoints.save(kept, Checkpoint(step, {}, {}), keep=2)
        return real(path, like)

    monkeypatch.setattr(checkpoints, "load", slow)
    found, wrong = checkpoints.load_newest(kept)
    assert (found.step, wrong) == (20, [])
    assert not removed[0].exists()


def test_what_was_loaded_does_not_depend_on_the_file(kept):
    found = checkpoints.load(newest(kept))
    for file in newest(kept).iterdir():
        os.truncate(file, 0)
    assert torch.equal(found.tensors["model"]["w"], torch.full((5, 3), 10.0))


# -- bad intent -------------------------------------------------------------------------------


class Payload:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "model.safetensors"])
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_under_another_name_is_not_run(kept, tmp_path, name, writer):
    mark = tmp_path / "was here"
    payload = tmp_path / "payload"
    if writer == "pickle":
        payload.write_bytes(pickle.dumps(Payload(mark)))
    else:
        torch.save({"w": Payload(mark)}, payload)
    if name == MANIFEST:
        (newest(kept) / name).write_bytes(payload.read_bytes())
    else:
        rewritten(newest(kept), name, payload.read_bytes())
    assert name in passed_over(kept)
    assert not mark.exists()


def test_a_file_of_another_kind_is_rejected_though_the_manifest_names_it(kept, tmp_path):
    mark = tmp_path / "was here"
    rewritten(newest(kept), "optimizer.pt", pickle.dumps(Payload(mark)))
    assert (
        passed_over(kept) == f"{MANIFEST} names 'optimizer.pt', which is not a file of a checkpoint"
    )
    assert not mark.exists()


def with_files(kept: Path, **changes: object) -> None:
    """Rewrite the manifest of the newest checkpoint, its checksum included."""
    path = newest(kept) / MANIFEST
    files = json.loads(path.read_text())["files"] | changes
    path.write_bytes(manifest_json(files))


@pytest.mark.parametrize("where", ["../secret", "{}/secret", "a/../../secret", "", ".", ".."])
def test_names_that_lead_out_of_the_folder_are_not_followed(kept, where, monkeypatch):
    secret = kept / "secret.safetensors"
    secret.write_bytes(save({"w": torch.ones(1)}))
    opened = []
    real = Path.open

    def watched(path, *arguments, **settings):
        opened.append(path)
        return real(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", watched)
    with_files(kept, **{f"{where.format(kept)}.safetensors": fingerprint(secret)})
    opened.clear()
    assert "is missing" in passed_over(kept)
    assert opened
    assert all(path.parent in (newest(kept), kept / "step-00000005") for path in opened)


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "model.safetensors"])
def test_links_and_pipes_are_not_opened(kept, tmp_path, name):
    file = newest(kept) / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert passed_over(kept) == f"{name} is not a plain file"
    file.unlink()
    # Opened, it would wait for a writer that never comes.
    os.mkfifo(file)
    assert passed_over(kept) == f"{name} is not a plain file"


def test_what_a_link_leads_to_is_not_removed(kept, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (kept / ".step-00000007.0123abcd").symlink_to(tmp_path / "precious")
    (kept / "step-00000003").symlink_to(tmp_path / "precious")
    checkpoints.save(kept, Checkpoint(15, {}, {}), keep=2)
    assert checkpoints.steps(kept) == [10, 15]
    assert (tmp_path / "precious" / "file").read_text() == "mine"


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HOSTILE_TENSORS = {
    "no header": b"\x01",
    "length of all memory": safetensors({}, length=(1 << 64) - 1),
    "length of 4 GB": safetensors({}, length=1 << 32),
    "length beyond the end": safetensors({}, length=100),
    "header that is no JSON": safetensors(b"\x80\x04\x95"),
    "header that is a list": safetensors([]),
    "deep header": safetensors(b'{"w":' * 50_000 + b"1" + b"}" * 50_000),
    "overlap": safetensors(
        {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12)
    ),
    "hole": safetensors({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, bytes(12)),
    "beyond the end": safetensors({"w": tensor("F32", [4], 0, 16)}, bytes(8)),
    "data that nothing names": safetensors({"w": tensor("F32", [1], 0, 4)}, bytes(64)),
    "negative offset": safetensors({"w": tensor("F32", [1], -4, 0)}, bytes(4)),
    "offsets backwards": safetensors({"w": tensor("F32", [1], 4, 0)}, bytes(4)),
    "negative shape": safetensors({"w": tensor("F32", [-1], 0, 4)}, bytes(4)),
    "shape that overflows": safetensors({"w": tensor("F32", [1 << 62, 4], 0, 4)}, bytes(4)),
    "huge empty shape": safetensors({"w": tensor("F32", [1 << 62, 1 << 62, 0], 0, 0)}),
    "shape that does not fit": safetensors({"w": tensor("F32", [3], 0, 4)}, bytes(4)),
    "unknown type": safetensors({"w": tensor("PICKLE", [1], 0, 4)}, bytes(4)),
    "type that torch has not": safetensors({"w": tensor("F6_E2M3", [4], 0, 3)}, bytes(3)),
    "one name twice": safetensors(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "one name twice, for the same data": safetensors(
        b'{"w":{"dtype":"F32","shape":[5,3],"data_offsets":[0,60]},'
        b'"w":{"dtype":"F32","shape":[3,5],"data_offsets":[0,60]}}',
        bytes(60),
    ),
    "a key twice within": safetensors(
        b'{"w":{"dtype":"F32","shape":[5,3],"shape":[3,5],"data_offsets":[0,60]}}', bytes(60)
    ),
    "metadata twice": safetensors(
        b'{"__metadata__":{"pieces":"{}"},"__metadata__":{},'
        b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "metadata that is no text": safetensors({"__metadata__": {"a": 1}}),
    "metadata that is a list": safetensors({"__metadata__": []}),
    **{
        f"numbers of type {dtype}": safetensors({"w": tensor(dtype, [8], 0, size)}, bytes(size))
        for dtype, size in {
            **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E3M2": 6},
            **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "U64": 64, "C64": 64},
        }.items()
    },
}


@pytest.mark.parametrize("what", HOSTILE_TENSORS)
def test_absurd_tensor_files_are_rejected(kept, what):
    rewritten(newest(kept), "model.safetensors", HOSTILE_TENSORS[what])
    assert passed_over(kept).startswith("model.safetensors cannot be read: ")


def piece(shape, *start, dtype="F32", whole=(4, 3)) -> bytes:
    """Return a file of one piece of a tensor."""
    size = 4 * math.prod(shape)
    boxes = {"w": {"shape": list(whole), "start": list(start)}}
    described = {"w": tensor(dtype, list(shape), 0, size)}
    return safetensors(described | {"__metadata__": {"pieces": json.dumps(boxes)}}, bytes(size))


ODD_PIECES = {
    "as many numbers, but overlapping": [piece((3, 3), 0, 0), piece((1, 3), 2, 0)],
    "overlapping in a column": [piece((4, 2), 0, 0), piece((2, 2), 2, 1)],
    "the same one twice": [piece((2, 3), 0, 0), piece((2, 3), 0, 0)],
    "a part missing": [piece((2, 3), 0, 0), piece((1, 3), 2, 0)],
    "of two tensors": [piece((2, 3), 0, 0), piece((2, 3), 2, 0, whole=(5, 3))],
    "of two types": [piece((2, 3), 0, 0), piece((2, 3), 2, 0, dtype="I32")],
    "outside": [piece((2, 3), 0, 0), piece((2, 3), 3, 0)],
    "below the start": [piece((2, 3), 0, 0), piece((2, 3), -1, 0)],
    "of fewer axes": [piece((2, 3), 0, 0), piece((2, 3), 2)],
    "places that are text": [piece((2, 3), 0, 0), piece((2, 3), "2", "0")],
    "places that are fractions": [piece((2, 3), 0, 0), piece((2, 3), 2.0, 0)],
    "places that are nothing": [piece((2, 3), 0, 0), piece((2, 3), None, None)],
    "places of nothing": [
        piece((2, 3), 0, 0),
        safetensors(
            {"w": tensor("F32", [2, 3], 0, 24), "__metadata__": {"pieces": "{}"}}, bytes(24)
        ),
    ],
    "places that are a list": [
        piece((2, 3), 0, 0),
        safetensors(
            {"w": tensor("F32", [2, 3], 0, 24), "__metadata__": {"pieces": "[]"}}, bytes(24)
        ),
    ],
}


def in_pieces(kept: Path, files: list[bytes]) -> None:
    (newest(kept) / "model.safetensors").unlink()
    listing = newest(kept) / MANIFEST
    named = json.loads(listing.read_text())["files"]
    del named["model.safetensors"]
    listing.write_bytes(manifest_json(named))
    for rank, content in enumerate(files):
        rewritten(newest(kept), f"model-{rank:05d}.safetensors", content)


@pytest.mark.parametrize("what", ODD_PIECES)
def test_pieces_that_do_not_make_a_tensor_are_rejected(kept, what):
    in_pieces(kept, ODD_PIECES[what])
    wrong = passed_over(kept)
    assert wrong.startswith("model-0000")
    assert " cannot be read: " in wrong
    assert len(wrong.splitlines()) == 1


def test_pieces_that_make_a_tensor_are_read(kept):
    in_pieces(kept, [piece((2, 3), 0, 0), piece((2, 1), 2, 2), piece((2, 2), 2, 0)])
    assert checkpoints.load_newest(kept)[0].tensors["model"]["w"].shape == (4, 3)


HOSTILE_JSON = {
    "deep list": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep object": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "long number": b'{"step": ' + b"9" * 100_000 + b"}",
    "large exponent": b'{"format": 2, "step": 10, "seconds": 1e999}',
    "NaN": b'{"format": 2, "step": 10, "seconds": NaN}',
    "infinity": b'{"format": 2, "step": 10, "seconds": -Infinity}',
    "a key twice": b'{"format": 2, "step": 5, "step": 10}',
    "a key twice within": b'{"format": 2, "step": 10, "config": {"lr": 1, "lr": 2}}',
    "two objects": b'{"format": 2, "step": 10}{}',
    "not UTF-8": b'{"format": 2, "step": 10, "a": "\xff"}',
    "another encoding": '{"format": 2, "step": 10}'.encode("utf-16"),
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE_JSON)
@pytest.mark.parametrize("name", ["state.json", MANIFEST])
def test_absurd_json_is_rejected(kept, name, what):
    if name == MANIFEST:
        (newest(kept) / MANIFEST).write_bytes(HOSTILE_JSON[what])
    else:
        rewritten(newest(kept), name, HOSTILE_JSON[what])
    assert passed_over(kept).startswith(name)


@pytest.mark.parametrize(
    "entry",
    [
        {"bytes": 1 << 62, "sha256": "0" * 64},
        {"bytes": 10**4000, "sha256": "0" * 64},
        {"bytes": -1, "sha256": "0" * 64},
        {"bytes": 1e300, "sha256": "0" * 64},
        {"bytes": "many", "sha256": "0" * 64},
        {"bytes": None, "sha256": None},
        {"bytes": [], "sha256": {}},
        {"sha256": "0" * 64},
        [],
        None,
    ],
)
def test_absurd_claims_of_a_manifest_are_rejected_and_nothing_is_allocated_for_them(kept, entry):
    with_files(kept, **{"model.safetensors": entry})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert passed_over(kept).startswith(("model.safetensors has", MANIFEST))
    # In kB, on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("name", ["state.json", MANIFEST])
def test_a_file_of_plain_data_as_large_as_a_disk_is_not_read(kept, name, monkeypatch):
    monkeypatch.setattr(_serialization.read_bytes, "__defaults__", (1 << 20,))
    file = newest(kept) / name
    os.truncate(file, (1 << 20) + 1)
    if name == "state.json":
        with_files(kept, **{name: fingerprint(file)})
    assert passed_over(kept) == f"{name} has more than 1,048,576 bytes"


def test_what_json_has_no_word_for_is_not_written(kept):
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoints.save(kept, Checkpoint(15, {"loss": float("nan")}, {}), keep=2)
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000005", "step-00000010"]
