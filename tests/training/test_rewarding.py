"""Rewards in a run: chosen, called, failing, logging; shown by a dry run."""

import json
from typing import Any

import chatting
import numpy as np
import pytest
import small_run
import tomli_w
from judging_program import Letters
from small_environments import Counter

from jaxgrpo.cli.inference import evaluate
from jaxgrpo.cli.main import main
from jaxgrpo.config.world import make_world
from jaxgrpo.core.errors import ConfigError, InputError
from jaxgrpo.environments.conversations import Conversations
from jaxgrpo.models.hf import folders
from jaxgrpo.planning import preview
from jaxgrpo.rewards import Reward, RewardError, RewardLog, TrainerState
from jaxgrpo.rollout import judging
from jaxgrpo.training import loop, setup
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.processes import process
from jaxgrpo.training.rewarding import (
    resolve_rewards,
    resolve_scorer,
    try_rewards,
    with_logged,
)
from jaxgrpo.training.stored_policy import StoredPolicy

pytestmark = pytest.mark.slow

OWN = small_run.__file__


def samples(folder, step):
    lines = (folder / "samples" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps; the reward `logging` fails in the second."""
    folder = tmp_path_factory.mktemp("run") / "r"
    rewards = [
        {"use": "arithmetic"},
        {"use": f"{OWN}:logging", "on_error": "unscored"},
        {"use": "length", "cache": 10, "weight": 0.1},
    ]
    changes = {"rewards": rewards, "train.steps": 2, "run.samples_every": 1}
    loop.train(small_run.config(folder, **changes))
    return folder


def test_logged_columns_stand_in_the_sample_rows(run):
    rows = samples(run, 1)
    assert [row["extra"] for row in rows] == [{"letters": len(row["completion"])} for row in rows]
    assert list(rows[0])[-1] == "extra"


def test_rows_of_a_step_without_logged_columns_have_the_usual_keys(run):
    assert "extra" not in samples(run, 2)[0]


def test_logged_metrics_and_errors_stand_in_the_metrics(run):
    first, second = small_run.metrics(run)
    letters = [row["extra"]["letters"] for row in samples(run, 1)]
    assert first["letters/mean"] == pytest.approx(np.mean(letters))
    assert first["state/step"] == 0
    assert first["rewards/logging/errors"] == 0
    assert first["rewards/logging/unscored"] == 0
    assert second["rewards/logging/errors"] == 32
    assert second["rewards/logging/unscored"] == 1
    assert "letters/mean" not in second
    assert "rewards/arithmetic/errors" not in first
    assert {row["rewards"]["logging"] for row in samples(run, 2)} == {None}


def test_the_length_limit_of_the_run_is_that_of_the_length_reward(run):
    for row in samples(run, 1):
        tokens = len(row["completion_ids"])
        assert row["rewards"]["length"] == pytest.approx(min(0, (24 - 10 - tokens) / 10))


@pytest.mark.full
def test_an_unscored_failure_is_shown_once(tmp_path, capsys):
    rewards = [
        {"use": "arithmetic"},
        {"use": f"{OWN}:logging", "on_error": "unscored"},
    ]
    loop.train(small_run.config(tmp_path / "r", rewards=rewards, **{"train.steps": 2}))
    shown = capsys.readouterr().out
    assert shown.count("rewards.logging raised OSError on completion") == 1
    assert 'left unscored, as on_error = "unscored" says' in shown


@pytest.mark.full
def test_an_unscored_failure_in_an_evaluation_is_shown_once(tmp_path, capsys):
    """The reward fails where a step has been taken: behind the first, and in no training."""
    changes = {"eval.data": "task:arithmetic:test", "eval.prompts": 4, "eval.samples": 2}
    rewards = [{"use": f"{OWN}:logging", "on_error": "unscored"}]
    loop.train(small_run.config(tmp_path / "r", rewards=rewards, **changes, **{"train.steps": 1}))
    shown = capsys.readouterr().out
    assert shown.count("rewards.scorer raised OSError on completion") == 1
    assert shown.count('left unscored, as on_error = "unscored" says') == 1


CLOSED = """
class Closed:
    def reset(self, **row):
        raise RuntimeError("no service")

    def step(self, action):
        return "go on", 1.0, True
"""
COMMANDS = {
    "eval": ("--num-prompts", "4", "-n", "2"),
    "probe": ("--num-prompts", "4", "-n", "2"),
    "sample": ("--prompts", "p.jsonl", "--out", "out.jsonl"),
}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_once_why_every_environment_broke(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CLOSED)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2="}\n')
    changes = {"eval.data": "task:arithmetic:test", "environment": f"{tmp_path}/mine.py:Closed"}
    file = small_run.write(tmp_path / "run.toml", tmp_path / "r", rewards=[], **changes)
    assert main([command, str(file), *COMMANDS[command]]) == 0
    shown = capsys.readouterr().out
    assert shown.count("reset raised RuntimeError: no service") == 1
    assert "an environment broke: its sample is not scored" in shown


@pytest.mark.full
def test_an_exception_ends_the_run_by_default_and_saves_what_is_done(tmp_path):
    changes = {"rewards": [{"use": f"{OWN}:logging"}], "run.samples_every": 0}
    config = small_run.config(tmp_path / "r", **changes)
    message = r"rewards\.logging raised OSError on completion 0"
    with pytest.raises(process.RewardFailed, match=message) as failed:
        loop.train(config)
    assert [line["step"] for line in small_run.metrics(tmp_path / "r")] == [1]
    assert "holds step 1; mend the reward, then go on with: jaxgrpo train" in str(failed.value)
    assert Checkpoints(tmp_path / "r" / "checkpoints", keep=1).latest() == 1
    assert process.guard(lambda: loop.train(config, resume="auto") and None) == 3


def test_a_reward_that_asks_for_a_missing_column_is_refused_before_anything_is_sampled(tmp_path):
    def needs_gold(completions, gold):
        raise AssertionError("called")

    with pytest.raises(RewardError, match=r"asks for 'gold', which does not exist .*answer, level"):
        loop.train(small_run.config(tmp_path / "r"), rewards=[needs_gold])


@pytest.mark.full
def test_a_dry_run_shows_what_every_reward_gives_the_gold_answer_and_nothing(tmp_path, capsys):
    rewards = [
        {"use": "arithmetic"},
        {"use": f"{OWN}:digits"},
        {"use": "length", "name": "short", "max_tokens": 2, "cache": 2},
    ]
    preview.dry_run(small_run.config(tmp_path / "r", rewards=rewards))
    lines = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("rewards on row 0, whose answer")]
    shown = [" ".join(line.split()) for line in lines[at + 1 : at + 4]]
    assert shown == [
        "arithmetic gold answer: 1, empty text: 0",
        "digits gold answer: 1, empty text: not scored",
        "short gold answer: -1, empty text: -0.5",  # its end token is one of two
    ]


def kinds(value):
    """The types of a value and, of a list, those of its first entry."""
    first = value[:1] if type(value) is list else []
    return [type(value), *(kinds(entry) for entry in first)]


@pytest.mark.full
def test_the_preview_calls_rewards_as_step_1_does(tmp_path):
    calls = []

    def record(**keywords):
        calls.append(keywords)
        return [0.0] * len(keywords["completions"])

    config = small_run.config(tmp_path / "r", **{"train.steps": 1})
    loop.train(config, rewards=[record])
    tried, judged = calls
    assert list(tried) == list(judged)
    assert tried["trainer_state"] == judged["trainer_state"]
    for name in tried.keys() - {"trainer_state", "log_extra", "log_metric"}:
        assert kinds(tried[name]) == kinds(judged[name]), name
    tokenizer = folders.read_tokenizer(small_run.base())
    gold, empty = tried["completion_ids"]
    assert empty == [tokenizer.eos_token_id]
    assert gold == [*tokenizer(tried["answer"][0])["input_ids"], tokenizer.eos_token_id]
    assert tried["completions"] == [tried["answer"][0], ""]
    ended = [ids for ids in judged["completion_ids"] if tokenizer.eos_token_id in ids]
    assert {ids.index(tokenizer.eos_token_id) == len(ids) - 1 for ids in ended} == {True}


@pytest.mark.full
def test_a_dry_run_ends_with_what_a_reward_raises(tmp_path, capsys):
    code_file = tmp_path / "own.py"
    code_file.write_text(
        "def broken(completions, **kw):\n    return [1 / len(c) for c in completions]\n"
    )
    rewards: list[dict[str, Any]] = [{"use": f"{code_file}:broken"}]
    with pytest.raises(RewardError, match="broken raised ZeroDivisionError on completion 1"):
        preview.dry_run(small_run.config(tmp_path / "r", rewards=rewards))
    rewards[0]["on_error"] = "unscored"
    preview.dry_run(small_run.config(tmp_path / "r", rewards=rewards))
    assert "empty text: not scored; rewards.broken raised" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"on_error": "skip"}, 'rewards[0].on_error = "skip": expected "raise" or "unscored"'),
        ({"on_eror": "raise"}, "rewards[0].on_eror: unknown key; did you mean on_error?"),
        ({"on_errors": "raise"}, "rewards[0].on_errors: unknown key; did you mean on_error?"),
        ({"use": "length", "cache": 25}, "cache = 25: more than max_tokens = 24"),
        ({"use": "format", "pattern": "("}, "is no regular expression"),
        ({"use": "gsm8k_answr"}, "unknown reward 'gsm8k_answr': did you mean 'gsm8k_answer'?"),
        ({"use": "accuracy_reward"}, "is 'math', and TRL's is trl.rewards:accuracy_reward"),
        ({"use": "trl.rewards.my_reward"}, "of a module is named trl.rewards:my_reward; Known: "),
        ({"use": "owner/reward-model"}, "a reward model is called by a function of your own, p"),
    ],
)
def test_a_wrong_reward_is_a_problem_of_the_config(reward, message, tmp_path):
    rewards = [{"use": f"{OWN}:digits", **reward}]
    with pytest.raises(ConfigError) as problem:
        small_run.config(tmp_path / "r", rewards=rewards)
    assert message in str(problem.value)


def test_rewards_from_python_may_be_functions_names_and_named(tmp_path):
    config = small_run.config(tmp_path / "r")

    class Judge:
        def __call__(self, completions):
            return [0.0] * len(completions)

        def reset(self): ...

        def get_reward(self):
            return 0.0

    rewards: list[Any] = [len, "arithmetic", Judge(), f"{OWN}:digits", "length"]
    listed = resolve_rewards(config.rewards, 24, rewards)
    assert [reward.name for reward in listed] == ["len", "arithmetic", "Judge", "digits", "length"]
    assert listed[4].function(completion_ids=[[1] * 24]) == [-1.0]
    named = resolve_rewards(config.rewards, 24, {"a": Judge(), "b": Judge()})
    assert [(reward.name, reward.weight, reward.on_error) for reward in named] == [
        ("a", 1.0, "raise"),
        ("b", 1.0, "raise"),
    ]
    with pytest.raises(InputError, match=r"'Judge' stands twice.*rewards=\{name: function\}"):
        resolve_rewards(config.rewards, 24, [Judge(), Judge()])
    stops = list(chatting.stop_tokens("closed"))
    world = make_world((), {"": Judge}, config.rollout, chatting.chat(), stops)
    with pytest.raises(InputError, match="'Judge' stands twice"):  # an environment's class
        resolve_rewards(config.rewards, 24, [Judge()], world=world)


def test_evaluations_of_several_environments_judge_each_row_by_its_own(tmp_path):
    class Shop(Counter):
        def get_reward(self):
            return 2.0 * self.count

    config, stops = small_run.config(tmp_path / "r"), list(chatting.stop_tokens("closed"))
    factories = {"game": Counter, "shop": Shop}
    world = make_world((), factories, config.rollout, chatting.chat(), stops)
    assert world is not None
    rows = [{"prompt": "Go.", "start": 3, "environment": name} for name in ("game", "shop")]
    talks = Conversations(world.kinds, world.chat, stops, rows)
    talks.open([(0, 0, 0), (1, 1, 1)], 1, (1,))
    spoken = [talks.spoken((row, 0)) for row in range(2)]
    rewards = resolve_rewards((), 24, world=world)
    assert [reward.function(spoken) for reward in rewards] == [[3, 0], [0, 6]]
    for run_rewards in ((), rewards):  # a command's, and a run's
        judge = resolve_scorer(None, (), 24, run_rewards, world)
        assert (judge.name, judge.function(spoken)) == ("environment", [3, 6])
    first = resolve_scorer(None, config.rewards, 24, (), world)
    assert first.name == config.rewards[0].use
    alone = make_world((), {"": Shop}, config.rollout, chatting.chat(), stops)
    assert resolve_scorer(None, (), 24, (), alone).name == "Shop"


def test_an_environment_that_gives_no_reward_judges_no_evaluation(tmp_path, capfd):
    """It ended in an IndexError."""
    code, file = tmp_path / "mine.py", tmp_path / "run.toml"
    code.write_text("class Bare:\n    def reset(self, **row):\n        return None\n")
    tables = small_run.tables(tmp_path / "r", environment=f"{code}:Bare")
    del tables["rewards"]
    file.write_text(tomli_w.dumps(tables))
    for command in ("eval", "probe"):
        assert main([command, str(file), "--data", "task:arithmetic:test"]) == 2
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
        assert "the environment has no get_reward, so nothing judges" in line
        assert "set eval.scorer (eval --scorer, probe --reward)" in line


def test_rows_without_tests_are_refused_before_a_run_of_the_reward_python(tmp_path):
    try:
        rewards = small_run.config(tmp_path / "r", rewards=[{"use": "python", "sandbox": "monty"}])
    except ConfigError as error:
        pytest.skip(str(error))
    with pytest.raises(InputError, match=r"row 0: rewards\.python: no tests: give it test_list"):
        loop.train(rewards)


def test_a_metric_logged_under_a_name_of_the_trainer_is_refused():
    later = ("step", "learning_rate", "flops", "time/step", "eval/accuracy", "reference/resets")
    for name in ("reward", *later):
        log = RewardLog({}, {name: (1.0, 1)}, {}, {})
        with pytest.raises(
            RewardError, match=f"log_metric\\('{name}', ...\\), the name of a metric"
        ):
            with_logged({"reward": 0.5}, log)
    log = RewardLog({}, {"judge/time/step": (1.0, 2)}, {}, {})
    assert with_logged({"reward": 0.5}, log) == {"reward": 0.5, "judge/time/step": 0.5}


@pytest.mark.parametrize("name", ["time/judge", "eval/accuracy", "step", "judge/time"])
def test_a_logged_name_of_the_trainer_is_refused_before_the_first_step(name):
    class Tokenizer(Letters):
        eos_token_id = 0

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [ord(letter) - ord("a") + 1 for letter in text]}

    def mine(completions, log_metric):
        log_metric(name, 1.0)
        return [0.0] * len(completions)

    row = {"prompt": "hi", "answer": "ab"}
    arguments = [Reward("mine", mine)], row, Tokenizer(), [0], TrainerState()
    if name == "judge/time":
        assert try_rewards(*arguments)["mine"].gold == 0
        return
    with pytest.raises(RewardError, match=f"calls log_metric\\('{name}', ...\\), the name of a"):
        try_rewards(*arguments)


def test_prompts_that_are_messages_are_judged_as_messages_and_texts_as_texts():
    received = {}

    def mine(prompts, completions, name):
        received.update(prompts=prompts, completions=completions, name=name)
        return [1.0, 2.0, 3.0, 4.0]

    talk = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": talk, "name": "talk"}, {"prompt": "hi", "name": "text"}]
    tokens = np.array([[[1, 2], [1, 0]], [[3, 4], [5, 0]]])
    judge = judging.Judge(Letters(), [Reward("mine", mine)], rows)
    scores, _ = judge.rollouts(np.array([1, 0]), tokens, tokens > 0)
    np.testing.assert_array_equal(scores["mine"], [[1, 2], [3, 4]])
    message = [[{"role": "assistant", "content": text}] for text in ("cd", "e")]
    assert received == {
        "prompts": ["hi", "hi", talk, talk],
        "completions": ["ab", "a", *message],
        "name": ["text", "text", "talk", "talk"],
    }


@pytest.mark.full
def test_the_trainer_state_follows_the_run(tmp_path):
    states = []

    def mine(completions, trainer_state):
        states.append(trainer_state)
        return [0.0] * len(completions)

    dataset = [{"prompt": f"1{n}+20=", "answer": ""} for n in range(10)]
    config = small_run.config(tmp_path / "r", **{"train.steps": 2})
    loop.train(config, rewards=[mine], dataset=dataset)
    trial, *states = states  # every reward is tried on row 0 before the first step
    assert (trial.global_step, trial.max_steps) == (0, 2)
    assert [state.global_step for state in states] == [0, 1]
    assert [state.epoch for state in states] == pytest.approx([0, 0.8])
    assert {(state.max_steps, state.num_train_epochs) for state in states} == {(2, 2)}


@pytest.mark.full
def test_a_run_shows_the_sum_of_what_was_scored_where_its_chain_adds_that_up(tmp_path, capsys):
    def first(completions, row):
        return [2.0 if number % 2 == 0 else None for number in row]

    def second(completions, row):
        return [3.0 if number % 2 == 1 else None for number in row]

    dataset = [{"prompt": f"1{n}+20=", "answer": "", "row": n} for n in range(8)]
    for recipe, shown in (("like_trl", "best, 3:"), ("grpo", "no completion of this step could")):
        changes = {"recipe": recipe, "train.steps": 1}
        run_config = small_run.config(tmp_path / recipe, **changes)
        loop.train(run_config, rewards=[first, second], dataset=dataset)
        assert shown in capsys.readouterr().out


@pytest.mark.full
def test_a_scorer_knows_the_progress_of_the_run(tmp_path):
    states = []

    def scheduled(completions, trainer_state):
        states.append(trainer_state)
        share = trainer_state.global_step / trainer_state.max_steps
        return [len(text) % 2 * (1 - share) for text in completions]

    dataset = [{"prompt": f"1{n}+20=", "answer": ""} for n in range(10)]
    keys = {"eval.data": "task:arithmetic:test", "eval.prompts": 4, "eval.samples": 1}
    run_config = small_run.config(tmp_path / "r", **{"train.steps": 2, "eval.every": 1, **keys})
    run = loop.train(run_config, rewards=[scheduled], dataset=dataset)
    last = states[-1]  # of the evaluation behind the last step
    assert (last.global_step, last.epoch) == (2, pytest.approx(1.6))
    assert {(state.max_steps, state.num_train_epochs) for state in states} == {(2, 2)}
    states.clear()
    evaluate(run.path, scorer=scheduled, samples=1)
    assert {(state.max_steps, state.num_train_epochs) for state in states} == {(2, 0)}


def test_a_process_without_a_group_has_no_texts():
    tokenizer = folders.read_tokenizer(small_run.base())
    none = np.zeros((0, 5), np.int32)
    assert judging.decode_texts(tokenizer, judging.completion_ids(none, none > 0)) == []


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("arithmetics", "unknown reward 'arithmetics': did you mean 'arithmetic'"),
        (f"{__file__}:leveled", "rows that are asked: rewards.leveled asks for 'level', whi"),
        (None, "rows that are asked: rewards.leveled asks for 'level', which does not exist"),
    ],
)
def test_what_cannot_judge_the_held_out_rows_is_refused_before_weights_are_read(
    use, message, tmp_path, monkeypatch
):
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    rewards = [{"use": f"{__file__}:leveled"}]  # the rows of the task have levels
    keys = {"eval.data": str(file), "rewards": rewards} | ({"eval.scorer": use} if use else {})
    monkeypatch.setattr(setup, "_read_learner", None)
    with pytest.raises(InputError, match=message):
        preview.dry_run(small_run.config(tmp_path / "r", **keys))
    with pytest.raises(InputError, match=message):
        loop.train(small_run.config(tmp_path / "r", **keys))
    monkeypatch.setattr(StoredPolicy, "read_params", None)
    with pytest.raises(InputError, match=message):
        evaluate(small_run.base(), data=str(file), scorer=use or leveled)


def leveled(completions, level):
    return [0.0] * len(completions)
