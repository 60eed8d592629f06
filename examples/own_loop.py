"""A training loop of your own: it ends with the same parameters as `jaxgrpo train CONFIG`.

python examples/own_loop.py CONFIG [KEY=VALUE ...]
"""

import sys
from functools import partial

import jaxgrpo as jg

config = jg.load_config(sys.argv[1], sys.argv[2:])
run = jg.setup(config)
learner, stream = run.learner, run.stream

for step in range(config.train.steps):
    params = run.sync(learner)
    # Prompts are selected, sampled and rewarded; with rollout.refill until enough groups are live.
    live_groups = partial(run.live_groups, learner)
    stream, collected = run.collect(params, step, stream, live_groups)
    del params, live_groups  # makes room for the update
    learner, prepared = run.prepare(learner, collected.rollouts)
    learner, metrics = run.update(learner, prepared.batches)
    reward = prepared.metrics["reward"].result()
    print(f"step {learner.step}: reward {reward:.3f}, loss {metrics['loss'].result():.2e}")

print("parameter hash", jg.parameter_hash(learner.trainable))
