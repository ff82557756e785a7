"""Makes the research rules modes of a configuration."""

from __future__ import annotations

from functools import partial

from st_cached_extras.zbp.estimators import exact
from st_cached_extras.zbp.modes import register_mode
from st_cached_extras.zbp.research.controls import capture, noise, replay, zero
from st_cached_extras.zbp.research.direct_feedback import direct_feedback_alignment, direct_random_target_projection
from st_cached_extras.zbp.research.feedback_alignment import feedback_alignment
from st_cached_extras.zbp.research.opzo import OPZO, pseudo_zeroth_order
from st_cached_extras.zbp.research.score_probes import ProbedScores
from st_cached_extras.zbp.research.slices import slice_probes

register_mode("fa", feedback_alignment)
register_mode("dfa", direct_feedback_alignment, taught_by_output=True, ignores_skip=True)
register_mode("drtp", direct_random_target_projection, taught_by_output=True, ignores_skip=True)
register_mode(OPZO, pseudo_zeroth_order, taught_by_output=True)
register_mode("zero", zero)
register_mode("noise", noise)
register_mode("capture", capture)
register_mode("replay", replay)
register_mode("slice", slice_probes)
register_mode("score_k", exact, inside=partial(ProbedScores, queries_too=False))
register_mode("score_qk", exact, inside=partial(ProbedScores, queries_too=True))
