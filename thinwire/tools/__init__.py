"""Tools that measure: the product does not import them, and users of the optimizers do not need them.

lab      several machines in one: hosts as network namespaces, joined by shaped links
doctor   what a machine says of itself and measures of another, and what follows from it
drill    real jobs, disturbed: what a death costs, and whether a job keeps one history
"""
