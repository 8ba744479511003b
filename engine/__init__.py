"""What makes the lab fast and safe: sampling, packing, folders in and out, settings, resume,
processes."""
