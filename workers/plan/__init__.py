"""What `thinwire plan` does: rehearse a job's steps, know the link, predict the whole run and whether compression pays.
And `thinwire what-if`: the same of a cluster that nobody has, where nothing is measured.

schedule.py     the steps of a run, and how many are of which kind, by method
asked.py        them as a job file or a script's optimizer says them
ways.py         what a step of each kind computes and sends, by method
rehearsal.py    what the processor does in a step of each method, on the job's own model, and what sending costs it
scripts.py      what a step of a script of the user's own computes, and the process in which it runs
children.py     processes beside one another, and what they say
forecast.py     from all that to seconds, bytes and a verdict
run.py          `thinwire plan`
catalogue.py    models and devices by name
cluster.py      late boxes, jitter, deaths and returns over a run
what_if.py      `thinwire what-if`

schedule, ways, forecast, catalogue, cluster and what_if import no torch.
"""
