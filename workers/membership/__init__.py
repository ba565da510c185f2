"""Who trains together, and since when: a rendezvous by generations that survives the death of any worker.

    MembershipServer   (server.py) one for a job; rules.py decides for it
    Member             (member.py) one for a worker process

Neither torch nor ray: a member speaks to the server over one TCP connection. Where its process dies, its system ends
that connection, and all others know at once.
"""
