"""The conversations of report.html: turns, what is masked, and what a reader filters by."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from report_pages import ALLOWED, EVIL, Seen, record, row

from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.report import blocks, conversations
from jaxgrpo.training.records.report import html as page

CONTROLS = {"ol", "h3", "label", "select", "option", "input", "script"}


def turn(text, reply="", reward=0.0):
    return {
        "text": text, "tokens": len(text), "reply": reply, "reply_tokens": len(reply),
        "reward": reward,
    }  # fmt: skip


def talk(*turns, **changes):
    length = sum(entry["tokens"] + entry["reply_tokens"] for entry in turns)
    return row(turns=list(turns), completion_ids=[1] * length, **changes)


def parse(*rows):
    return Seen(page.render(record(), list(rows)))


def test_a_sample_is_shown_turn_by_turn_with_what_was_masked():
    parsed = parse(talk(turn("look", "four"), turn("done!"), prompt="1+1="))
    places = [parsed.text.index(part) for part in (
        "Step 3, row 0, sample 0", "13 tokens, 4 of them masked · 2 turns", "1+1=",
        "turn 1 · 4 tokens", "look", "answer · 4 tokens, masked", "four", "turn 2 · 5 tokens",
        "done!",
    )]  # fmt: skip
    assert places == sorted(places)
    kinds = [
        a["class"] for tag, a in parsed.tags if tag == "div" and "part" in (a.get("class") or "")
    ]
    assert kinds == ["part prompt", "part drawn", "part masked", "part drawn"]


def test_rewards_of_turns_are_shown_where_some_were_given():
    with_rewards = parse(talk(turn("a", "b", 0.25), turn("c"))).text
    assert "turn 1 · 1 tokens · reward 0.25" in with_rewards
    assert "turn 2 · 1 tokens · reward 0" in with_rewards
    assert "tokens · reward" not in parse(talk(turn("a", "b"), turn("c"))).text


def test_what_is_filtered_and_sorted_by_are_the_numbers_of_the_sample():
    unscored = talk(turn("ab"), rewards={"right": None}, problem="step raised ValueError: no")
    parsed = parse(talk(turn("a", "b"), step=1), unscored)
    entries = [
        attributes for tag, attributes in parsed.tags if tag == "li" and "data-step" in attributes
    ]
    numbers = [
        [entry[f"data-{name}"] for name in ("step", "reward", "length")] for entry in entries
    ]
    assert numbers == [["1", "1.0", "2"], ["3", "", "2"]]
    assert "its environment broke: step raised ValueError: no" in parsed.text
    names = set(re.findall(r'at\("([a-z-]+)"\)', conversations.SCRIPT))
    names |= {f"{name}-{end}" for name in ("reward", "length") for end in ("from", "to")}
    assert names <= {attributes.get("id") for _, attributes in parsed.tags}
    sorts = {"reward", "length", "step"}
    assert sorts <= {*re.findall("<option>([a-z]+)</option>", page.render(record(), [unscored]))}


def test_one_script_may_run_and_no_text_becomes_markup():
    broken = {"problem": EVIL, "prompt": [{"role": EVIL, "content": EVIL}], "rewards": {EVIL: 1.0}}
    text = page.render(record(), [talk(turn(EVIL, EVIL), turn(EVIL), **broken)])
    parsed = Seen(text)
    assert {tag for tag, _ in parsed.tags} <= ALLOWED | CONTROLS
    assert not [name for _, entry in parsed.tags for name in entry if name.startswith("on")]
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(entry["content"] or "" for tag, entry in parsed.tags if "http-equiv" in entry)
    assert policy == f"{blocks.POLICY}; script-src 'sha256-{digest}'"
    assert not re.search("innerHTML|eval|write|fetch", script)
    assert parsed.text.count("<script>alert(2)</script>") >= 6
    assert text.count("<script>") == 1


def test_a_sample_that_waited_has_no_turns_and_is_shown():
    text = parse(talk(turn("a")), row(completion="waited")).text
    assert "waited" in text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([3], [3]), ([1, 10, 20], [20, 10, 1]), (range(0, 101, 5), [100, 85, 70, 55, 45, 30, 15, 0])],
)
def test_the_last_step_the_first_and_some_between_are_shown(tmp_path, steps, expected):
    with RunFolder(tmp_path / "run") as folder:
        for step in steps:
            rows = [
                talk(turn("a"), step=step, ordinal=n // 4, sample=n % 4, advantage=n // 4 - 9.5)
                for n in range(40)
            ]
            folder.write_samples(step, rows)
    rows = conversations.read(tmp_path / "run")
    assert list(dict.fromkeys(row["step"] for row in rows)) == expected
    assert len(rows) == conversations.MAX_ROWS * len(expected)
    assert {row["ordinal"] for row in rows} == {0, 1, 2, 3, 4, 5}, "the largest advantages"


def test_a_run_without_turns_has_the_table_of_samples(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_samples(1, [row()])
    assert conversations.read(tmp_path / "run") == []
    text = page.render(record(samples=[row()]))
    assert "Samples of step 3" in text
    assert "<script" not in text
    assert f'content="{blocks.POLICY}"' in text.replace("&#x27;", "'")
