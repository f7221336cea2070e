"""What is done with a script's training loop, once it is found."""
