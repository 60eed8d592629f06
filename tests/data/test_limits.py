"""Chat templates and tokenizers that would never end: each is refused in time, in one line."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gsm8k
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from jaxgrpo.core.errors import InputError
from jaxgrpo.data import chat as conversations
from jaxgrpo.data import limits, prompts
from jaxgrpo.data.chat import Chat, write
from jaxgrpo.models.hf import families, folders, targets

LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% for i in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
ENDLESS = "(a*)*b"
SLOW = "a" * 22 + "cb"
"""A text on which ENDLESS tries some millions of ways; with two a more the library gives up."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return gsm8k.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_chat(tokenizer, template: str) -> Chat:
    return Chat(tokenizer, template + "{{ messages[-1]['content'] }}", "the template", None, {})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOPS, "takes more than 0.5 s"),
        ("{% set n = 9 ** 9 %}{{ 9 ** n ** n }}", "takes more than 0.5 s"),
        ("{{ 'x' * 3000000000 }}", "takes more than 1 GiB"),
        ("{{ 'x' | center(3000000000) }}", "takes more than 1 GiB"),
        (f"{{% set ns = namespace(text='x') %}}{DOUBLED}{{{{ ns.text }}}}", "takes more than"),
        ("{{ 'x' * 2000000 }}", "it writes 2,000,004 characters"),
    ],
)
def test_a_template_without_end_is_refused(tokenizer, monkeypatch, template, reason):
    monkeypatch.setattr(conversations, "SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(InputError, match="row 7: the template fails") as refused:
        write(make_chat(tokenizer, template), "2+2?", "row 7")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert time.monotonic() - began < 30  # of a busy machine
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
    assert write(make_chat(tokenizer, ""), "2+2?", "row 7") == "2+2?"


def test_outside_the_main_thread_too(tokenizer, monkeypatch):
    monkeypatch.setattr(conversations, "SECONDS", 0.5)
    raised = []

    def refused() -> None:
        try:
            write(make_chat(tokenizer, LOOPS), "2+2?", "row 7")
        except InputError as error:
            raised.append(str(error))

    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    assert "takes more than 0.5 s" in raised[0]
    for _ in range(1000):  # the thread that rendered ends by itself
        if not any(running.name == "jaxgrpo-limited" for running in threading.enumerate()):
            return
        time.sleep(0.01)
    raise AssertionError("it runs on")


def write_folder(path: Path, pattern: str, *added: str) -> Path:
    """A folder with a tokenizer whose normalizer removes what fits the pattern."""
    words = {letter: place for place, letter in enumerate("abc+=0123456789")}
    plain_tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    plain_tokenizer.normalizer = normalizers.Replace(Regex(pattern), "")
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    fields = json.loads(plain_tokenizer.to_str())
    fields["added_tokens"] = [
        {"id": len(words) + place, "content": text, "normalized": True, **flags}
        for place, text in enumerate(added)
    ]
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(fields))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "="}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_a_tokenizer_that_fails_or_takes_too_long_names_the_rows(tmp_path, monkeypatch):
    tokenizer = folders.read_tokenizer(write_folder(tmp_path / "base", ENDLESS))
    assert prompts.token_ids(tokenizer, ["1+2=", "3"], "prompt") == [[6, 3, 7, 4], [8]]
    with pytest.raises(
        InputError, match=r"prompt of row 0 to 1: the tokenizer fails .*retry-limit"
    ):
        prompts.token_ids(tokenizer, ["1+2=", "aa" + SLOW], "prompt")
    monkeypatch.setattr(prompts, "SECONDS", 0.2)
    with pytest.raises(InputError, match="answer of row 0 to 15: the tokenizer takes more than"):
        prompts.token_ids(tokenizer, [SLOW] * 16, "answer")


@pytest.mark.full
@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_read_in_time_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"cannot be read .RuntimeError: .*retry-limit"):
        folders.read_tokenizer(write_folder(tmp_path / "failing", ENDLESS, "aa" + SLOW))
    monkeypatch.setattr(folders, "SECONDS", 3.0)
    many = [SLOW + "b" * place for place in range(100)]
    began = time.monotonic()
    with pytest.raises(InputError, match=r"cannot be read .TimeoutError: it takes more than 3 s."):
        folders.read_tokenizer(write_folder(tmp_path / "slow", ENDLESS, *many))
    assert time.monotonic() - began < 30  # of a busy machine; the tokens would take minutes


def test_a_config_with_too_many_layers_is_refused():
    config = {"model_type": "qwen3", "num_hidden_layers": 10_000_000}
    with pytest.raises(InputError, match=r"num_hidden_layers = 10000000: .* from 1 to 1,000"):
        families.model_config(config, "config.json")


def test_a_pattern_of_modules_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(targets, "SECONDS", 0.5)
    with pytest.raises(InputError, match=r"takes more than 0\.5 s to match model\.layers\.0"):
        targets._matches("(.*.*.*.*)*x", "model.layers.0.self_attn.q_proj" * 3)


def test_a_function_that_raises_in_time_raises_that():
    for call in (limits.within, limits.left_after):
        assert call(9, lambda: 3) == 3
        with pytest.raises(KeyError):
            call(9, lambda: {}["a"])


def test_a_caller_has_one_thread_until_a_call_takes_too_long():
    caller = limits.Caller("test-caller")
    first, second = (caller.call(9, threading.current_thread) for _ in range(2))
    assert first is second
    assert first is not threading.current_thread()
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        caller.call(9, lambda: exec("raise SystemExit(3)"))
    assert caller.call(None, threading.current_thread) is first
    with pytest.raises(limits.TimedOut):
        caller.call(0.05, lambda: [time.sleep(0.01) for _ in range(900)])
    third = caller.call(9, threading.current_thread)
    assert third is not first
    del caller
    for thread in (first, third):
        thread.join(9)
        assert not thread.is_alive()


def test_a_caller_that_found_no_thread_begins_one_with_the_next_call(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    caller = limits.Caller("test-refused")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                caller.call(9, int)
    assert caller.call(9, int) == 0


@pytest.mark.full
def test_thousands_of_callers_leave_no_thread_behind():
    for _ in range(3000):
        limits.Caller("test-many").call(9, int)
    deadline = time.monotonic() + 9
    while names := [t.name for t in threading.enumerate() if t.name == "test-many"]:
        assert time.monotonic() < deadline, len(names)
        time.sleep(0.01)


async def find_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_threads_that_begin_at_once_share_one_loop(monkeypatch):
    make, loop = asyncio.new_event_loop, limits.EventLoop("test-loop")

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    with ThreadPoolExecutor(8) as threads:
        loops = [*threads.map(lambda _: loop.begin(find_loop())(9), range(8))]
    assert len({*loops}) == 1


def test_a_loop_that_is_blocked_is_left_once_and_an_error_is_raised_as_it_is():
    async def block() -> None:
        time.sleep(0.3)

    async def late() -> None:
        raise TimeoutError("a server")

    loop = limits.EventLoop("test-blocked")
    with pytest.raises(TimeoutError, match="a server"):
        loop.begin(late())(9)
    first = loop.begin(find_loop())(9)
    waiting = [loop.begin(block()), loop.begin(find_loop())]
    with pytest.raises(limits.TimedOut):
        waiting[0](0.02)
    second = loop.begin(find_loop())(9)
    with pytest.raises(limits.TimedOut):
        waiting[1](0.02)
    assert loop.begin(find_loop())(9) is second is not first


def test_a_loop_that_found_no_thread_begins_with_the_next_coroutine(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    loop, coroutine = limits.EventLoop("test-refused"), find_loop()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop.begin(coroutine)
    loop.begin(coroutine)(9)
