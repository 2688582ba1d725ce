"""What a RayService has that its running cluster has not, and the slices replaced for it."""
