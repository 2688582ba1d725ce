"""Named bytes in a folder or a bucket, behind one narrow protocol."""
