"""What a run takes on devices that need not be here: plans made by compiling its programs."""
