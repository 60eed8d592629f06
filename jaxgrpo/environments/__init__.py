"""Tools and environments: what answers a sample between its turns."""
