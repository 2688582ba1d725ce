"""Files that engines load or leave behind: weights, compiled programs, and the stores of both."""
