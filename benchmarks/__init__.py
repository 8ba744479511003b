"""Speed and memory, beside what the machine could do at most."""
