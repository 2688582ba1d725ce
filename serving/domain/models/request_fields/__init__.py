"""The closed table of what engines do with the fields of a request, and what follows from it.

`rules` has the words, `sampling` and `records` the rows, `routes` what a route does not read,
`refusals` what follows for values, `page` the page of the documentation.
"""
