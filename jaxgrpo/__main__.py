from jaxgrpo.cli.main import run

run()
