"""The three papers, literally: float64, lists of workers, nothing fast. What the optimizers are held against."""
