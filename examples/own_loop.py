"""A training loop of your own: it ends with the same parameters as `jaxgrpo train CONFIG`.

python examples/own_loop.py CONFIG [KEY=VALUE ...]
"""

import sys

import jaxgrpo as jg

config = jg.load_config(sys.argv[1], sys.argv[2:])
run = jg.setup(config)
state = run.state

for _ in range(config.train.steps):
    # run.select, run.sample and run.reward; with rollout.refill until the step is full
    state, collected = run.collect(state)
    state, prepared = run.prepare(state, collected.rollouts)
    state, metrics = run.update(state, prepared.batches)
    reward = prepared.metrics["reward"].result()
    print(f"step {state.step}: reward {reward:.3f}, loss {metrics['loss'].result():.2e}")

print("parameter hash", jg.parameter_hash(state.trainable))
