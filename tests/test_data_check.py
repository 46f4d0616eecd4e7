"""Data that changed are noticed: tokens, tokenizer and manifest, between runs and during one."""

import hashlib
import json
import os
import shutil
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from learnable_multipliers._checksum import add_checksum, read_verified
from learnable_multipliers.pretrain.checkpoint import store as checkpoints
from learnable_multipliers.pretrain.config import CheckpointConfig, ParallelConfig
from learnable_multipliers.pretrain.data import check
from learnable_multipliers.pretrain.data.check import DataCheck
from learnable_multipliers.pretrain.data.prepare import PrepareConfig, prepare
from learnable_multipliers.pretrain.data.shards import TokenDataset
from learnable_multipliers.pretrain.data.training_data import TrainingData, default_corpus
from learnable_multipliers.pretrain.distributed import World
from learnable_multipliers.pretrain.export import export
from learnable_multipliers.pretrain.trainer.trainer import Trainer
from ranks import Ranks
from runs import LENGTH, LLAMA, killed_after, small_run, trained


@pytest.fixture
def own(data, tmp_path):
    """A copy of the data that may be changed."""
    return shutil.copytree(data, tmp_path / "own")


@pytest.fixture
def no_wait(monkeypatch):
    """Remember files that were made just now, too."""
    monkeypatch.setattr(check, "_SETTLED", -1e9)


@pytest.fixture
def held(monkeypatch):
    """An event that the check of the data waits for."""
    event, verify = threading.Event(), check.verify_sha256

    def slow(path, expected):
        assert event.wait(20)
        verify(path, expected)

    monkeypatch.setattr(check, "verify_sha256", slow)
    yield event
    event.set()


def run_of(data, out, **changes):
    return small_run(data, out, model=LLAMA, **changes)


def error_of(config):
    """Return what ends a run."""
    with closing(Trainer(config)) as trainer, pytest.raises((ValueError, OSError)) as caught:
        trainer.train()
    return str(caught.value)


def shuffle(path):
    """Shuffle the tokens of a shard in place; size and time of modification stay as they are."""
    before = path.stat()
    tokens = np.memmap(path, "<u2", mode="r+")
    tokens[:] = np.random.default_rng(0).permutation(tokens)
    tokens.flush()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def edit(folder, change, *, resealed):
    """Change the manifest of a dataset, and its checksum too if asked."""
    content = read_verified(folder / "manifest.json")
    old = add_checksum(content)
    change(content)
    new = add_checksum(content) if resealed else old | content
    (folder / "manifest.json").write_text(json.dumps(new))


def swap_ids(path):
    """Swap the ids of two letters in a tokenizer.json."""
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(content))


# -- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train-00000.bin", "valid-00000.bin"])
def test_tokens_shuffled_between_stop_and_resume_end_the_run(own, tmp_path, name):
    config = run_of(own, tmp_path / "run")
    killed_after(config, 6)
    shuffle(own / name)
    error = error_of(replace(config, resume=True))
    assert f"{own / name} is damaged: its SHA-256 is" in error
    assert "\n" not in error
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [5]


def test_tokens_changed_before_a_run_end_it_before_its_first_checkpoint(own, tmp_path):
    shuffle(own / "train-00000.bin")
    assert "train-00000.bin is damaged" in error_of(run_of(own, tmp_path / "run"))
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == []


def test_tokens_changed_during_the_run_are_in_no_checkpoint(own, tmp_path):
    trainer = Trainer(run_of(own, tmp_path / "run"))
    steps = trainer.steps()
    for _ in range(7):
        next(steps)
    shuffle(own / "train-00000.bin")
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged"):
        list(steps)
    trainer.close()
    assert trainer.step == 10
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [5]


def test_data_removed_or_copied_again_during_the_run_do_no_harm(own, tmp_path):
    trainer = Trainer(run_of(own, tmp_path / "run"))
    for step in trainer.steps():
        if step == 6:
            shutil.copy(own / "train-00000.bin", own / "new")
            (own / "new").replace(own / "train-00000.bin")
            (own / "valid-00000.bin").unlink()
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [10, 12]


def test_a_file_replaced_before_it_was_checked_ends_the_run(own):
    """What is mapped is the old file, and what would be hashed is the new one."""
    data = TrainingData(own, LENGTH, 0)
    path = own / "train-00000.bin"
    shutil.copy(path, own / "new")
    (own / "new").replace(path)
    found = data.check()
    found.start()
    found.wait()
    with pytest.raises(ValueError, match=r"train-00000\.bin was replaced after"):
        found.raise_if_failed()


def test_a_shard_that_cannot_be_read_is_named(own, monkeypatch):
    def broken(path, expected):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(check, "verify_sha256", broken)
    found = TrainingData(own, LENGTH, 0).check()
    found.start()
    found.wait()
    with pytest.raises(OSError, match=r"own/train-00000\.bin cannot be read: Input/output error"):
        found.raise_if_failed()


@pytest.mark.parametrize("name", ["train-00000.bin", "valid-00000.bin"])
def test_ids_beyond_the_vocabulary_are_an_error_that_names_the_file(own, tmp_path, held, name):
    tokens = np.memmap(own / name, "<u2", mode="r+")
    tokens[:] = 257
    tokens[0] = 0
    tokens.flush()
    # A checkpoint would wait for the check, which is held here.
    error = error_of(run_of(own, tmp_path / "run", checkpoint=CheckpointConfig(every=0)))
    assert f"{own / name} holds the token 257, beyond the vocabulary of 257" in error


def test_the_file_of_a_bad_id_is_found_among_several(tmp_path):
    (tmp_path / "text.txt").write_text("abc " * 100)
    prepare(
        PrepareConfig(
            sources=(str(tmp_path / "text.txt"),),
            out=tmp_path / "data",
            vocab_size=257,
            valid_fraction=0,
            shard_tokens=100,
        )
    )
    tokens = np.memmap(tmp_path / "data" / "train-00002.bin", "<u2", mode="r+")
    tokens[0] = 300
    tokens.flush()
    dataset = TokenDataset(tmp_path / "data", "train")
    assert len(dataset.tokens(0, 200)) == 200
    assert len(dataset.tokens(201, len(dataset))) == len(dataset) - 201
    with pytest.raises(ValueError, match=r"train-00002\.bin holds the token 300"):
        dataset.tokens(50, 250)


# -- when the check has ended -----------------------------------------------------------------


def test_no_checkpoint_is_published_before_the_check_has_ended(own, tmp_path, held):
    told = []

    def observe(record):
        if record["kind"] == "warning" and "waiting" in record["text"]:
            told.append((record["step"], checkpoints.steps(tmp_path / "run" / "checkpoints")))
            held.set()

    # A copy: of the shared data the cache may know by now.
    trainer = Trainer(run_of(own, tmp_path / "run"), observe)
    assert trainer.train() == "finished"
    # Five steps went by before; the user is told once.
    assert told == [(5, [])]
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [10, 12]


def test_the_end_of_a_run_waits_for_the_check(own, tmp_path, held):
    config = run_of(own, tmp_path / "run", steps=3)
    held.set()
    trained(config)
    held.clear()
    shuffle(own / "valid-00000.bin")
    threading.Timer(1.0, held.set).start()
    # Nothing is left to train or save, and still it is not done.
    assert "valid-00000.bin is damaged" in error_of(replace(config, resume=True))


@pytest.mark.slow
def test_ranks_end_together_if_the_data_of_one_are_wrong(own, data, tmp_path):
    shuffle(own / "train-00000.bin")
    ranks = Ranks(2)
    try:
        config = replace(run_of(data, tmp_path / "run"), parallel=ParallelConfig(timeout=30))
        found = ranks.run(errors_here, config, [data, own])
    finally:
        ranks.stop()
    assert "it failed on rank 1, whose message says why" in found[0][0]
    assert "train-00000.bin is damaged" in found[1][0]
    assert found[0][1] == found[1][1]
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == []


def errors_here(config, folders):
    """Train on data of this rank's own, as that of another node; return the error and the step."""
    import torch.distributed as dist

    own = replace(config, data=replace(config.data, path=folders[dist.get_rank()]))
    trainer = Trainer(own)
    try:
        trainer.train()
    except (ValueError, OSError) as error:
        return str(error), trainer.step
    finally:
        trainer.close()
    return "", trainer.step


def test_one_process_of_a_node_reads_its_files(data, monkeypatch):
    for size, local, reads in ((1, "3", True), (2, "0", True), (2, None, True), (2, "1", False)):
        with monkeypatch.context() as patch:
            patch.setenv("LOCAL_RANK", local) if local else patch.delenv("LOCAL_RANK", False)
            assert World(size=size).is_first_on_node == reads
    nothing = TrainingData(data, LENGTH, 0).check(reads=False)
    monkeypatch.setattr(check, "verify_sha256", lambda *_: pytest.fail("it was read"))
    nothing.start()
    assert nothing.has_ended


# -- the cache --------------------------------------------------------------------------------


@pytest.fixture
def files_read(monkeypatch):
    """Names of the files that were read."""
    names, verify = [], check.verify_sha256

    def counted(path, expected):
        names.append(path.name)
        verify(path, expected)

    monkeypatch.setattr(check, "verify_sha256", counted)
    return names


def checked(folder, cache):
    files = [file for split in ("train", "valid") for file in TokenDataset(folder, split).files]
    found = DataCheck(files, cache)
    found.start()
    found.wait()
    found.raise_if_failed()


def test_what_was_found_good_is_not_read_again(own, tmp_path, no_wait, files_read):
    for _ in range(3):
        checked(own, tmp_path / "cache")
    assert files_read == ["train-00000.bin", "valid-00000.bin"]
    # A copy has an inode of its own, and may have been damaged on the way.
    shutil.copytree(own, tmp_path / "copy")
    checked(tmp_path / "copy", tmp_path / "cache")
    assert len(files_read) == 4


def test_the_cache_hides_no_change_that_keeps_size_and_time(own, tmp_path, no_wait):
    checked(own, tmp_path / "cache")
    # Longer than the clock of a file system takes to move on.
    time.sleep(0.05)
    shuffle(own / "train-00000.bin")
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged"):
        checked(own, tmp_path / "cache")


def test_a_file_that_was_just_written_is_not_remembered(own, tmp_path, files_read):
    """Its next change could carry the same time."""
    for _ in range(2):
        checked(own, tmp_path / "cache")
    assert len(files_read) == 4


def test_a_cache_that_cannot_be_written_is_done_without(own, tmp_path, no_wait, files_read):
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        checked(own, tmp_path / "cache")
    assert len(files_read) == 4


# -- tokenizer --------------------------------------------------------------------------------


def test_swapped_ids_in_the_tokenizer_of_the_data_are_rejected(own, tmp_path):
    config = run_of(own, tmp_path / "run", steps=3)
    trained(config)
    swap_ids(own / "tokenizer.json")
    for resume in (True, False):
        with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: its SHA-256"):
            Trainer(replace(config, resume=resume))

    def recomputed(manifest):
        content = (own / "tokenizer.json").read_bytes()
        manifest["tokenizer_sha256"] = hashlib.sha256(content).hexdigest()

    edit(own, recomputed, resealed=True)
    with pytest.raises(ValueError, match="not those the run started with"):
        Trainer(replace(config, resume=True))


@pytest.mark.parametrize("place", ["pipe", "device", "folder"])
def test_a_tokenizer_that_is_no_regular_file_is_rejected(own, tmp_path, place):
    tokenizer = own / "tokenizer.json"
    tokenizer.unlink()
    if place == "pipe":
        os.mkfifo(tokenizer)
    elif place == "device":
        tokenizer.symlink_to("/dev/zero")
    else:
        tokenizer.mkdir()
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a regular file"):
        Trainer(run_of(own, tmp_path / "run"))


def test_swapped_ids_in_the_tokenizer_of_a_run_are_not_exported(data, tmp_path):
    config = run_of(data, tmp_path / "run", steps=3)
    trained(config)
    tokenizer = tmp_path / "run" / "tokenizer.json"
    good = tokenizer.read_bytes()
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000003"):
        swap_ids(tokenizer)
        with pytest.raises(ValueError, match=r"run/tokenizer\.json is not the tokenizer that"):
            export(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        told = []
        Trainer(replace(config, resume=True), told.append).train()
        assert [f"{tokenizer} is not that of the run" in one["text"] for one in told] == [True]
        assert tokenizer.read_bytes() == good
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == good


# -- manifest ---------------------------------------------------------------------------------


def shard(key, value):
    return lambda manifest: manifest["splits"]["train"][0].update({key: value})


EDITS = {
    "vocab_size 100": lambda manifest: manifest.update(vocab_size=100),
    "vocab_size 300": lambda manifest: manifest.update(vocab_size=300),
    "vocab_size 0": lambda manifest: manifest.update(vocab_size=0),
    "vocab_size 1e18": lambda manifest: manifest.update(vocab_size=10**18, dtype="<u4"),
    "eos_id 99999": lambda manifest: manifest.update(eos_id=99999),
    "eos_id -1": lambda manifest: manifest.update(eos_id=-1),
    "eos_id 1": lambda manifest: manifest.update(eos_id=1),
    "eos_token": lambda manifest: manifest.update(eos_token="a"),
    "dtype": lambda manifest: manifest.update(dtype="<u4"),
    "dtype object": lambda manifest: manifest.update(dtype="O"),
    "shard elsewhere": shard("file", "../x.bin"),
    "shard anywhere": shard("file", "/dev/zero"),
    "shard of Windows": shard("file", "..\\x.bin"),
    "shard without a name": shard("file", ""),
    "shard the folder above": shard("file", ".."),
    "shard a number": shard("file", 5),
    "tokenizer elsewhere": lambda manifest: manifest.update(tokenizer_file="../own/tokenizer.json"),
    "tokenizer a number": lambda manifest: manifest.update(tokenizer_file=5),
    "tokens -1": shard("tokens", -1),
    "tokens 0": shard("tokens", 0),
    "tokens huge": shard("tokens", 10**400),
    "tokens true": shard("tokens", True),
    "documents -1": shard("documents", -1),
    "documents huge": shard("documents", 10**9),
    "bytes huge": shard("bytes", 10**400),
    "bytes 0": shard("bytes", 0),
    "splits null": lambda manifest: manifest.update(splits=None),
    "no shards": lambda manifest: manifest["splits"].update(train=[]),
    "null shard": lambda manifest: manifest["splits"].update(train=[None]),
    "vocab_size null": lambda manifest: manifest.update(vocab_size=None),
    "vocab_size 257.5": lambda manifest: manifest.update(vocab_size=257.5),
    "format": lambda manifest: manifest.update(format="lrm-tokens-1"),
}


@pytest.mark.parametrize("resealed", [False, True], ids=["edited", "resealed"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest_is_one_line_that_names_it(own, name, resealed):
    edit(own, EDITS[name], resealed=resealed)
    with pytest.raises(ValueError, match=r"own/manifest\.json cannot be used \(.*again") as caught:
        TrainingData(own, LENGTH, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["null", "[]", "", "5", '{"format": 1e999}', '{"a":' * 10**5])
def test_a_manifest_that_is_something_else_is_rejected(own, content):
    (own / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"own/manifest\.json cannot be used"):
        TrainingData(own, LENGTH, 0)


def test_deep_content_under_a_checksum_of_its_own_is_rejected(own):
    deep = {}
    for _ in range(900):
        deep = {"a": deep}
    text = json.dumps(add_checksum(read_verified(own / "manifest.json")))
    text = text.replace('"source": {', f'"source": {{"deep": {json.dumps(deep)}, ')
    (own / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"own/manifest\.json cannot be used"):
        TrainingData(own, LENGTH, 0)


def test_linked_files_are_data_and_linked_devices_are_not(own, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in own.iterdir():
        (linked / path.name).symlink_to(path)
    expected = TrainingData(own, LENGTH, 0)
    found = TrainingData(linked, LENGTH, 0)
    found.verify()
    assert found.tokens("train").tolist() == expected.tokens("train").tolist()
    (linked / "train-00000.bin").unlink()
    (linked / "train-00000.bin").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"train-00000\.bin is missing or not a regular file"):
        TrainingData(linked, LENGTH, 0)


def test_default_data_of_another_format_are_not_those_of_this_release(tmp_path, monkeypatch):
    monkeypatch.setenv("LRM_CACHE", str(tmp_path))
    made = []
    name = "learnable_multipliers.pretrain.data.training_data.prepare"
    monkeypatch.setattr(name, lambda config: made.append(config.out))
    assert default_corpus(300).name.endswith("-300-lrm-tokens-2")
    assert len(made) == 1
