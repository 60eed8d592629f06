"""Each file of a run's folder removed, cut, linked, locked or replaced: refused, or survived."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_runs
import pytest

pytestmark = [pytest.mark.full]

STEPS, MORE = 3, 5
PRECIOUS = "what the user wrote\n"


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory, powerless_series) -> faulty_runs.Folders:
    home = tmp_path_factory.mktemp("damage")

    def train(name: str, **changes: Any) -> Path:
        run = powerless_series.run("train", write(base, home / name, **changes))
        assert run.returncode == 0, run.output
        return home / name / "r"

    straight = train("straight", **{"train.steps": MORE})
    stranger = train("stranger", **{"train.seed": 1})
    return faulty_runs.Folders(train("run"), stranger, faulty_runs.outcome(straight))


def write(base: Path, home: Path, **changes: Any) -> Path:
    """A config that writes every kind of file. All of them have their reward in one place."""
    steps = changes.get("train.steps", STEPS)
    texts = {"run.report": True, "tracking": {"tensorboard": True}} if steps == STEPS else {}
    rewards = {"rewards": [{"use": f"{base.parent}/mine.py:digits"}]}
    faulty_runs.write(base, base.parent)
    changes = {"train.steps": steps, "run.rollouts_every": 1, **texts, **rewards, **changes}
    return faulty_runs.write(base, home, **changes)


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
    """Every file of which there is one, and some of each kind, relative to the run."""
    files = sorted(file.relative_to(run) for file in run.rglob("*") if file.is_file())
    draw, few = random.Random(0), []
    groups = {
        "checkpoints/" + str(STEPS - 1): 2,
        f"checkpoints/{STEPS}/state": 4,
        "model": 2,
        "rollouts": 1,
        "samples": 1,
    }
    for prefix, count in groups.items():
        group = [file for file in files if str(file).startswith(prefix)]
        files = [file for file in files if file not in group]
        few += draw.sample(group, count)
    return sorted(files + few)


@pytest.mark.fault(12)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_a_line_or_the_run_ends_as_if_it_were_whole(
    damage, folders, base, tmp_path, powerless_series, tries
):
    places = files_to_damage(folders.run)
    assert len(places) > 15
    problems = []
    for number, place in enumerate(places):
        home = tmp_path / str(number)
        file = write(base, home, **{"train.steps": MORE})
        shutil.copytree(folders.run, home / "r", symlinks=True)
        precious = home / "precious"
        precious.write_text(PRECIOUS)
        DAMAGES[damage](home / "r" / place, folders.stranger / place, precious)
        before = precious.read_bytes()
        code, output = powerless_series.run("train", file, "--resume", "auto")

        wrong = judge(damage, code, output, home / "r", folders.outcome, place)
        wrong += ["a file that is not the run's was changed"] * (precious.read_bytes() != before)
        if wrong:
            problems.append(f"{place} {damage}: {'; '.join(wrong)}")
        else:
            tries()
        shutil.rmtree(home)
    assert not problems, "\n".join(problems)


def judge(
    damage: str, code: int, output: str, run: Path, expected: dict[str, Any], place: Path
) -> list[str]:
    """What is wrong with how a run with a damaged file ended."""
    wrong = faulty_runs.disorder(output)
    if code == 2:
        is_named = any(name in output for name in (place.name, f"/{place.parts[0]} ", "run.dir"))
        return wrong if is_named else [*wrong, f"does not name it: {output[-300:]}"]
    if code != 0:
        return [*wrong, f"exit code {code}: {output[-300:]}"]
    different = faulty_runs.differences(expected, run)
    # What was damaged itself may be lost, but nothing that is computed from then on.
    lost = {"metrics.jsonl": ("metrics", "number"), "samples": ("samples",)}
    words = tuple(word for name in lost if name in place.parts for word in lost[name])
    wrong += [name for name in different if not name.startswith(words or ("nothing",))]
    if place.name == "metrics.jsonl" and different and "metrics.jsonl is not what" not in output:
        wrong.append("lines were lost without a word")
    is_compared = damage != "removed" or "config.toml is gone" in output
    if place.name == "config.toml" and not is_compared:
        wrong.append("the config was not compared, without a word")
    return wrong
