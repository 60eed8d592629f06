"""The edge of the package: model folders, checkpoints, data and run files."""
