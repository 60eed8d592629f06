"""Keywords and keys that do not exist."""

import jaxgrpo as jg

jg.train("quickstart", train={"steps": 20}, model={"path": "base"})
jg.train(5, foo=1)  # error: reportCallIssue
jg.train("quickstart", foo=1)  # error: reportCallIssue
jg.train("quickstart", train={"stepz": 20})  # error: reportArgumentType
jg.evaluate("base", scorrer="math")  # error: reportCallIssue
jg.chain(jg.sum_rewards(), jg.divide_by_group_std(epsilon=1e-4))  # error: reportCallIssue
