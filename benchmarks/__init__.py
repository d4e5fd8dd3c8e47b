"""What recording costs a training, and reading a trace."""
