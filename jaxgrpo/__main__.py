from jaxgrpo.cli import run

run()
