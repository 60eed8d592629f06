"""Programs that ask a URL for their turns: exact tokens, and what each mistake of theirs gets."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chatting
import jax
import numpy as np
import pytest
import small_run
import tiny

from jaxgrpo.config import files, world
from jaxgrpo.config.keys import RolloutKeys
from jaxgrpo.core.errors import InputError
from jaxgrpo.environments.serving import endpoint
from jaxgrpo.rollout.batch import draw
from jaxgrpo.rollout.dialogue import FORK
from jaxgrpo.rollout.engine import SamplingSettings
from jaxgrpo.rollout.selection import pad_prompts
from jaxgrpo.rollout.slots.driver import SlotEngine
from jaxgrpo.training import loop

KEY = jax.random.key_data(jax.random.key(3))
PROMPTS, GROUP, STEPS, WIDTH, TURNS, LIMIT = 3, 2, 90, 80, 4, 10
(END,) = chatting.ids("<|end|>")
IDS = {"return_token_ids": True}


def ask(base_url, path: Any = "/completions", **fields) -> Any:
    """The answer's document. Raises: urllib.error.HTTPError."""
    url = base_url.removesuffix("/v1") + path if path.startswith("/inference") else base_url + path
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def play(program, style=None, slots=0, seconds=20.0, forks=False) -> Any:
    """A batch whose samples a program has asked for: (rollouts, dialogue, rewards [P, G])."""
    built, params = tiny.model_and_params(len(chatting.tokenizer()))
    rows = [{"prompt": "abcdef"[: number + 1], "answer": "1"} for number in range(PROMPTS)]
    rollout = RolloutKeys(
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        max_prompt_tokens=WIDTH,
        max_completion_tokens=STEPS,
        max_turns=TURNS,
        max_turn_tokens=LIMIT,
        call_timeout=seconds,
        call_format="hermes",
    )
    chat = chatting.chat(style)
    answers: Any = world.make_world((), {"": program}, rollout, chat, [END], forks)
    settings = SamplingSettings(STEPS, 1.0, (END,), tiny.PAD, 4, slots=slots)
    settings = answers.sampling(settings)
    engine = SlotEngine(built, settings, width=WIDTH)
    bare = [np.asarray(chatting.ids("x"), np.int32)] * PROMPTS
    prompts = pad_prompts(bare, WIDTH, np.arange(PROMPTS), np.arange(PROMPTS), 0)
    drawing: Any = draw(engine, params, prompts, KEY, GROUP, converse=answers.converse(rows))
    rollouts = drawing.finish()
    talks = drawing.dialogue.spoken(range(PROMPTS), GROUP)
    rewards = np.reshape([talk.reward() for talk in talks], (PROMPTS, GROUP))
    return rollouts, drawing.dialogue, rewards


class Log:
    """What programs have asked for and got, by sample."""

    def __init__(self):
        self.samples = []

    def check(self, rollouts):
        """That the tokens and log-probs of the rollouts are those that went over the URL."""
        expected = {}
        for prompt, parts, logp in self.samples:
            tokens = [token for part in parts for token in part]
            mask = [number % 2 == 0 for number, part in enumerate(parts) for _ in part]
            while not mask[-1]:  # an answer behind the last turn
                del mask[-1], tokens[-1]
            expected.setdefault(tuple(prompt), []).append((tokens, mask, logp))
        for place in range(PROMPTS):
            prompt = rollouts.prompt_tokens[place][rollouts.prompt_mask[place]]
            samples = expected[tuple(prompt.tolist())]
            drawn = []
            for sample in range(GROUP):
                mask = rollouts.token_mask[place, sample]
                size = len(mask) - int(np.argmax(mask[::-1]))
                tokens = rollouts.completion_tokens[place, sample][:size]
                logp = rollouts.behavior_logp[place, sample][mask]
                drawn.append((tokens.tolist(), mask[:size].tolist(), logp.tolist()))
            assert sorted(drawn) == sorted(samples)


def walker(log):
    """Goes on by ids, with more of them each time."""

    def walk(base_url, prompt):
        begin = chatting.ids(prompt)
        ids, parts, logp = list(begin), [], []
        for number in range(3):
            sampling = {"max_tokens": 4 + number, "logprobs": 0}
            fields = {"token_ids": ids, "sampling_params": sampling}
            (choice,) = ask(base_url, "/inference/v1/generate", **fields)["choices"]
            assert len(choice["token_ids"]) <= 4 + number
            words = chatting.ids(f"({number})" * number)
            ids = ids + choice["token_ids"] + words
            parts += [choice["token_ids"], words]
            logp += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        log.samples.append((begin, parts, logp))
        return len(parts[0])

    return walk


@pytest.mark.slow
def test_the_tokens_of_a_program_are_those_of_its_sample():
    log = Log()
    rollouts, dialogue, rewards = play(walker(log))
    assert len(log.samples) == PROMPTS * GROUP
    log.check(rollouts)
    assert (rollouts.fields["turn"].max(-1) == 2).all()
    assert rewards.min() >= 1
    assert dialogue.metrics(PROMPTS * GROUP)["environment/broken"] == 0
    again, _, same_rewards = play(walker(Log()), slots=4)
    np.testing.assert_array_equal(again.completion_tokens, rollouts.completion_tokens)
    np.testing.assert_array_equal(same_rewards, rewards)


def chatter(log, style):
    """Goes on by messages, as any chat client does."""

    def chat(base_url, prompt, **row):
        messages = [{"role": "user", "content": prompt}]
        parts, logp, begin = [], [], None
        for number in range(3):
            fields = {"messages": messages, "logprobs": True, **IDS}
            document = ask(base_url, "/chat/completions", **fields)
            (choice,) = document["choices"]
            begin = begin or document["prompt_token_ids"]
            word = {"role": "user", "content": f"More, {number}."}
            messages = [*messages, choice["message"], word]
            is_ended = choice["finish_reason"] != "length"
            between = "\n" if is_ended else "<|end|>\n"
            between += f"<|start|>user\nMore, {number}.<|end|>\n<|start|>assistant\n"
            parts += [choice["token_ids"], chatting.ids(between)]
            logp += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            if sum(map(len, parts)) > STEPS - LIMIT:
                break
        log.samples.append((begin, parts, logp))
        return 1.0

    assert style in ("closed", "thinking")
    return chat


@pytest.mark.full
@pytest.mark.parametrize("style", ["closed", "thinking"])
def test_a_chat_goes_on_behind_what_was_drawn_whatever_its_template_rewrites(style):
    log = Log()
    rollouts, dialogue, rewards = play(chatter(log, style), style)
    assert not dialogue.unscored(PROMPTS, GROUP).any()
    log.check(rollouts)
    assert (rewards == 1).all()
    talks = dialogue.spoken([0], GROUP)
    assert talks[0].prompt == [{"role": "user", "content": "a"}]
    roles = [message["role"] for message in talks[0].messages]
    assert roles[:3] == ["assistant", "user", "assistant"]


@pytest.mark.full
@pytest.mark.slow
def test_a_text_goes_on_behind_the_token_that_ended_a_turn_though_it_does_not_show_it():
    log = Log()

    def write(base_url, prompt):
        text, parts, logp = prompt, [], []
        for _ in range(3):
            fields = {"prompt": text, "logprobs": 0, "max_tokens": 8, **IDS}
            (choice,) = ask(base_url, **fields)["choices"]
            text += choice["text"] + "!"
            parts += [choice["token_ids"], chatting.ids("!")]
            logp += choice["logprobs"]["token_logprobs"]
        log.samples.append((chatting.ids(prompt), parts, logp))
        return 0

    log_of = play(write)
    log.check(log_of[0])
    ends = [part[-1] == END for _, parts, _ in log.samples for part in parts[::2]]
    assert any(ends)


@pytest.mark.full
@pytest.mark.parametrize("style", [None, "closed"])
def test_a_program_may_rewrite_its_history_where_a_run_forks(style):
    log = []

    def compact(base_url, prompt):
        """The second query begins anew, the third goes on behind it."""
        begin = {"role": "user", "content": f"Again: {prompt}."}
        messages, path, parts = [{"role": "user", "content": prompt}], "/chat/completions", []
        text = prompt
        for number in range(3):
            if number == 1:
                text, messages = f"Again: {prompt}.", [begin]
            fields = {"messages": messages} if style else {"prompt": text}
            fields |= {"max_tokens": 3, **IDS}
            document = ask(base_url, path if style else "/completions", **fields)
            (choice,) = document["choices"]
            where = document if style else choice
            parts.append((where["prompt_token_ids"], choice["token_ids"]))
            if style:
                messages = [*messages, choice["message"], {"role": "user", "content": "More."}]
            else:
                text += choice["text"] + "!"
        log.append(parts)
        return 1.0

    rollouts, dialogue, rewards = play(compact, style, forks=True)
    assert not dialogue.unscored(PROMPTS, GROUP).any()
    assert (rewards == 1).all()
    assert dialogue.metrics(PROMPTS * GROUP)["turns/forked"] == 1
    drawn = []
    for place in np.ndindex(PROMPTS, GROUP):
        tokens, mask = rollouts.completion_tokens[place], rollouts.token_mask[place]
        last = int(np.flatnonzero(mask)[-1]) + 1
        fork = rollouts.fields[FORK][place][:last]
        prompt = rollouts.prompt_tokens[place[0]][rollouts.prompt_mask[place[0]]]
        assert set(fork) == {0, 1}
        drawn.append([*prompt, -1, *tokens[:last][fork == 0], -1, *tokens[:last][fork == 1]])
    expected = []
    for first, second, third in log:
        between = "!"
        if style:
            between = "<|start|>user\nMore.<|end|>\n<|start|>assistant\n"
            between = ("\n" if second[1][-1] == END else "<|end|>\n") + between
        rewritten = [*second[0], *second[1], *chatting.ids(between), *third[1]]
        expected.append([*first[0], -1, *first[1], -1, *rewritten])
    assert sorted(drawn) == sorted(expected)


def refused(code, function, *arguments, **fields):
    """The message of a query that is refused."""
    with pytest.raises(urllib.error.HTTPError) as info:
        function(*arguments, **fields)
    assert info.value.code == code
    return message_in(info.value)


def message_in(error: Any) -> str:
    with error:
        return json.load(error)["error"]["message"]


@pytest.mark.full
def test_a_program_that_asks_beyond_its_last_turn_is_told_and_may_end():
    messages = []

    def ask_on(base_url, prompt):
        ids = chatting.ids(prompt)
        for _ in range(TURNS):
            ids += ask(base_url, prompt=ids, max_tokens=2, **IDS)["choices"][0]["token_ids"]
        messages.append(refused(400, ask, base_url, prompt=ids))
        return 0.5

    rollouts, _, rewards = play(ask_on)
    assert len(messages) == PROMPTS * GROUP
    assert set(messages) == {endpoint.OVER}
    assert (rewards == 0.5).all()
    assert (rollouts.fields["turn"].max(-1) == TURNS - 1).all()


@pytest.mark.full
def test_a_program_whose_words_leave_no_room_is_told():
    def talk_much(base_url, prompt):
        ids = chatting.ids(prompt)
        ids += ask(base_url, prompt=ids, **IDS)["choices"][0]["token_ids"]
        message = refused(400, ask, base_url, prompt=ids + [5] * STEPS)
        return 1.0 if message == endpoint.OVER else 0.0

    _, dialogue, rewards = play(talk_much)
    assert (rewards == 1).all()
    assert dialogue.metrics(PROMPTS * GROUP)["turns/cut"] == 1


def fails(base_url, prompt):
    ask(base_url, prompt=prompt)
    raise KeyError("no")


def fails_at_once(base_url):
    raise SystemExit(0)


def asks_nothing(base_url):
    return 1.0


def returns_a_text(base_url, prompt):
    ask(base_url, prompt=prompt)
    return "good"


def rewrites(base_url, prompt):
    ask(base_url, prompt=prompt)
    raise ValueError(refused(409, ask, base_url, prompt="something else"))


def rewrites_and_hides_it(base_url, prompt):
    ask(base_url, prompt=prompt)
    refused(409, ask, base_url, prompt="something else")
    return 1.0


def says_nothing(base_url, prompt):
    ask(base_url, prompt=prompt)
    time.sleep(4)
    return 1.0


async def waits(base_url, prompt):
    ask(base_url, prompt=prompt)
    return 1


BROKEN = {
    fails: "fails: fails raised KeyError: 'no'",
    fails_at_once: "fails_at_once: fails_at_once raised SystemExit: 0",
    asks_nothing: "asks_nothing: asks_nothing ended before its first query",
    returns_a_text: "returns_a_text: returns_a_text returned the reward 'good': return a number",
    rewrites: f"rewrites: {endpoint.REWRITTEN}",
    rewrites_and_hides_it: f"rewrites_and_hides_it: {endpoint.REWRITTEN}",
    says_nothing: "says_nothing: says_nothing took more than 1.5 s",
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.__name__)
def test_a_program_that_breaks_leaves_its_samples_unscored(program):
    seconds = 1.5 if program is says_nothing else 20.0
    _, dialogue, rewards = play(program, seconds=seconds)
    assert np.isnan(rewards).all()
    problems = {talk.problem for talk in dialogue.spoken(range(PROMPTS), GROUP)}
    assert {f"{program.__name__}: {problem}" for problem in problems} == {BROKEN[program]}
    assert dialogue.unscored(PROMPTS, GROUP).all()


@pytest.mark.full
@pytest.mark.slow
def test_an_async_program_is_run_and_one_that_returns_none_gives_nothing():
    assert (play(waits)[2] == 1).all()
    rewards = play(lambda base_url, prompt: ask(base_url, prompt=prompt) and None)[2]
    assert all(math.isnan(value) for value in rewards.flat)


@pytest.mark.full
def test_what_a_turn_of_a_sample_cannot_be_asked_for():
    messages = {}

    def try_all(base_url, prompt, seed, answer):
        cases = {
            "n = 2": (400, {"n": 2}),
            "two prompts": (400, {"prompt": ["a", "b"]}),
            "greedy": (400, {"temperature": 0}),
            "temperature": (400, {"temperature": 0.5}),
            "seed": (400, {"seed": 1}),
            "stop": (400, {"stop": "a"}),
            "stop token": (400, {"stop_token_ids": [END, 5]}),
        }
        for name, (code, fields) in cases.items():
            messages[name] = refused(code, ask, base_url, **{"prompt": prompt, **fields})
        messages["elsewhere"] = refused(
            404, ask, f"{base_url.rsplit('/', 2)[0]}/x/v1", prompt=prompt
        )
        with ThreadPoolExecutor(2) as clients:
            futures = [clients.submit(ask, base_url, prompt=prompt) for _ in range(2)]
            problems = [future.exception() for future in futures]
        assert sum(problem is None for problem in problems) == 1
        messages["at once"] = message_in(next(filter(None, problems)))
        assert answer == "1"
        return seed % 7

    rewards = play(try_all)[2]
    assert not np.isnan(rewards).any()
    assert messages["n = 2"] == "n: a turn of a sample is drawn once; leave it out"
    assert messages["greedy"] == "temperature: the run says how it samples; leave it out"
    assert "ask for one after the other" in messages["at once"] or "rewrote" in messages["at once"]
    assert messages["elsewhere"].startswith("there is no such sample")


@pytest.mark.slow
def test_no_thread_of_a_program_stays_behind_a_refused_query():
    before = threading.active_count()
    play(rewrites)
    deadline = time.monotonic() + 10
    names = ("jaxgrpo-program",)
    while any(t.name in names for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(thread.name in names for thread in threading.enumerate())
    assert before >= 1


@pytest.mark.slow
def test_a_program_whose_arguments_are_no_columns_is_refused_before_the_run():
    def wants(base_url, question, seed):
        return 1.0

    rollout = RolloutKeys(
        prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=8
    )
    answers: Any = world.make_world((), {"": wants}, rollout, chatting.chat(), [END])
    message = r"wants is called with base_url, seed \(missing a required argument: 'question'\)"
    with pytest.raises(InputError, match=message):
        answers.converse([{"prompt": "a", "answer": "1"}])
    answers.converse([{"prompt": "a", "question": "1"}])


def test_tools_beside_a_program_are_refused():
    def look(words: str) -> str:
        """Looks.

        Args:
            words: for what
        """
        return words

    rollout = RolloutKeys(
        prompts_per_step=1, group_size=2, max_prompt_tokens=8, max_completion_tokens=8
    )
    with pytest.raises(InputError, match="a program brings its own tools; leave `tools` out"):
        world.make_world((look,), {"": asks_nothing}, rollout, chatting.chat(), [END])


@pytest.mark.full
@pytest.mark.slow
def test_a_run_trains_by_a_program(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(PROGRAM)
    tables = small_run.tables(tmp_path / "r", **{"train.steps": 2})
    del tables["rewards"]
    run = loop.train(files.from_dict({**tables, "environment": f"{code}:count"}))
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "turns/mean" in row]
    assert len(steps) == 2
    assert all(row["turns/mean"] == 2 for row in steps)
    assert all(row["environment/broken"] == 0 for row in steps)
    assert all(0 < row["rewards/count/mean"] < 1 for row in steps)


PROGRAM = '''
import json
import urllib.request


def count(base_url, prompt):
    """The share of digits in two turns."""
    text, read = prompt, ""
    for _ in range(2):
        fields = {"prompt": text, "max_tokens": 4}
        request = urllib.request.Request(f"{base_url}/completions", json.dumps(fields).encode())
        with urllib.request.urlopen(request) as answer:
            choice = json.load(answer)["choices"][0]
        read += choice["text"]
        text += choice["text"] + "="
    return sum(letter.isdigit() for letter in read) / 8
'''


@pytest.mark.full
def test_an_openai_client_as_it_comes_from_the_index_is_trained():
    openai = pytest.importorskip("openai")

    def agent(base_url, prompt):
        client = openai.OpenAI(base_url=base_url, api_key="any", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(2):
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
        return 1.0

    rollouts, dialogue, rewards = play(agent, "thinking")
    assert not dialogue.unscored(PROMPTS, GROUP).any()
    assert (rewards == 1).all()
    assert (rollouts.fields["turn"].max(-1) == 1).all()
