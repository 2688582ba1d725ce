"""The first run of an engine on hardware that nobody has seen it on: stages, evidence, verdict."""
