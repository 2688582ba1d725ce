"""The batch lane: files of requests that are answered when there is room, each line once."""
