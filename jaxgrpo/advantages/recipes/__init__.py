"""Methods by the names of their papers. Each is a chain of parts and nothing else.

Every recipe takes `weights`, those of `sum_rewards`: None counts every reward with weight 1;
rlcr alone has weights of its own.
"""

# ruff: noqa: F401

from jaxgrpo.advantages.recipes.group import (
    asymmetric,
    conditional_sign,
    dapo,
    dr_grpo,
    grpo,
    lite_ppo,
    maxrl,
    passk,
    reinforce,
    reinforce_pp,
    rloo,
    scale_rl,
    sign,
)
from jaxgrpo.advantages.recipes.peers import like_trl, like_verl
from jaxgrpo.advantages.recipes.several import (
    darling,
    dro_r3,
    dvao,
    ema,
    gdpo,
    gigpo,
    hicra,
    rlcr,
    spo,
    tree_grpo,
    tree_po,
    tree_rl,
)
from jaxgrpo.advantages.recipes.targets import alpha_dpg, f_dpg, opd, sdpo
