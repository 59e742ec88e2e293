"""`python -m shoal.router`."""

from shoal.router.main import command

command()
