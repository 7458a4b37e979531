"""How a pool chooses one of its usable instances: filter, score, choose.

A policy narrows the candidates, scores what is left, and the lowest score wins. A policy of one's own is one small
class, registered as an entry point of the group ``pdserve.policies`` or named as ``module:Class``.
"""

from pdserve.router.policies.base import Candidate, Policy, RoutedRequest, Score, choose
from pdserve.router.policies.registry import ENTRY_POINT_GROUP, build_policy, policy_names

__all__ = [
    "ENTRY_POINT_GROUP",
    "Candidate",
    "Policy",
    "RoutedRequest",
    "Score",
    "build_policy",
    "choose",
    "policy_names",
]
