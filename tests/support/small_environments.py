"""Environments of TRL's and of Gym's protocol, and what samples talk to with them."""

from jaxgrpo.environments.calls import Call, Reading
from jaxgrpo.environments.partners import make_kind


def parse(text):
    """Every word is a call of the tool of its name."""
    return Reading(text, [Call(word, {}) for word in text.split()])


class Counter:
    """As TRL's documentation has them."""

    def reset(self, start: int = 0, **row) -> str | None:
        self.count = start
        return f" From {start}." if start else None

    def up(self) -> str:
        """Counts up."""
        self.count += 1
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count)


class Guess:
    """As Gymnasium's, with its five values."""

    def reset(self, *, seed, low=0):
        self.number, self.steps = low + seed % 5, 0
        return "guess", {}

    def step(self, action):
        self.steps += 1
        return "no", 0.25, self.steps == 2, False, {}


def kind(factory, seconds=5.0, functions=None):
    return make_kind(factory, functions or {}, (), lambda: parse, seconds, "environment")
