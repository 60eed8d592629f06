"""A judge behind HTTP as a reward: another model, asked through an OpenAI-compatible server.

rewards = [{ use = "examples/own_judge.py:judged", url = "http://localhost:8000/v1/chat/completions",
             model = "judge", on_error = "unscored" }]

Only the standard library is needed. A key for the server is read from the variable JUDGE_API_KEY.
"""

import concurrent.futures
import functools
import json
import os
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPException

QUESTION = """Question: {prompt}
Reference answer: {answer}
Answer of a student: {completion}
How good is the student's answer, from 0 (wrong) to 10 (right)? Reply with the number only."""
TRY_AGAIN = (408, 429, 500, 502, 503, 504)  # of the server, not of the question


def judged(
    prompts,
    completions,
    answer,
    url,
    model,
    timeout_each=30.0,
    tries=3,
    pause=1.0,
    at_once=8,
    **columns,
):
    """The judge's mark from 0 to 1; None ("not scored") if it gives none, or no reply in time.

    Args:
      timeout_each: seconds for one reply.
      tries: how often a question is asked if the server is busy, fails or is too slow.
      pause: seconds before the second try; twice as long before each further one.
      at_once: questions that wait for a reply at the same time.

    Raises: HTTPError where the server refuses the question, as for a wrong key or model.
    """
    ask = functools.partial(_mark, url, model, (timeout_each, tries, pause))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts, completions, answer))


judged.per_sample = True  # groups are judged while others still decode


def _mark(url, model, patience, prompt, completion, answer):
    text = QUESTION.format(prompt=_text(prompt), answer=answer, completion=_text(completion))
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": text}]}
    reply = _post(url, json.dumps(body).encode(), *patience) or ""
    mark = reply.rpartition("</think>")[2]  # numbers in a thought are no mark
    number = None if "<think>" in mark else re.search(r"\d+(\.\d+)?", mark)
    return min(float(number[0]), 10.0) / 10 if number else None


def _post(url, body, timeout, tries, pause):
    """The text of the reply; None if there is none after the last try."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("JUDGE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for number in range(tries):
        if number:
            time.sleep(pause * 2 ** (number - 1))
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code not in TRY_AGAIN:
                raise
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            pass  # no connection, too slow, cut off, no such reply
    return None


def _text(value):
    """A text, or the contents of messages."""
    return value if isinstance(value, str) else "\n".join(part["content"] for part in value)
