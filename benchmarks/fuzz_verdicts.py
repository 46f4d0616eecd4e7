"""What the end of a command is worth: success, refusal, or a failure of one of several causes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_inputs import Input, Valid
from fuzz_sandbox import Ended

from learnable_multipliers.pretrain.preflight.resume_check import MEASURED

CAUSES = (
    *("traceback", "signal", "hang", "exit code", "message", "leftovers", "changed files"),
    "silent acceptance",
)
MOST_LINES = 40
"""Of a usage error: tyro frames it and lists similar options."""
_CRASHES = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error")
_CRASHES += ("terminate called", "panicked at", "core dumped")
_LEFTOVERS = re.compile(r".*\.(tmp|partial|old)|\.lrm-doctor-.*|\.step-.*")
_TIMES = re.compile(r"found in [0-9.]+ s")
_CHECK = re.compile(r"^(ok|warning|failed) +([a-z0-9 ]+?)  ", re.MULTILINE)


class Verdict(NamedTuple):
    """A word for the outcome, and for a failure the reason."""

    kind: str
    """success, refusal, stopped, or one of CAUSES."""
    why: str = ""

    @property
    def failed(self) -> bool:
        """Whether this is not as it should be."""
        return self.kind in CAUSES


Files = Mapping[str, bytes]
"""What a folder holds: for each path its content, or what it is instead of a plain file."""


def snapshot(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder; nothing is followed or waited for."""
    found = {}
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                if not os.access(path, os.R_OK):
                    path.chmod(0o600)
                content = path.read_bytes()
            else:
                content = f"a {stat.filemode(mode)[0]}".encode()
            found[str(path.relative_to(folder))] = content
    return found


def outcome(valid: Valid, ended: Ended, fixture: Files, before: Files, after: Files) -> Any:
    """Return what a command came to, without clocks, to be compared with that of another input."""
    changed = {path: text for path, text in after.items() if before.get(path) != text}
    files = {
        path: hashlib.sha256(repr(plain).encode()).hexdigest()
        for path, text in changed.items()
        if (plain := _without_clock(path, text)) is not None
        # A command may put back what was changed.
        and (path not in fixture or plain != _without_clock(path, fixture[path]))
    }
    gone = sorted(path for path in before.keys() - after.keys() if path in fixture)
    said: Any = None
    if valid.command == "doctor":
        said = _CHECK.findall(ended.stdout)
    elif valid.command in ("plan", "symmetries", "diagnose"):
        said = _TIMES.sub("", ended.stdout)
    return said, files, gone


def _without_clock(path: str, content: bytes) -> Any:
    """Return the content of a file without times; None where all of it depends on the moment."""
    name = Path(path).name
    if name.startswith((".lock", "environment", "resumed-")) or content.startswith(b"a "):
        return None
    if name == "manifest.json" and "checkpoints" in path:
        return None
    if path.startswith("cache/good-shards/"):
        # Of shards that have lain still for a while.
        return None
    try:
        if name == "metrics.jsonl":
            return [_untimed(json.loads(line)) for line in content.splitlines()]
        if name == "state.json":
            return _untimed(json.loads(content))
    except ValueError:
        pass
    # A demo's page shows speeds.
    return None if path.startswith("new/") and name == "report.html" else content


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in (*MEASURED, "crc32")}


def mentions(ended: Ended, before: Files, after: Files, changed: str) -> int:
    """Count how often a command names a file, in its output or on a page it wrote."""
    page = b"".join(
        text for path, text in after.items() if path.endswith(".html") and before.get(path) != text
    )
    said = ended.stdout + ended.stderr + page.decode(errors="replace")
    names = {Path(changed).name}
    if "checkpoints" in changed:
        names.add(Path(changed).parent.name)
    return sum(said.count(name) for name in names)


def same_content(path: str, before: bytes, after: bytes | None) -> bool:
    """Return whether a changed file says what it said: white space, or a log that ends earlier."""
    if after is None:
        return False
    if path.endswith("metrics.jsonl"):
        # A killed run leaves such a file, with its last line cut off.
        complete = after[: after.rfind(b"\n") + 1]
        return before.startswith(complete)
    try:
        texts = [json.dumps(json.loads(text), sort_keys=True) for text in (before, after)]
        # A repeated key is lost in parsing.
        return texts[0] == texts[1] and after.count(b'":') == before.count(b'":')
    except (ValueError, RecursionError):
        return False


def judge(words: Sequence[str], valid: Valid, ended: Ended, before: Files, after: Files) -> Verdict:
    """Judge the form of an end: what is said, and what is left behind."""
    said = ended.stdout + ended.stderr
    if ended.hung:
        return Verdict("hang", f"{ended.seconds:.0f} s")
    if ended.code < 0:
        return Verdict("signal", f"ended by signal {-ended.code}")
    if crash := next((mark for mark in _CRASHES if mark in said), None):
        last = [line for line in said.splitlines() if line.strip()][-1]
        return Verdict("traceback", last if crash.startswith("Trace") else crash)
    stopped = ended.interrupted and ended.code in (130, 0)
    if ended.code not in (0, 1, 2) and not stopped:
        return Verdict("exit code", f"exit code {ended.code}")
    if wrong := _changed_files(words, before, after):
        return Verdict("changed files", wrong)
    if wrong := _left_behind(valid, ended, before, after):
        return Verdict("leftovers", wrong)
    if ended.code in (1, 2) and (wrong := _bad_message(valid, ended)):
        return Verdict("message", wrong)
    return Verdict("stopped" if ended.interrupted else "refusal" if ended.code else "success")


def _bad_message(valid: Valid, ended: Ended) -> str:
    """Return what is wrong with the message of a refusal, or nothing."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    if ended.code == 2:
        shown = len(lines) + len(ended.stdout.splitlines())
        # lrm train without a recipe lists them.
        return f"{shown} lines" if not 0 < shown <= MOST_LINES else ""
    if valid.command == "doctor" and not lines and "failed" in ended.stdout:
        return ""
    if len(lines) != 1:
        return f"{len(lines)} lines: {' | '.join(lines)[:300]}"
    return "" if lines[0].startswith("lrm ") else f"not ours: {lines[0][:200]}"


def _changed_files(words: Sequence[str], before: Files, after: Files) -> str:
    """Return a file that was there before, that no option names, and that is not as it was."""
    owned = _owned(words)
    for path, content in before.items():
        if after.get(path) != content and not any(
            path == own or path.startswith(f"{own}/") for own in owned
        ):
            return path
    return ""


def _owned(words: Sequence[str]) -> set[str]:
    """Return what a command line says may be changed, relative to the folder it runs in."""
    named = [word for flag, word in zip(words, words[1:], strict=False) if flag == "--out"]
    own = {"cache"}
    if "--resume" in words:
        own |= {*named, "run"}
    if "--overwrite" in words:
        own |= {*named}
    # Files that are named to be written.
    page = words[:1] in (["report"], ["diagnose"])
    flags = ("--plot", "--requests-only", *(("--out",) if page else ()))
    own |= {word for flag, word in zip(words, words[1:], strict=False) if flag in flags}
    return {os.path.normpath(word) for word in own if word}


def _left_behind(valid: Valid, ended: Ended, before: Files, after: Files) -> str:
    new = sorted(after.keys() - before.keys())
    new = [path for path in new if not path.startswith(("cache/", "home/"))]
    if found := [path for path in new if _LEFTOVERS.fullmatch(Path(path).name)]:
        return found[0]
    # The folder of a run stays: it says how far the run came.
    refused = ended.code not in (0,) and valid.writes == "new"
    return new[0] if refused and new else ""


def judge_content(
    file: Input,
    valid: Valid,
    ended: Ended,
    fixture: Files,
    before: Files,
    after: Files,
    untouched: tuple[Any, int],
) -> Verdict | None:
    """Return a failure if a command succeeded on changed content without noticing.

    Args:
        before: The files as the command found them, one of them changed.
        untouched: Outcome and mentions of the same command on the unchanged inputs.
    """
    if ended.code != 0 or file.rule == "other input":
        return None
    if same_content(file.path, fixture[file.path], before.get(file.path)):
        return None
    # A folder of sources without one of them is another folder of sources.
    if file.path.startswith("text/") and before.get(file.path) in (None, b"a d"):
        return None
    if mentions(ended, before, after, file.path) > untouched[1]:
        return None
    same = outcome(valid, ended, fixture, before, after) == untouched[0]
    if same and file.rule == "same outcome":
        return None
    effect = "with the outcome of the unchanged one" if same else "with another outcome"
    return Verdict("silent acceptance", f"{file.path} was changed, and accepted {effect}")
