"""What a served model answers: the engine's own tokens, in the words of OpenAI and vLLM."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import chatting
import numpy as np
import pytest
import served

import jaxgrpo as jg
from jaxgrpo.cli import serve
from jaxgrpo.environments.calls import Call, Reading
from jaxgrpo.environments.serving.dialect import Prompted, _events, read_conversation
from jaxgrpo.environments.serving.fields import Completion, Wish

pytestmark = pytest.mark.slow
IDS = {"logprobs": 0, "return_token_ids": True}
QUESTION = [{"role": "user", "content": "Go on, 12."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served.serving(served.save(tmp_path_factory.mktemp("served") / "tiny")) as entry:
        yield entry


def post(server, path, **fields):
    status, document = server.ask(path, {"model": "tiny", **fields})
    assert status == 200, document
    return document


def complete(server, **fields):
    return post(server, "/v1/completions", **{"max_tokens": 12, **IDS, **fields})


def generate(server, ids, **sampling):
    sampling = {"max_tokens": 12, "logprobs": 0, **sampling}
    document = post(server, "/inference/v1/generate", token_ids=ids, sampling_params=sampling)
    return [choice["token_ids"] for choice in document["choices"]], document


def greedy_by_hand(server, ids, count):
    """Tokens and log-probs of the likeliest continuation, by one pass of the model per token."""
    model, params = jg.load_model(server.folder)[:2]
    tokens, logp = list(ids), []
    for _ in range(count):
        row = np.zeros((1, served.WIDTH + served.LONGEST), np.int32)  # one shape: one program
        row[0, : len(tokens)] = tokens
        is_token = np.arange(row.shape[1])[None] < len(tokens)
        table = np.asarray(jg.logits(model, params, row, is_token)[0, len(tokens) - 1], np.float64)
        tokens.append(int(table.argmax()))
        logp.append(table.max() - np.log(np.exp(table - table.max()).sum()) - table.max())
        if tokens[-1] in server.policy.engine.settings.stop_tokens:
            break
    return tokens[len(ids) :], logp


def test_the_model_is_listed_with_its_length(server):
    status, document = server.ask("/v1/models")
    (model,) = document["data"]
    assert (status, model["id"]) == (200, "tiny")
    assert model["max_model_len"] == served.WIDTH + served.LONGEST
    assert server.ask("/health", token=None) == (200, {"status": "ok"})


def test_greedy_tokens_and_log_probs_are_those_of_sample(server):
    prompts = ["12+3", "Go", "a"]
    rows = jg.sample(
        server.folder,
        prompts,
        temperature=0,
        max_tokens=12,
        data={"chat_template": "none"},
    )
    document = complete(server, prompt=prompts, temperature=0)
    for choice, row in zip(document["choices"], rows, strict=True):
        assert choice["token_ids"] == row["completion_ids"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(row["logps"], abs=1e-5)
        assert choice["prompt_token_ids"] == chatting.ids(row["prompt"])
    written = sum(len(row["completion_ids"]) for row in rows)
    assert document["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": written,
        "total_tokens": 7 + written,
    }


@pytest.mark.parametrize("length", [1, served.WIDTH - 1, served.WIDTH, served.WIDTH + 9])
def test_a_prompt_of_any_length_is_continued_as_one_pass_per_token_does(server, length):
    ids = np.random.default_rng(length).integers(3, 90, length).tolist()
    tokens, logp = greedy_by_hand(server, ids, 10)
    (drawn,), document = generate(server, ids, temperature=0, max_tokens=10)
    assert drawn == tokens
    content = document["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == tokens
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
    assert [entry["logprob"] for entry in content] == pytest.approx(logp, abs=1e-4)
    assert document["choices"][0]["weight_versions"] == [
        {"version": "0", "start": 0, "end": len(tokens)}
    ]


def test_eight_clients_at_once_get_what_each_gets_alone(server):
    def ask(seed):
        ids = chatting.ids("Play"[: 1 + seed % 4])
        return generate(server, ids, seed=seed, n=1 + seed % 3)[0]

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as clients:
        assert [*clients.map(ask, range(8))] == alone
    assert len({tuple(tokens) for group in alone for tokens in group}) > 8
    # The first of several samples is the single one; another seed is another sample.
    assert generate(server, chatting.ids("Pl"), seed=1)[0] == alone[1][:1]
    assert generate(server, chatting.ids("Pl"), seed=-1)[0] != alone[1][:1]


def test_log_probs_are_of_the_tokens_that_were_drawn(server):
    ids = chatting.ids("Say")
    (drawn,), document = generate(server, ids, seed=5)
    model, params = jg.load_model(server.folder)[:2]
    row = np.asarray([[*ids, *drawn]])
    logp = jg.token_logp(model, params, row, np.ones_like(row))[0, len(ids) :]
    content = document["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(np.asarray(logp), abs=1e-4)


def test_ids_without_a_limit_are_continued_to_the_end(server):
    query = {"token_ids": chatting.ids("Say"), "sampling_params": {"seed": 5, "logprobs": 1}}
    (choice,) = post(server, "/inference/v1/generate", **query)["choices"]
    assert len(choice["token_ids"]) == served.LONGEST or choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_the_answer_in_one_event_and_its_usage_in_another(server, path):
    """Read as lines: what an OpenAI client makes of them is in test_command."""
    query = {"messages": QUESTION} if "chat" in path else {"prompt": "Go on"}
    query |= {"model": "tiny", "seed": 7, "max_tokens": 9, "return_token_ids": True}
    answer = post(server, path, **query)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {served.TOKEN}"}
    document = json.dumps({**query, **options}).encode()
    request = urllib.request.Request(f"{server.url}{path}", document, headers)
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        parts = stream.read().decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    first, last = (json.loads(part.removeprefix("data: ")) for part in parts[:-2])
    (choice,), (piece,) = first["choices"], answer["choices"]
    assert choice["token_ids"] == piece["token_ids"]
    assert choice["finish_reason"] == piece["finish_reason"]
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    if "chat" in path:
        assert choice["delta"]["content"] == piece["message"]["content"]
        assert first["object"] == last["object"] == "chat.completion.chunk"
    else:
        assert choice["text"] == piece["text"]


def test_calls_of_a_stream_are_numbered():
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    answer = dict.fromkeys(("id", "created", "model", "usage"), 1)
    answer |= {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    (event,) = _events(answer, None)
    (choice,) = event["choices"]
    assert [part["index"] for part in choice["delta"]["tool_calls"]] == [0, 1]
    assert "message" not in choice


def test_a_query_without_a_seed_gets_new_samples(server):
    answers = {tuple(generate(server, chatting.ids("Say"))[0][0]) for _ in range(4)}
    assert len(answers) == 4


def test_a_chat_is_what_the_template_renders(server):
    tokenizer = server.policy.tokenizer
    call = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "2"},
    ]
    written = [dict(message) for message in messages]
    function = {"name": "add", "arguments": '{"a": 1}'}
    entry = {"id": "x", "type": "function", "function": function}
    written[2] = {"role": "assistant", "content": None, "tool_calls": [entry]}
    written[1] = {**written[1], "content": [{"type": "text", "text": "1+1?"}]}
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    document = post(
        server,
        "/v1/chat/completions",
        messages=written,
        tools=[schema],
        temperature=0,
        max_completion_tokens=4,
        return_token_ids=True,
        logprobs=True,
        top_logprobs=0,
    )
    ids = tokenizer.apply_chat_template(
        messages, tools=[schema], add_generation_prompt=True, tokenize=False
    )
    assert document["prompt_token_ids"] == chatting.ids(ids)
    (choice,) = document["choices"]
    tokens, _ = greedy_by_hand(server, document["prompt_token_ids"], 4)
    assert choice["token_ids"] == tokens
    assert choice["message"]["role"] == "assistant"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        tokenizer.decode([token]) for token in tokens
    ]
    assert choice["finish_reason"] == ("stop" if tokens[-1] == served.END else "length")


@pytest.mark.parametrize("opens", [True, False])
def test_behind_a_message_of_the_assistant_a_new_turn_begins_unless_it_is_continued(server, opens):
    messages = [*QUESTION, {"role": "assistant", "content": "13,"}]
    options = {} if opens else {"add_generation_prompt": False, "continue_final_message": True}
    query = {"messages": messages, "max_tokens": 2, "return_token_ids": True}
    document = post(server, "/v1/chat/completions", **query, **options)
    text = "<|start|>user\nGo on, 12.<|end|>\n<|start|>assistant\n13,"
    text += "<|end|>\n<|start|>assistant\n" * opens
    assert chatting.text(document["prompt_token_ids"]) == text


def test_an_end_is_told_and_its_token_is_among_the_ids(server):
    ids = chatting.ids("Say")
    for seed in range(40):
        document = complete(server, prompt=ids, seed=seed, max_tokens=20)
        (choice,) = document["choices"]
        is_end = choice["token_ids"][-1] in server.policy.engine.settings.stop_tokens
        assert choice["finish_reason"] == ("stop" if is_end else "length")
        text = server.policy.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["text"] == (text if not is_end else text.removesuffix("<|end|>"))
        if is_end:
            return
    pytest.fail("no sample of 40 ended")


def test_texts_and_tokens_of_a_query_end_its_samples(server):
    ids = chatting.ids("Say")
    (tokens,), _ = generate(server, ids, seed=3)
    text = server.policy.tokenizer.decode(tokens)
    stop = text[4:6]
    (choice,) = complete(server, prompt=ids, seed=3, stop=["no such", stop])["choices"]
    place = text.index(stop)
    assert choice["text"] == text[:place]
    assert choice["token_ids"] == tokens[: place + 2]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["logprobs"]["token_logprobs"]) == place + 2
    (cut,), document = generate(server, ids, seed=3, stop_token_ids=[tokens[5]])
    assert cut == tokens[: tokens.index(tokens[5]) + 1]
    assert document["choices"][0]["stop_reason"] == tokens[5]


def test_calls_of_tools_are_read_and_one_that_cannot_be_read_stays_text(server, monkeypatch):
    dialect = serve.make_dialect(server.answerer, "tiny")
    assert served.END in server.policy.engine.settings.stop_tokens

    def message(text):
        tokens = [*chatting.ids(text), served.END]
        completion = Completion(tokens, [0.0] * len(tokens), "stop")
        wish = Wish([[]], 1, 1, is_greedy=False, seed=None)
        return dialect.message(completion, Prompted(wish, tools=({},)))

    read = message('So: <tool_call>{"name": "add", "arguments": {"a": [1, 2]}}</tool_call>')
    assert read["content"] == "So:"
    (call,) = read["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": [1, 2]}'}
    (again,) = read_conversation([{"role": "assistant", "tool_calls": [call]}])
    assert again["tool_calls"][0]["function"]["arguments"] == {"a": [1, 2]}
    broken = message('<tool_call>{"name": "add", </tool_call>')
    assert broken["tool_calls"] == []
    assert broken["content"] == '<tool_call>{"name": "add", </tool_call>'
    thinks = lambda text, before: Reading("", [Call("add", {})], {"thinking": text})  # noqa: E731
    monkeypatch.setattr(dialect, "_parse", lambda: thinks)
    assert message("So.")["thinking"] == "So."


@pytest.mark.full
def test_a_desk_that_closes_refuses_what_is_under_way(tmp_path):
    folder = served.save(tmp_path / "tiny")
    with ThreadPoolExecutor(1) as clients:
        with served.serving(folder) as server:
            ids = chatting.ids("Say")
            assert len(generate(server, ids)[0]) == 1
            many = {"prompt": [ids] * 100, "max_tokens": 24, "n": 100}
            future = clients.submit(server.ask, "/v1/completions", many)
            time.sleep(1.0)
        status, document = future.result()
    assert (status, document["error"]["type"]) == (503, "ServiceUnavailableError")
