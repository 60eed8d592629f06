"""How often a run compiles: not once more after its first steps, however ragged they are."""

import pytest
import small_run

from benchmarks.programs import compilations
from jaxgrpo.training import loop

STEPS, WARM_UP = 100, 5


@pytest.mark.fault(6)
@pytest.mark.full
def test_a_hundred_ragged_steps_compile_nothing_after_the_first_ones(tmp_path):
    counts = []
    with compilations() as seconds:
        changes = {"train.steps": STEPS, "checkpoint.every": STEPS, "run.samples_every": 0}
        changes |= {
            "train.tokens_per_micro_batch": 128
        }  # several micro-batches, not always as many
        finished = loop.train(
            small_run.config(tmp_path / "r", **changes),
            on_step=lambda *_: counts.append(len(seconds)),
        )
    assert counts[0] > 0
    assert counts[WARM_UP - 1] == counts[STEPS - 1]
    lines = small_run.metrics(finished.path)
    assert len({line["update/micro_batches"] for line in lines}) > 1
    assert len({line["completions/mean_length"] for line in lines}) > 50
