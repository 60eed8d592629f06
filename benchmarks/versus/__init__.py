"""jaxgrpo beside PyTorch trainers: the same work, in turn, after it is shown to be the same."""
