"""Who is admitted, which engine a request is on, and where it goes when that one is lost."""
