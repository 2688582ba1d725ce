"""The closed table of what engines do with the fields of a request, and the judges that read it.

`rules` has the words, `sampling` and `records` the rows, `routes` what a route does not read, `judge`
the refusals, `page` the page of the documentation.
"""
