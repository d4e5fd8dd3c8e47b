"""What recording costs a training."""
