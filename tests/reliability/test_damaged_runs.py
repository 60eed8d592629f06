"""Each file of a run's folder removed, cut, linked, locked or replaced: refused, or survived."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faulty_runs
import pytest

pytestmark = [pytest.mark.full]

STEPS, MORE = 3, 5
PRECIOUS = "what the user wrote\n"


class Folders(NamedTuple):
    """A run of a few steps, one of another seed, and what the first comes to with more steps."""

    run: Path
    stranger: Path
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory, fork_server, environment) -> Folders:
    home = tmp_path_factory.mktemp("damage")

    def train(name: str, **changes: Any) -> Path:
        file = write(base, home / name, **changes)
        run = fork_server.start("train", file, env=environment())
        output, _ = run.communicate(timeout=faulty_runs.SECONDS)
        assert run.returncode == 0, output
        return home / name

    straight = train("straight", **{"train.steps": MORE})
    stranger = train("stranger", **{"train.seed": 1})
    return Folders(train("run"), stranger, faulty_runs.outcome(straight / "r"))


def write(base: Path, home: Path, **changes: Any) -> Path:
    texts = {"run.report": True, "tracking": {"tensorboard": True}, "run.rollouts_every": 1}
    return faulty_runs.write(base, home, **{"train.steps": STEPS, **texts, **changes})


def remove(file: Path, stranger: Path, precious: Path) -> None:
    file.unlink()


def truncate(file: Path, stranger: Path, precious: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def link(file: Path, stranger: Path, precious: Path) -> None:
    """To a file of the user's with the same content, as where a run lies in a shared place."""
    shutil.copy(file, precious)
    file.unlink()
    file.symlink_to(precious)


def make_folder(file: Path, stranger: Path, precious: Path) -> None:
    file.unlink()
    file.mkdir()


def lock_away(file: Path, stranger: Path, precious: Path) -> None:
    file.chmod(0)


def replace(file: Path, stranger: Path, precious: Path) -> None:
    if stranger.exists():
        shutil.copy(stranger, file)
    else:  # tensorboard's files have times in their names
        file.write_bytes(b"of another run")


DAMAGES: dict[str, Callable[[Path, Path, Path], None]] = {
    "removed": remove,
    "truncated": truncate,
    "a link": link,
    "a folder": make_folder,
    "unreadable": lock_away,
    "of another run": replace,
}


def files_to_damage(run: Path) -> list[Path]:
    """Those of the newest step, of an older one a few, and all others, relative to the run."""
    files = sorted(file.relative_to(run) for file in run.rglob("*") if file.is_file())
    older = [file for file in files if file.parts[:2] == ("checkpoints", str(STEPS - 1))]
    few = random.Random(0).sample(older, 2)
    chunks = [file for file in files if file.parts[:2] == ("model",)]
    return [file for file in files if file not in older or file in few if file not in chunks[2:]]


@pytest.mark.fault(12)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_a_line_or_the_run_ends_as_if_it_were_whole(
    damage, folders, base, tmp_path, start, tries
):
    places = files_to_damage(folders.run / "r")
    assert len(places) > 15
    problems = []
    for number, place in enumerate(places):
        home = tmp_path / str(number)
        file = write(base, home, **{"train.steps": MORE})
        shutil.copytree(folders.run / "r", home / "r", symlinks=True)
        precious = home / "precious"
        precious.write_text(PRECIOUS)
        DAMAGES[damage](home / "r" / place, folders.stranger / "r" / place, precious)
        before = precious.read_bytes()
        options = {"merged": False, "is_powerless": True}
        run = start("train", file, "--resume", "auto", **options)
        _, errors = run.communicate(timeout=faulty_runs.SECONDS)
        print("@@", place, run.returncode, errors[-260:].replace(chr(10), " | "))
        found = judge(run.returncode, errors, home / "r", folders.outcome, place)
        found += ["a file that is not the run's was changed"] * (precious.read_bytes() != before)
        if found:
            problems.append(f"{place} {damage}: {'; '.join(found)}")
        else:
            tries()
        shutil.rmtree(home)
    assert problems == []


def judge(
    code: int, errors: str, run: Path, expected: dict[str, Any], place: Path
) -> list[str]:
    """What is wrong with how a run with a damaged file ended."""
    wrong = faulty_runs.disorder(errors)
    if code == 2:
        named = place.name in errors or str(place.parent) in errors or "run.dir" in errors
        wrong += [] if named else [f"does not name it: {errors[-300:]}"]
    elif code == 0:
        different = faulty_runs.differences(expected, run)
        # What was damaged itself may be lost; nothing that is computed from then on.
        lost = {"metrics.jsonl": "metrics", "samples": "samples"}
        words = [word for name, word in lost.items() if name in place.parts]
        wrong += [name for name in different if not (words and name.startswith((*words, "number")))]
        if words and different and not errors and "of another" not in str(place):
            wrong.append("lines were lost without a word")
    else:
        wrong.append(f"exit code {code}: {errors[-300:]}")
    return wrong
