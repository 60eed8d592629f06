"""A reward is a function in TRL's protocol: keyword lists in, one number per completion out.

rewards = [{ use = "examples/own_reward.py:short_and_right", limit = 18 }]
"""


def short_and_right(completions, answer, limit=20, **columns):
    """1 for a right answer, minus 0.1 per character beyond `limit`; None means "not scored"."""
    scores = []
    for completion, right in zip(completions, answer, strict=True):
        correct = completion.split(" ")[-1] == right
        scores.append(float(correct) - 0.1 * max(0, len(completion) - limit))
    return scores
