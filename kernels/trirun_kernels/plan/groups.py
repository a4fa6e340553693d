"""The per-group kernel (wgmma on int8 limbs, scales of any group): all tiles' k divided equally among the CTAs."""

from __future__ import annotations

from .problem import GROUPS, Plan, Problem
from .shared import most_stages
from .spans import equal_shares
from .table import first, table


def choose_groups(p: Problem) -> Plan:
    """The plan with as many stages as fit and pay."""
    rules = table("choice")["groups"]
    tokens = max(2, 1 << (p.m - 1).bit_length()) if p.m <= 16 else -(-p.m // 16) * 16
    most = first(rules["stages"], {"width": tokens * p.limbs, "limbs": p.limbs, "scale": p.scale})
    plan = most_stages(p, Plan(GROUPS, ctas=equal_shares(p, rules["least_share"])), most, step=2)
    early = min(rules["early"], plan.stages)
    return Plan(GROUPS, stages=plan.stages, ctas=plan.ctas, early=early, x_first=early)
