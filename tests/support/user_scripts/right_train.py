"""Trains with a reward and an advantage of its own, looks at the run, and exports the model."""

import jax.numpy as jnp

import jaxgrpo as jg

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 40) for b in range(10, 20)]


def right_and_short(
    completions: list[str], answer: list[str], limit: int = 18, **columns: object
) -> list[float | None]:
    """1 for the right sum, less where much was written; nothing written is not scored."""
    scores: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        if not completion:
            scores.append(None)
            continue
        correct = completion.split(" ")[-1] == right
        scores.append(float(correct) - 0.1 * max(0, len(completion) - limit))
    return scores


async def by_a_judge(completions: list[str], **columns: object) -> list[float]:
    return [float(completion.endswith("=")) for completion in completions]


@jg.transform
def subtract_group_median(signal: jg.Signal, rollouts: jg.Rollouts) -> jg.Signal:
    scored = jnp.where(signal.mask, signal.value, jnp.nan)
    median = jnp.nan_to_num(jnp.nanmedian(scored, axis=1, keepdims=True))
    return jg.Signal(value=signal.value - median, mask=signal.mask)


def show(step: int, metrics: dict[str, float]) -> None:
    if step % 10 == 0:
        print(step, metrics["reward"])


REWARDS: jg.rewards.Rewards = {"sum": right_and_short, "judge": by_a_judge, "form": "format"}
METHOD = jg.chain(jg.sum_rewards(sum=1.0, judge=0.1, form=0.0), subtract_group_median)


def main(base: str, folder: str) -> float:
    run = jg.train(
        "quickstart",
        rewards=REWARDS,
        advantage=METHOD,
        dataset=ROWS,
        on_step=show,
        model={"path": base},
        train={"steps": 20, "seed": 1},
        rollout={"group_size": 8, "temperature": 0.9, "stop_strings": ["\n"]},
        optimizer={"use": "adamw", "learning_rate": 1e-3, "b2": 0.99},
        loss={"kl": {"use": "k2", "beta": 0.01}},
        run={"dir": folder},
    )
    last = run.metrics[-1]
    print(run.path / "report.html", last["reward"], run.samples[0]["completion"])
    config = jg.load_config(run.path / "config.toml", ["train.steps=40"])
    again = jg.train(config, resume="auto", rewards=REWARDS, advantage=METHOD, dataset=ROWS)
    written = again.export(f"{folder}/exported", step="last")
    return jg.evaluate(written, data="task:arithmetic:test", scorer="arithmetic")["pass@1"]
