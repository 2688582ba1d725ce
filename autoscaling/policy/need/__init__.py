"""What raises the need beyond what is forecast, and what keeps it from falling."""
