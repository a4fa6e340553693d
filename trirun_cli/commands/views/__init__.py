"""What commands show while they run."""
