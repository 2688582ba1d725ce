"""What a run asks of the application, and what the answers are judged by."""
