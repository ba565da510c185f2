"""Ray Train whose workers come and go one by one: the others keep their processes and what they hold.

Ray Train's own answer to a lost worker, or to another number of them, is to stop all and start all again. Here Ray
Train's controller, `fit()`, storage and state pages stay, over a worker group of our own (group.py):

    trainer.py           ElasticTrainer: what a driver calls, and what it changes of Ray Train's controller
    group.py             the worker group: who is gone, whom to start and whom to let go
    bring_up.py          one slot: its actor, which can be adopted and ends when nobody asks for it any more; how it
                         gets from nothing, or from a living worker, to a running train function
    failures.py          whose is the error of a train function: the worker's, or the job's; does a slot die too often?
    worker_side.py       what a train function asks: its slot, the membership server's address, whether to leave
    membership_actor.py  the actor that holds the membership server, the number wanted, and the janitor; the line to it
    plan.py, leftovers.py  how the job's actors and placement groups are called, found and removed

Nothing is imported here: worker_side must stay cheap, and Ray Train takes seconds.
"""
