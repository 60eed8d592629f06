"""Methods by the names of their papers. Each is a chain: what it does is what it reads.

Every recipe takes `weights`, those of `sum_rewards`: None counts every reward with weight 1.
"""

from jaxgrpo.advantages.recipes.absolute import sign
from jaxgrpo.advantages.recipes.answers import alpha_dpg, dro_r3, f_dpg
from jaxgrpo.advantages.recipes.group import dr_grpo, grpo

__all__ = ["alpha_dpg", "dr_grpo", "dro_r3", "f_dpg", "grpo", "sign"]
