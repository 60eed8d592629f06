"""Public words, misspelt, and a word that is not public where it is looked for."""

import jaxgrpo as jg
from jaxgrpo.config.files import suggest  # error: reportPrivateImportUsage

method = jg.chain(jg.sum_rewards(), jg.substract_group_mean())  # error: reportAttributeAccessIssue
recipe = jg.advantages.bulid("grpo")  # error: reportAttributeAccessIssue
rows = jg.task.load("task:arithmetic:train")  # error: reportAttributeAccessIssue
print(suggest("grop", ["grpo"]))
