"""What `thinwire plan` does: rehearse a job's steps, know the link, predict the whole run and whether compression pays.

schedule.py     the steps of a run, and how many are of which kind, by method
rehearsal.py    what the processor does in a step of each method, on the job's own model, and what sending costs it
scripts.py      what a step of a script of the user's own computes, and the process in which it runs
children.py     processes beside one another, and what they say
forecast.py     from all that to seconds, bytes and a verdict
run.py          `thinwire plan`
"""
