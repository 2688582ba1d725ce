"""Versions of a model beside each other: which takes a request, and whose slice comes free."""
