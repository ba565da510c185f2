"""A job of a script, whose workers are real processes under a membership server of the test."""

from pathlib import Path

import torch

from tests.workers.loop.elastic_job import ElasticJob

SCRIPTS = Path(__file__).parent / "scripts"


class ScriptJob(ElasticJob):
    """As ElasticJob, with `entry` of a folder. told: its first argument is the job's folder."""

    def __init__(self, run_dir, limits, entry, *args, steps, folder=SCRIPTS, told=True, server=None, **spec):
        super().__init__(run_dir, limits, steps=steps, server=server)
        given = [str(run_dir), *map(str, args)] if told else list(map(str, args))
        recipe = {"name": "script", "entry": entry, "working_dir": str(folder), "args": given}
        workers = {"min": limits.min, "max": 7}
        self.spec = {"recipe": recipe, "workers": workers, "checkpoint": {"every_steps": 10}, **spec}

    def finals(self):
        """What each process has saved at its end, by the script."""
        return [torch.load(file, weights_only=False) for file in sorted(self.run_dir.glob("final-*"))]
