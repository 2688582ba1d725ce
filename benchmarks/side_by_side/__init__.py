"""Slicewise beside others at the same work, in pairs: one server up at a time.

`loads` says what is asked, `systems` who answers, `client` asks, `pair` measures, `records` keeps
what was measured, and `report` makes a page of it.
"""
