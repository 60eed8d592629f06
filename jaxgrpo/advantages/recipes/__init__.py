"""Methods by the names of their papers. Each is a chain: what it does is what it reads.

Every recipe takes `weights`, those of `sum_rewards`: None counts every reward with weight 1;
rlcr alone has weights of its own.
"""

from jaxgrpo.advantages.recipes.absolute import asymmetric, conditional_sign, reinforce, sign
from jaxgrpo.advantages.recipes.answers import alpha_dpg, dro_r3, f_dpg
from jaxgrpo.advantages.recipes.batch import lite_ppo, reinforce_pp
from jaxgrpo.advantages.recipes.group import dr_grpo, grpo, maxrl, rloo
from jaxgrpo.advantages.recipes.passk import passk
from jaxgrpo.advantages.recipes.peers import like_trl, like_verl
from jaxgrpo.advantages.recipes.scale import dapo, scale_rl
from jaxgrpo.advantages.recipes.several import dvao, gdpo, rlcr
from jaxgrpo.advantages.recipes.structured import darling, hicra, tree_grpo, tree_po, tree_rl
from jaxgrpo.advantages.recipes.tracked import ema, spo

__all__ = [
    "alpha_dpg",
    "asymmetric",
    "conditional_sign",
    "dapo",
    "darling",
    "dr_grpo",
    "dro_r3",
    "dvao",
    "ema",
    "f_dpg",
    "gdpo",
    "grpo",
    "hicra",
    "like_trl",
    "like_verl",
    "lite_ppo",
    "maxrl",
    "passk",
    "reinforce",
    "reinforce_pp",
    "rlcr",
    "rloo",
    "scale_rl",
    "sign",
    "spo",
    "tree_grpo",
    "tree_po",
    "tree_rl",
]
