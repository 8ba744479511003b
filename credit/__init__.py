"""Ways of spreading credit that need more than one function: a critic, fresh samples, a state, preference pairs."""
