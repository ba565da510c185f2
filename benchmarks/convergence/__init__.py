"""Do the compressed optimizers reach the loss of their dense baselines at equal samples? Paired by seed, on real data.

study (what is compared) -> pool (which cases still run, in processes) -> run_case (one case, four ranks) -> results
(one file a case) -> paired (statistics) -> table, pictures.
"""
