"""`jaxgrpo check`: what a method climbs, by enumerating every group of two small games."""
