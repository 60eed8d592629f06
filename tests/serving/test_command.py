"""`jaxgrpo serve` as a process, and asked by an OpenAI client as it comes from the index."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from typing import Any

import pytest
import served

from jaxgrpo.cli import main as cli

_ADDRESS = re.compile(r"mine at (\S+) for this machine alone; token (\S+)")
SET = ("--set", "rollout.max_prompt_tokens=32", "rollout.slots=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.save(tmp_path_factory.mktemp("served") / "tiny")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_answers_and_a_signal_ends_it(folder, python, environment, number, code):
    words = ("serve", folder, "--port", 0, "--max-tokens", 8, "--name", "mine", *SET)
    process: Any = subprocess.Popen(
        [python, "-m", "jaxgrpo", *map(str, words)],
        env=environment(JAXGRPO_TOKEN=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if " at http" in line)
        url, token = _ADDRESS.findall(line)[0]
        headers = {"Authorization": f"Bearer {token}"}
        body = json.dumps({"prompt": "1+1", "temperature": 0}).encode()
        # 16 tokens are the default, and more than this server draws: as many as it draws.
        request = urllib.request.Request(f"{url}/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            document = json.load(answer)
        assert 1 <= document["usage"]["completion_tokens"] <= 8
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_served_is_said(tmp_path, capsys, monkeypatch):
    assert cli.main(["serve", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--temperature", "-1"]) == 2
    assert "--temperature -1: give 1e-06 to 1e+06, or 0" in capsys.readouterr().err
    monkeypatch.setenv("JAXGRPO_TOKEN", "two words")
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "JAXGRPO_TOKEN: a header cannot hold it" in capsys.readouterr().err


@pytest.mark.full
def test_an_openai_client_chats(folder):
    openai = pytest.importorskip("openai")
    with served.serving(folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=served.TOKEN, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "Go."}]
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            max_completion_tokens=6,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        (choice,) = answer.choices
        assert choice.finish_reason in ("stop", "length")
        assert len(choice.logprobs.content) == len(choice.token_ids) == 6
        assert answer.usage.total_tokens == len(answer.prompt_token_ids) + 6
        options = {"temperature": 0, "max_tokens": 6, "stream": True}
        stream = client.chat.completions.create(model="tiny", messages=messages, **options)
        texts = [part.choices[0].delta.content for part in stream]
        assert "".join(texts) == choice.message.content
        again = [*messages, choice.message, {"role": "user", "content": "On."}]
        longer = client.chat.completions.create(model="tiny", messages=again, max_tokens=2, n=3)
        assert [choice.index for choice in longer.choices] == [0, 1, 2]
        text = client.completions.create(model="tiny", prompt="Go.", seed=1, max_tokens=4)
        assert text.object == "text_completion"
        with pytest.raises(openai.BadRequestError, match="expected 1, with which all samples"):
            client.chat.completions.create(model="tiny", messages=messages, temperature=0.3)
        with pytest.raises(openai.NotFoundError, match="there is only 'tiny'"):
            client.chat.completions.create(model="gpt", messages=messages)
        stranger = client.with_options(api_key="guessed")
        with pytest.raises(openai.AuthenticationError, match="the token is wrong"):
            stranger.models.list()
