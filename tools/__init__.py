"""Making the tiny model, previewing a weighting, and a second task to start from."""
