"""Where a model's weights come from, how an engine reads them, and which revision they are."""
