"""Who exchanges: groups of ranks over torch.distributed or threads, and how they find out that one is gone."""
