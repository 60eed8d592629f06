"""What a run leaves: its folder, log, terminal, warnings, reports and files of rollouts."""
