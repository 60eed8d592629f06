"""The worked examples: a reward model of transformers, and a judge behind HTTP."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
import time
import urllib.error
from collections import Counter
from typing import Any

import pytest

from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.rewards.registry import is_per_sample


def load(repository, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, repository / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Judge(http.server.BaseHTTPRequestHandler):
    """Marks a completion by its own number; "busy" is refused twice, "slow" and "odd" for good,
    "empty" holds no reply and "cut" ends before its end."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        text = question.split("Answer of a student: ")[1].split("\n")[0]
        server: Any = self.server
        server.requests[text] += 1
        server.keys.add(self.headers.get("Authorization"))
        status, reply = 200, text
        if "busy" in text and server.requests[text] < 3:
            status = 503
        if body["model"] != "judge":
            status = 404
        if "slow" in text:
            time.sleep(2)
        answer = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        if "empty" in text:
            answer = json.dumps({"choices": []}).encode()
        missing = 9 if "cut" in text else 0
        self.close_connection = bool(missing)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer) + missing))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server():
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads, server.requests, server.keys = True, Counter(), set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_judge_of_the_examples_asks_again_gives_up_and_tells_a_refusal(
    repository, server, monkeypatch
):
    module = load(repository, "own_judge")
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"

    def judged(*texts: Any, **options: Any) -> Any:
        options_with_server = {"url": url, "model": "judge", "tries": 3, "pause": 0.01, **options}
        return module.judged(
            ["1+1="] * len(texts), list(texts), ["2"] * len(texts), **options_with_server
        )

    assert is_per_sample(module.judged)
    assert judged("10", "7.5", "busy 4", "odd", "99") == [1.0, 0.75, 0.4, None, 1.0]
    assert judged("empty 4", "cut 4", "4") == [None, None, 0.4]
    assert judged("<think>9 or 10?</think> 4", "<think>9 or 10?") == [0.4, None]
    assert (server.requests["busy 4"], server.requests["10"], server.keys) == (
        3,
        1,
        {"Bearer secret"},
    )
    assert judged([{"role": "assistant", "content": "5"}]) == [0.5]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        judged("10", model="none")
    assert judged("10", url="http://127.0.0.1:9/", tries=1) == [None]


def test_a_reply_that_is_too_late_is_not_scored(repository, server):
    module = load(repository, "own_judge")
    url = f"http://127.0.0.1:{server.server_port}/"
    options = {"url": url, "model": "judge", "timeout_each": 0.3, "tries": 1}
    assert module.judged(["a"] * 2, ["slow 3", "8"], ["2"] * 2, **options) == [None, 0.8]


def test_the_reward_model_of_the_examples_scores_in_batches_as_one_by_one(repository, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    sizes |= {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3Config.from_dict(sizes)
    classifier = Qwen3ForSequenceClassification(config).eval()
    classifier.save_pretrained(tmp_path)
    module = load(repository, "own_reward_model")
    prompts, completions = ["1+1=", "12+30=", "7+8=", "1+1="], ["2", "42", "7+8=15", "3"]
    scores = module.score(prompts, completions, model=str(tmp_path), batch_size=3, answer=None)
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        ids = torch.tensor([tokenizer(prompt + completion)["input_ids"]])
        with torch.inference_mode():
            assert score == pytest.approx(classifier(input_ids=ids).logits.item(), abs=1e-5)
    assert len({*scores}) == 4
    assert module._load.cache_info().misses == 1
    module.score(prompts, completions, model=str(tmp_path))
    assert module._load.cache_info().misses == 1
