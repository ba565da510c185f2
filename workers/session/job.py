"""What a worker of a job runs in its session: the script of a user, or the loop of a built-in recipe."""

from __future__ import annotations

import torch

from thinwire.comm import PeerLost, SoloGroup
from thinwire.comm.protocol import Group
from thinwire.contract.spec import ScriptSpec, TrainSpec
from thinwire.contract.summary import Summary
from thinwire.workers.error_words import in_words
from thinwire.workers.membership import MembershipError
from thinwire.workers.ranks import Ranks, RunEnded
from thinwire.workers.recipes import recipe_of
from thinwire.workers.session import recipe_loop
from thinwire.workers.session.begin import begin, placed
from thinwire.workers.session.script import run_script, tells_of_a_peer, without_secrets
from thinwire.workers.session.surroundings import Left, Run, Surroundings
from thinwire.workers.telemetry.reporter import Reporter


def run_job(
    spec: TrainSpec | ScriptSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter
) -> Summary | None:
    """Train to the end, going on from the newest whole checkpoint of the run's folder. Collective.

    Returns the summary, for which rank 0's history.jsonl must be in the folder; None on the other ranks.
    Raises: whatever this worker cannot go on with, such as DataError, ScriptError, NonFiniteInput, NonFiniteLoss,
    ReplicasDiffer and what a script raises, with the last checkpoint kept; where the ranks are elastic the others are
    told first, and go on. PeerLost where the ranks are fixed, after which a restart goes on from the checkpoint;
    MembershipError where they are elastic and there is no place for this worker any more: Dismissed, where it was asked
    to leave and has handed over; RunEnded, where another worker has failed for good.
    """
    group: Group = SoloGroup() if ranks.elastic else ranks.form(0, False, {})
    around = Surroundings(ranks, device, run, reporter, spec.checkpoint, group, spec, spec.start)
    with placed(around) as begun:
        try:
            if isinstance(spec, ScriptSpec):
                run_script(spec.recipe, begun)
            else:
                with begin() as session:
                    recipe_loop.train(recipe_of(spec), session)
        except Left as left:
            raise left.reason from None
        except BaseException as error:
            is_known = isinstance(error, MembershipError | RunEnded) or any(one.told for one in begun)
            if ranks.elastic and not is_known:
                words = in_words(error)
                ranks.fail(without_secrets(words, spec.recipe) if isinstance(spec, ScriptSpec) else words)
            if not ranks.elastic and group.size > 1 and tells_of_a_peer(error):
                raise PeerLost(f"the script's own collective failed: {error}") from error
            raise
    return begun[0].summary
