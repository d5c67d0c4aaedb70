"""Random calls of every op: right ones, and ones with something wrong. Each equals its reference or
is declined, and changes no byte beside what it may write.

``calls``              what all families share
``copies``             scatter and gather, compared bit for bit
``rollback``           sequences of its ops, compared bit for bit
``scenes``             what the families of floating-point results share
``gdn_replay``         its four ops
``sparse_gqa_verify``  its op
"""

from fuzzing.calls import Call, DoesNotFit, Failure, Score, Storage, View, any_way, dense, through
from fuzzing.copies import REFERENCES, any_call, place, run_copies
from fuzzing.rollback import Episode, apply, episode, run_episodes

__all__ = [
    "REFERENCES",
    "Call",
    "DoesNotFit",
    "Episode",
    "Failure",
    "Score",
    "Storage",
    "View",
    "any_call",
    "any_way",
    "apply",
    "dense",
    "episode",
    "place",
    "run_copies",
    "run_episodes",
    "through",
]
