"""Methods by the names of their papers. Each is a chain: what it does is what it reads.

Every recipe takes `weights`, those of `sum_rewards`: None counts every reward with weight 1;
rlcr alone has weights of its own.
"""

from jaxgrpo.advantages.recipes.absolute import sign
from jaxgrpo.advantages.recipes.group import dr_grpo, grpo
from jaxgrpo.advantages.recipes.scale import dapo, scale_rl
from jaxgrpo.advantages.recipes.several import dvao, gdpo, rlcr

__all__ = ["dapo", "dr_grpo", "dvao", "gdpo", "grpo", "rlcr", "scale_rl", "sign"]
