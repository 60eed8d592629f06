"""What a run folder says, as one HTML file or in the terminal: `jaxgrpo report`."""
