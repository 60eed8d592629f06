"""Methods by the names of their papers. Each is a chain: what it does is what it reads.

Every recipe takes `weights`, those of `sum_rewards`: None counts every reward with weight 1.
"""

from jaxgrpo.advantages.recipes.absolute import sign
from jaxgrpo.advantages.recipes.group import dr_grpo, grpo
from jaxgrpo.advantages.recipes.structured import (
    darling,
    hicra,
    tree_grpo,
    tree_po,
    tree_rl,
)

__all__ = ["darling", "dr_grpo", "grpo", "hicra", "sign", "tree_grpo", "tree_po", "tree_rl"]
