"""Files of ``torch.save`` and of each rank."""
