"""Updates of parameters and moments in one pass over memory, on the CPU.

loops      what is computed, compiled by numba
updates    the same for torch's vectors; `fits` says for which
descend    parameters move along the momentum that received rows say: by updates or in plain torch, bit for bit alike
"""
