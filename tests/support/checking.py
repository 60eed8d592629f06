"""The type checker of the tests: beartype, with whole numbers allowed where a float may stand."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
