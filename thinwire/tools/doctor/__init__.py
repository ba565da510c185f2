"""What is wrong with boxes and the links between them, before a job suffers from it. `thinwire doctor` shows it.

facts        what a box says of itself
link         two doctors meet: who proves what, and what a message looks like
probe        what one box measures of another
listener     what a box does for the doctor of another
examination  all boxes, every pair of them
findings     what follows from all that: a pure function
on_ray       the same on every node of a Ray cluster; the only module that knows Ray
clusters     who starts that as a job, and reads what it found; pods: on Kubernetes
"""
