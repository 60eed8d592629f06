"""Types, metrics and errors that every other package uses."""
