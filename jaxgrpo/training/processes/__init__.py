"""The processes of a run: their start and end, what watches them, what is saved."""
