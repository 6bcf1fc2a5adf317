"""The monitor process of each rank, the collective probe and step timing."""
