"""What a dry run shows of the rewards: one call each on the gold answer and on nothing."""

import pytest

from jaxgrpo.rewards import Preview, Reward, RewardError, build, preview

ROW = {"prompt": "47+38=", "answer": "85", "level": 2}


def encode(text):
    return [*map(ord, text), 0]


def decode(rows):
    return ["".join(map(chr, ids[:-1])) for ids in rows]


def test_every_reward_judges_the_gold_answer_and_the_empty_text():
    received = {}

    def mine(prompts, completions, completion_ids, level, **columns):
        received.update(prompts=prompts, texts=completions, ids=completion_ids, level=level)
        return [0.5, None]

    rewards = [Reward("arithmetic", build("arithmetic")), Reward("mine", mine)]
    shown = preview(rewards, ROW, encode, decode)
    assert shown == {"arithmetic": Preview(1.0, 0.0), "mine": Preview(0.5, None)}
    assert received == {
        "prompts": ["47+38="] * 2,
        "texts": ["85", ""],
        "ids": [[56, 53, 0], [0]],
        "level": [2, 2],
    }


def test_a_conversation_is_answered_by_messages():
    row = {"prompt": [{"role": "user", "content": "47+38="}], "answer": "#### 85"}
    shown = preview([Reward("right", build("gsm8k_answer"))], row, encode, decode)
    assert shown == {"right": Preview(1.0, 0.0, reading="85")}


def test_a_row_without_an_answer_is_judged_by_the_empty_text_alone():
    length = Reward("length", lambda completions: [7.0] * 2)
    shown = preview([length], {"prompt": "Write."}, encode, decode)
    assert shown == {"length": Preview(None, 7.0)}


def test_a_reward_that_raises_is_shown_or_ends_the_dry_run():
    broken = Reward("broken", lambda completions: [1 / len(text) for text in completions])
    with pytest.raises(RewardError, match="broken raised ZeroDivisionError on completion 1"):
        preview([broken], ROW, encode, decode)
    unscored = broken._replace(on_error="unscored")
    shown = preview([unscored], ROW, encode, decode)["broken"]
    assert shown[:2] == (None, None)
    assert "ZeroDivisionError on completion 1" in str(shown.problem)
