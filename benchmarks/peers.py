"""What draws beside our sampler with the weights of our model: `generate` of Hugging Face
transformers on the same device, or vLLM's build for CPUs, a process of another Python."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.common import timed
from benchmarks.versus import vllm_samples
from benchmarks.versus.work import THREADS, generation
from benchmarks.workloads import END, PAD, Workload
from jaxgrpo.core.types import Params, Prompts, Rollouts
from jaxgrpo.models.api import Model
from jaxgrpo.models.hf import folders

CACHES = {"cpu": ("dynamic", "static"), "cuda": ("dynamic",)}
"""With a static cache on a GPU generate compiles the model: a quarter of Q/A took 50 s on an H100,
after a short first call, instead of 2.8."""


class Run(NamedTuple):
    """One sampling of a workload."""

    seconds: float
    tokens: int  # generated, end tokens included
    slot_steps: int | None = None  # decode steps times slots

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


class Transformers:
    """transformers' class in the model's dtype, read from a folder that we wrote.

    On a CPU it has THREADS threads, on a GPU the whole device beside JAX.

    Raises: ImportError without torch, which jaxgrpo itself does not need; RuntimeError where JAX
      has a GPU and torch has none.
    """

    def __init__(self, model: Model, params: Params, prompts: Prompts, workload: Workload):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(THREADS)
        with tempfile.TemporaryDirectory() as folder:
            folders.save_model(model, params, f"{folder}/model")
            dtype = getattr(torch, model.config.dtype)
            loaded: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=dtype)
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        self.torch, self.workload, self.cache = torch, workload, "dynamic"
        self.model = loaded.eval().to(self.device)
        tokens, mask = (np.asarray(a) for a in (prompts.prompt_tokens, prompts.prompt_mask))
        self.width = tokens.shape[1]
        # generate continues at the right edge: prompts are padded on the left.
        shift = mask.sum(1, keepdims=True) + np.arange(self.width)
        left = (np.take_along_axis(array, shift % self.width, axis=1) for array in (tokens, mask))
        self.tokens, self.mask = (self._placed(np.ascontiguousarray(array)) for array in left)

    def run(self, seed: int, cache: str | None = None, completion: int = 0) -> Run:
        """Samples the workload. Lengths are exact unless it is ragged.

        Where they are exact there is no end token, so that generate has none to mask either.

        Args:
          cache: one of CACHES of the device; None: the one chosen.
          completion: tokens at most; 0: as many as the workload has.
        """
        work = self.workload
        completion = completion or work.completion
        settings = generation(
            *(completion, END if work.ragged else None, PAD),
            num_return_sequences=work.samples,
            min_new_tokens=None if work.ragged else completion,
            cache_implementation=cache or self.cache,
        )
        self.torch.manual_seed(seed)
        options = {"attention_mask": self.mask, "generation_config": settings}
        out, seconds = timed(lambda: self.model.generate(self.tokens, **options).cpu())
        return Run(seconds, self._generated(out[:, self.width :].numpy()))

    def choose_cache(self) -> dict[str, Run]:
        """Runs a quarter of the tokens with each cache and keeps the faster. Returns both runs."""
        caches, part = CACHES[self.device], self.workload.completion // 4
        for cache in caches:
            self.run(0, cache, completion=4)  # what only a first run pays
        runs = {cache: self.run(0, cache, completion=part) for cache in caches}
        self.cache = min(runs, key=lambda cache: runs[cache].seconds_per_token)
        return runs

    def difference(self, rollouts: Rollouts) -> float:
        """The largest difference of log-probs on the first sample of ours: the same model?"""
        torch = self.torch
        prompt = np.asarray(rollouts.prompt_tokens[0])[np.asarray(rollouts.prompt_mask[0])]
        live = np.asarray(rollouts.token_mask[0, 0])
        completion = np.asarray(rollouts.completion_tokens[0, 0])[live]
        tokens = self._placed(np.concatenate([prompt, completion]))
        with torch.inference_mode():
            logits = self.model(tokens[None], logits_to_keep=len(completion) + 1).logits[0, :-1]
            logp = torch.log_softmax(logits.float(), -1)
            logp = logp.gather(-1, tokens[len(prompt) :, None])[:, 0].cpu().numpy()
        return float(np.abs(logp - np.asarray(rollouts.behavior_logp[0, 0])[live]).max())

    def _placed(self, tokens: np.ndarray) -> Any:
        return self.torch.from_numpy(tokens).long().to(self.device)

    def _generated(self, completions: np.ndarray) -> int:
        """Tokens up to the first end token, that included."""
        if not self.workload.ragged:
            return completions.size
        ends = completions == END
        length = np.where(ends.any(1), ends.argmax(1) + 1, completions.shape[1])
        return int(length.sum())


class Vllm:
    """vLLM with the model's folder and the prompts' token ids (`versus/vllm_samples.py`).

    It has the cores of this process, a gigabyte of keys and values for each of them, its defaults
    for the rest, and its engine in the process that is asked.

    Args:
      python: of an environment that has vLLM.

    Raises: RuntimeError where it ends before it answers.
    """

    cache = "pages"

    def __init__(
        self, model: Model, params: Params, prompts: Prompts, workload: Workload, python: str
    ):
        tokens, mask = (np.asarray(a) for a in (prompts.prompt_tokens, prompts.prompt_mask))
        ids = [row[is_token].tolist() for row, is_token in zip(tokens, mask, strict=True)]
        sizes = workload.samples, workload.completion, END if workload.ragged else None
        self.folder = tempfile.TemporaryDirectory()
        home = Path(self.folder.name)
        folders.save_model(model, params, home / "model")
        sampling = vllm_samples.Sampling(ids, *sizes, model.config.dtype)
        (home / "model" / vllm_samples.FILE).write_text(json.dumps(sampling._asdict()))
        self.log = home / "log"
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": str(len(cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [python, vllm_samples.__file__, str(home / "model")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            env=environment,
        )

    def run(self, seed: int) -> Run:
        """Samples the workload; vLLM draws from its default seed, one round after another."""
        answer = self._ask({"round": seed})
        return Run(answer["seconds"], answer["tokens"])

    def difference(self, rollouts: Rollouts) -> float:
        """As that of `Transformers`."""
        prompt = np.asarray(rollouts.prompt_tokens[0])[np.asarray(rollouts.prompt_mask[0])]
        live = np.asarray(rollouts.token_mask[0, 0])
        completion = np.asarray(rollouts.completion_tokens[0, 0])[live]
        logp = self._ask({"score": np.concatenate([prompt, completion]).tolist()})["logp"]
        ours = np.asarray(rollouts.behavior_logp[0, 0])[live]
        return float(np.abs(np.asarray(logp[-len(completion) :]) - ours).max())

    def _ask(self, request: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            words = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"vLLM ended with {self.process.wait()}; its last words:\n{words}")
        return json.loads(line)
