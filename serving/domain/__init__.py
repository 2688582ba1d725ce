"""The nouns that processes exchange: slices, hosts, loads, plans, versions, errors.

It is the one package of `serving` that autoscaling and load tests may import. It knows the standard
library, pydantic and YAML; it starts nothing and asks nobody.
"""
