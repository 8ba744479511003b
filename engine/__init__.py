"""What makes the lab fast and safe: sampling, packing, folders, settings, resume, processes."""
