"""Rewards and steps of a chain that do not return what is asked for."""

import jaxgrpo as jg


def exact_match(completion: str, answer: str) -> float:
    return float(completion == answer)


def as_text(completions: list[str]) -> list[str]:
    return ["right" for _ in completions]


def all_of_them(signal: jg.Signal) -> jg.Signal:
    return signal


jg.train("quickstart", rewards=[exact_match])  # error: reportArgumentType
jg.train("quickstart", rewards={"text": as_text})  # error: reportArgumentType
jg.evaluate("base", data="task:arithmetic:test", scorer=exact_match)  # error: reportArgumentType
jg.chain(jg.sum_rewards(), all_of_them)  # error: reportArgumentType
