"""What all algorithms share: flat vectors, the torch.optim shell, exchanges during backward, saving."""
