"""Plays tasks of verifiers, which has a Python environment of its own (docs/serving.md)."""

import asyncio
import functools
import json
import os
import queue
import subprocess
import sys
import threading

PYTHON = os.path.abspath(os.environ.get("HARNESS_PYTHON", ".venv/harness/bin/python"))
lock = threading.Lock()


def agent(base_url, idx):
    """In the run: verifiers plays task `idx`, and its reward is the sample's."""
    answer = queue.SimpleQueue()
    with lock:
        harness, waiting = start()
        waiting[base_url] = answer
        print(json.dumps([base_url, idx]), file=harness.stdin, flush=True)
    return answer.get()  # where it failed a text, which breaks the sample and is shown


@functools.cache
def start():
    path = f"{os.path.dirname(PYTHON)}:{os.environ['PATH']}"  # for uv, which verifiers calls
    options = {"env": {**os.environ, "PATH": path}, "text": True}
    harness = subprocess.Popen([PYTHON, __file__], stdin=-1, stdout=-1, **options)
    waiting = {}

    def read():
        for base_url, reward in map(json.loads, harness.stdout or ()):
            waiting.pop(base_url).put(reward)
        for answer in list(waiting.values()):
            answer.put("verifiers has ended")

    threading.Thread(target=read, daemon=True).start()
    return harness, waiting


async def play():
    """In the environment of verifiers: plays the tasks that come, side by side."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

    client = {"type": "eval", "api_key_var": "", **json.loads(os.environ.get("CLIENT", "{}"))}
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "model": "policy"}
    config = vf.SingleAgentEnvConfig(taskset={"id": os.environ["TASKSET"]}, agent=seat)
    env = vf.SingleAgentEnv(config)
    tasks = list(env.taskset)

    async def run(base_url, idx):
        url = {**client, "base_url": base_url}
        trace = await vf.make_agent(vf.AgentConfig(**seat, client=url)).run(tasks[idx], tools=tools)
        reward = trace.reward if trace.ok else str(trace.last_error)
        print(json.dumps([base_url, reward]), flush=True)

    async with env.shared_tools() as tools, asyncio.TaskGroup() as group:
        while line := await asyncio.to_thread(sys.stdin.readline):
            group.create_task(run(*json.loads(line)))


if __name__ == "__main__":
    asyncio.run(play())
