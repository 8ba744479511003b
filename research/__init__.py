"""What was found with the lab, and how: probes of one model, experiments of many runs."""
