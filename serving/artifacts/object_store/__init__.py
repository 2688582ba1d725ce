"""Holds named bytes in a folder or a bucket, behind one narrow protocol."""
